"""Fails if a word of docs/internals/retired_words.md appears as a whole word or phrase.

usage: glossary.py <repository> <file or folder>...

The lists are the first columns of the tables in its sections "Retired ...". The title of a section names the folders that
it is for; without any it is for all.
"""

import re
import sys
from pathlib import Path

TEXT = {".c", ".cmake", ".cpp", ".cu", ".cuh", ".h", ".hpp", ".md", ".py", ".pyi", ".sh", ".txt", ""}


def retired_words(section):
    words = [word for row in re.findall(r"(?m)^\| (`[^|]*) \|", section) for word in re.findall(r"`([^`]+)`", row)]
    if not words:
        sys.exit("docs/internals/retired_words.md: a section of retired words lists none")
    return words


def text_files(path):
    if not path.exists():
        sys.exit(f"{path}: no such file or folder")
    found = sorted(path.rglob("*")) if path.is_dir() else [path]
    return [file for file in found if file.is_file() and file.suffix in TEXT and "__pycache__" not in file.parts]


def pattern_of(section):
    # Words of a phrase may stand on two lines, behind a comment's slashes.
    words = "|".join(re.escape(word).replace(r"\ ", r"\s+(?://+ *)?") for word in retired_words(section))
    return re.compile(rf"(?<![A-Za-z0-9_])(?:{words})(?![A-Za-z0-9_])")


def main():
    root = Path(sys.argv[1])
    lists = root / "docs" / "internals" / "retired_words.md"
    sections = re.split(r"(?m)^## (Retired .*)$", lists.read_text(encoding="utf-8"))[1:]
    rules = [([root / folder for folder in re.findall(r"`([^`]+)`", title)], pattern_of(section))
             for title, section in zip(sections[::2], sections[1::2])]
    found, count = [], 0
    for path in (file for name in sys.argv[2:] for file in text_files(root / name)):
        if path == lists:
            continue
        text = path.read_text(encoding="utf-8")
        count += 1
        for folders, pattern in rules:
            if folders and not any(folder in path.parents for folder in folders):
                continue
            for match in pattern.finditer(text):
                found.append(f"{path.relative_to(root)}:{text.count(chr(10), 0, match.start()) + 1}: {match[0]}")
    print("\n".join(found) or f"{count} files")
    sys.exit(f"{len(found)} retired words; docs/internals/retired_words.md has what to write instead" if found else 0)


main()
