"""Fails if a recipe of src/README.md leaves out a file: each is held to something that was made by it.

usage: recipes.py <repository>

An example is a name that only the thing itself uses. Where it stands in a file of src or include that the recipe does
not name, whoever follows the recipe would miss that file.
"""

import re
import sys
from pathlib import Path

# (beginning of the recipe, pattern of the example, files that only use it and that nobody has to change)
EXAMPLES = [
    ("A new ISA", r"\bavx512bf16\b", ["src/cpu/kernels/", "src/cpu/tile/", "src/cpu/isa/"]),
    ("A score modifier", r"softcap", ["src/cpu/kernels/", "src/cuda/"]),
    ("A KV layout", r"\bring\b", ["src/cpu/kernels/", "src/cpu/tile/", "src/cuda/", "src/cpu/work_list.cpp", "src/api/c/", "include/rapt/rapt.h"]),
    ("A cache type", r"\bf8e5m2\b", ["src/cuda/", "src/dispatch/", "src/core/fields.cpp", "include/rapt/kv_", "include/rapt/plan.hpp",
                                     "src/operations/attention", "include/rapt/rapt.h", "src/api/c/", "src/cpu/kernels/attention_naive.cpp"]),
    ("An operation", r"merge_states|MergeStates", ["src/api/c/error.cpp", "include/rapt/rapt.hpp"]),
]
COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)


def recipes(readme):
    section = readme[readme.index("## Recipes"):]
    for text in re.split(r"^- ", section, flags=re.MULTILINE)[1:]:
        yield re.match(r"\*\*(.+?)\*\*", text)[1], text


def named(text, operation):
    """The files that a recipe names, below src, include or the repository."""
    return {name.replace("<name>", operation) for name in re.findall(r"`([\w./<>]+\.\w+)`", text)} | \
        {name.strip("`") for name in re.findall(r"`cpu/(?:isa|kernels|tile)`", text)}


def violations(root):
    texts = dict(recipes((root / "src/README.md").read_text()))
    for title, pattern, users in EXAMPLES:
        if title not in texts:
            yield f"src/README.md has no recipe \"{title}\""
            continue
        files = named(texts[title], "merge_states")
        found = 0
        for path in sorted(p for folder in ("src", "include") for p in (root / folder).rglob("*")):
            if path.suffix not in (".hpp", ".cpp", ".h", ".cu", ".cuh"):
                continue
            name = path.relative_to(root).as_posix()
            if not re.search(pattern, COMMENT.sub("", path.read_text())):
                continue
            found += 1
            known = any(name.endswith("/" + file) or name == file or f"/{file}/" in name for file in files)
            if not known and not any(name.startswith(user) for user in users) and "merge_states" not in path.name:
                yield f"{name} has {pattern}, and the recipe \"{title}\" does not name it"
        if not found:
            yield f"nothing has {pattern}: the recipe \"{title}\" needs another example"


def main():
    root = Path(sys.argv[1])
    found = list(violations(root))
    print("\n".join(found) or f"{len(EXAMPLES)} recipes name every file that their examples are in")
    sys.exit(bool(found))


main()
