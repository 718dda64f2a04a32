"""Public headers as Doxygen should read them: the first comment is about the file, C's comments are documentation, the
lists of .def files are written out, and private members are left out. And the lists of headers in pages: of

    .. headers:: tensor.hpp types.hpp

each header becomes a section."""

import re
from pathlib import Path

INCLUDE = Path(__file__).parents[2] / "include" / "rapt"
PAGE_LIST = re.compile(r"(?m)^\.\. headers:: (.+)$")
LIST = re.compile(r'#define (RAPT_\w+)\(([^)]*)\)((?:[^\n]*\\\n)*[^\n]*)\n#include "rapt/(\w+\.def)"\n')


def documented(text):
    """/* ... */ behind code is about that code, by itself about what follows."""
    text = re.sub(r"(?m)^( *)/\* ", r"\1/** ", text)
    return re.sub(r"(?m)(?<=\S)( +)/\* ", r"\1/**< ", text)


def written_out(header, match):
    macro, parameters, body, name = match.groups()
    body = re.sub(r" *\\\n *", " ", body).strip()
    rows = re.sub(r"(?s)^/\*.*?\*/\n", "", (header.parent / name).read_text(encoding="utf-8"))  # without what it says of the list
    lines = []
    for line in documented(rows).splitlines():
        row = re.match(rf"{macro}\((.*?)\)(.*)", line)
        if row:
            made = body
            for parameter, value in zip(parameters.split(", "), row[1].split(", ")):
                made = re.sub(rf"(?:##)?\b{parameter}\b(?:##)?", value, made)
            lines.append(made + row[2])
        elif not line.startswith("#"):
            lines.append(line)
    return "\n".join(lines) + "\n"


def for_doxygen(header):
    text = LIST.sub(lambda match: written_out(header, match), header.read_text(encoding="utf-8"))
    if header.suffix == ".h":
        return re.sub(r"^/\*\* ", "/** @file\n * ", documented(text))
    text = re.sub(r"(?m)^ private:\n(?:.*\n)*?(?=};)", "", text)
    first = re.match(r"(?:// .*\n)+", text)[0]
    return "/// @file\n" + first.replace("// ", "/// ") + text[len(first):]


def listed(page):
    """The headers that a page's text lists."""
    return [word for line in PAGE_LIST.findall(page) for word in line.split()]


def with_sections(page):
    def sections(match):
        titles = [f"rapt/{name}" for name in listed(match[0])]
        return "\n".join(f"{title}\n{'-' * len(title)}\n\n.. doxygenfile:: {Path(title).name}\n" for title in titles)

    return PAGE_LIST.sub(sections, page)
