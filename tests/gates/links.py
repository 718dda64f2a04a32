"""Fails if a relative link or an image of a Markdown file leads nowhere: to no file, or to no heading of one.

usage: links.py <repository>
"""

import re
import subprocess
import sys
from pathlib import Path

LINK = re.compile(r"!?\[(?:[^\]\\]|\\.)*\]\(([^)\s]+)\)")


def without_code(text):
    return re.sub(r"`[^`\n]*`", "", re.sub(r"(?ms)^```.*?^```", "", text))


def anchors(text):
    """GitHub's: letters, digits, - and _ of a heading in lower case, spaces as -; repeated ones are numbered."""
    names = set()
    for heading in re.findall(r"(?m)^#+ +(.*?) *$", re.sub(r"(?ms)^```.*?^```", "", text)):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        name = base = re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-")
        number = 0
        while name in names:
            number += 1
            name = f"{base}-{number}"
        names.add(name)
    return names


def pages(root):
    """Those under version control; in a copy without it, or without git, all but builds."""
    listed = subprocess.run(["env", "git", "-C", str(root), "ls-files", "*.md"], capture_output=True, text=True, check=False)
    if listed.returncode == 0 and listed.stdout:
        return [path for path in map(root.joinpath, listed.stdout.splitlines()) if path.exists()]
    return [path for path in sorted(root.rglob("*.md")) if path.relative_to(root).parts[0] != "build"]


def main():
    root = Path(sys.argv[1]).resolve()
    broken, count = [], 0
    for page in pages(root):
        for target in LINK.findall(without_code(page.read_text(encoding="utf-8"))):
            if re.match(r"[a-z]+:", target):
                continue
            count += 1
            name, _, anchor = target.partition("#")
            path = (page.parent / name).resolve() if name else page
            if not path.exists() or root not in (path, *path.parents):
                broken.append(f"{page.relative_to(root)}: {target}: no such file")
            elif anchor and (path.suffix != ".md" or anchor not in anchors(path.read_text(encoding="utf-8"))):
                broken.append(f"{page.relative_to(root)}: {target}: no such heading")
    print("\n".join(broken) or f"{count} links")
    sys.exit(1 if broken or not count else 0)


main()
