"""Sphinx's configuration of the documentation site; `tools/dev docs` builds it.

The pages are the repository's Markdown files, where they lie: Sphinx's source folder is the repository. Only this
folder is for the site alone: the front page, and the pages that fill themselves from docstrings and headers' comments.
"""

import re
import shutil
import subprocess
import sys
from pathlib import Path

from sphinx.addnodes import nodes, pending_xref
from sphinx.util.logging import getLogger

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
DOXYGEN = ROOT / "build" / "site_doxygen"
LOG = getLogger(__name__)
sys.path.insert(0, str(HERE))
import docstrings
import headers

project = "rapt"
author = "the rapt authors"
version = release = re.search(r'(?m)^version = "(.+)"', (ROOT / "pyproject.toml").read_text(encoding="utf-8"))[1]
html_title = f"rapt {version}"

extensions = ["myst_parser", "autoapi.extension", "breathe", "sphinx_copybutton"]
root_doc = "docs/site/index"
include_patterns = ["docs/**", "*.md", "src/README.md", "src/cpu/*/README.md", "bench/results/README.md", "tests/data/README.md"]
exclude_patterns = ["README.md"]  # the front page includes it
myst_heading_anchors = 6  # links to headings, with the anchors of code hosts

# Python is read, not imported: the site needs neither a compiler nor PyTorch.
autoapi_dirs = [str(ROOT / "python" / "rapt")]
autoapi_generate_api_docs = False
autoapi_options = ["members", "imported-members"]
autoapi_member_order = "bysource"
python_maximum_signature_line_length = 100
python_use_unqualified_type_names = True
toc_object_entries_show_parents = "hide"
default_role = "code"
suppress_warnings = [
    "autoapi.python_import_resolution",  # PyTorch, transformers and vLLM are not read
    "duplicate_declaration.cpp",  # every header's namespace, and C's enumerations with a typedef of the same name
]

breathe_projects = {"rapt": str(DOXYGEN / "xml")}
breathe_default_project = "rapt"

html_theme = "furo"
pygments_dark_style = "github-dark"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sourcelink = False
html_show_copyright = False


def read_docstring(app, what, name, obj, options, lines):
    lines[:] = docstrings.to_rst(lines)


def short_name(app, env, node, content):
    """Of a type that has no page: Tensor, not torch.Tensor. The page of C++ names what there is."""
    if node.get("refdoc") == "docs/site/cpp/index":
        LOG.warning("nothing is named %s", node["reftarget"], location=node)
    return type(content)(node["reftarget"].rsplit(".", 1)[-1]) if node.get("refdomain") == "py" else None


def link_pages(app, doctree):
    """The names of pages in docstrings and headers' comments, such as docs/contract.md, are links."""
    page = app.env.docname
    for text in list(doctree.findall(nodes.Text)) if page.startswith("docs/site/") else []:
        parts = re.split(r"\b(docs/[\w/]+)\.md\b", text.astext())
        if len(parts) > 1 and not isinstance(text.parent, (nodes.FixedTextElement, nodes.reference)):
            for i in range(1, len(parts), 2):
                target = dict(refdomain="std", reftype="doc", reftarget=f"/{parts[i]}", refexplicit=True, refwarn=True, refdoc=page)
                parts[i] = pending_xref("", nodes.inline("", f"{parts[i]}.md"), **target)
            text.parent.replace(text, [nodes.Text(part) if isinstance(part, str) else part for part in parts])


def shorten_contents(app, doctree):
    """The contents of a C++ or C page list functions and types, not the members of types."""
    page = app.env.docname
    for item in list(app.env.tocs[page].findall(nodes.list_item)) if page.startswith("docs/site/cpp/") else []:
        anchor = item[0][0]["anchorname"]
        if item[0].astext() == "rapt":  # the namespace: what it holds takes its place
            item.parent[:] = [other for each in item.parent for other in (each[1] if each is item else [each])]
        elif re.match("#_CPPv4N(?!4rapt)", anchor):  # a member of a C type
            item.parent.remove(item)
        elif anchor.startswith("#_CPP"):
            del item[1:]


def check_headers():
    pages = [page.read_text(encoding="utf-8") for page in HERE.rglob("*.rst")]
    names = {str(header.relative_to(headers.INCLUDE)) for header in headers.INCLUDE.rglob("*.h*")} - {"rapt.hpp", "export.h"}
    missing = names - {name for page in pages for name in headers.listed(page)}
    if missing:
        sys.exit(f"docs/site/cpp: no page lists {', '.join(sorted(missing))}")


def read_page(app, docname, source):
    source[0] = headers.with_sections(source[0])


def run_doxygen():
    shutil.rmtree(DOXYGEN, ignore_errors=True)
    for header in (ROOT / "include").rglob("*.h*"):
        copy = DOXYGEN / header.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(headers.for_doxygen(header), encoding="utf-8")
    subprocess.run(["doxygen", str(HERE / "Doxyfile")], cwd=DOXYGEN, check=True)


def redirect(app, error):
    """The site begins at index.html."""
    if error is None:
        page = f'<!doctype html><meta http-equiv="refresh" content="0; url={root_doc}.html"><title>rapt</title><a href="{root_doc}.html">rapt</a>\n'
        Path(app.outdir, "index.html").write_text(page, encoding="utf-8")


def setup(app):
    check_headers()
    run_doxygen()
    app.connect("source-read", read_page)
    app.connect("autodoc-process-docstring", read_docstring)
    app.connect("doctree-read", link_pages)
    app.connect("doctree-read", shorten_contents, priority=900)  # once they are collected
    app.connect("missing-reference", short_name)
    app.connect("build-finished", redirect)
