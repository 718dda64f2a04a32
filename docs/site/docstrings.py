"""Docstrings as reStructuredText. rapt writes them for `help()`: paragraphs, indented code, and arguments in two columns."""

import re

ROW = re.compile(r"^(\S.*?) {2,}(\S.*)$")
NAMES = re.compile(r"^\w+(, \w+)*$")  # that are longer than their column, on a line of their own


def escaped(text):
    """Nothing but `code` is markup."""
    parts = re.split(r"(`[^`]+`)", text)
    return "".join(part if i % 2 else re.sub(r"[\\*|`]|_(?!\w)", r"\\\g<0>", part) for i, part in enumerate(parts))


def blocks(lines):
    block = []
    for line in [*lines, ""]:
        if line.strip():
            block.append(line)
        elif block:
            yield block
            block = []


def is_table(block):
    first = ROW.match(block[0]) or NAMES.match(block[0]) and len(block) > 1 and block[1].startswith("    ")
    return bool(first) and all(line.startswith("    ") or ROW.match(line) or NAMES.match(line) for line in block)


def to_rst(lines):
    for block in blocks(lines):
        if all(line.startswith("    ") for line in block):
            yield from (".. code-block:: python", "", *block)
        elif is_table(block):
            for line in block:
                name, text = ROW.match(line).groups() if ROW.match(line) else (line, "")
                if line.startswith(" "):
                    yield f"   {escaped(line.strip())}"
                else:
                    yield f"``{name}``"
                    if text:
                        yield f"   {escaped(text)}"
        else:
            yield from map(escaped, block)
        yield ""
