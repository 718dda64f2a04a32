"""The sections of docs/kernels.md, which tests hold each kernel, and what bench/results says of it."""

import csv
import json
import math
import re
from pathlib import Path

FIELDS = ("Sources", "Entries", "Sizes", "Data", "Limits")


def sections(root):
    """{kernel: {"computes", "sources", "entries", "sizes", "data", "limits"}}, in the page's order. What a section lacks is empty."""
    text = (root / "docs/kernels.md").read_text(encoding="utf-8")
    found = {}
    for section in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
        name, _, body = section.partition("\n")
        computes, *bullets = re.split(r"^- ", body, flags=re.MULTILINE)
        fields = {}
        for bullet in bullets:
            title, rest = re.match(r"\*\*(\w+)\*\*:(.*)", bullet, re.DOTALL).groups()
            items = [" ".join(item.split()) for item in re.split(r"^  - ", rest, flags=re.MULTILINE)]
            fields[title] = [item for item in items if item]
        code = {title: re.findall(r"`([^`]+)`", " ".join(fields.get(title, []))) for title in FIELDS}
        found[name.strip()] = {
            "computes": " ".join(computes.split()),
            "sources": code["Sources"],
            "entries": {key: value.split(",") for words in code["Entries"] for key, value in (word.split("=") for word in words.split())},
            "sizes": without_links(fields.get("Sizes", [])),
            "data": [text for text in code["Data"] if re.match(r"\d{4}-", text)],
            "no_data": "" if any(re.match(r"\d{4}-", text) for text in code["Data"]) else " ".join(fields.get("Data", [])),
            "limits": without_links(fields.get("Limits", [])),
        }
    return found


def without_links(texts):
    """Paths from the repository's root for links, which would lead nowhere where a dossier is read."""
    def path(link):
        text, target = link.groups()
        return f"{text}, `{target[3:] if target.startswith('../') else 'docs/' + target}`"

    return [re.sub(r"\[([^]]+)\]\(([^)]+)\)", path, text) for text in texts]


def tests_of(root, operation, backend):
    """Files of tests that take every entry of an operation, with how many cases each has: those that list the registry's entries
    and make problems, arguments or inputs of the operation."""
    name = operation.title().replace("_", "")
    speaks_of = re.compile(rf'\b{name}(Problem|Case|Args)\b|"{operation} ')
    gradients = re.compile(rf'\b{name}Backward(Problem|Case|Args)\b')
    files = sorted((root / "tests/kernel").glob("test_*.cpp"))
    if backend == "cuda":
        files += [path for path in sorted((root / "tests/cuda").glob("test_*.cpp")) if path.stem != "test_host"]
    found = []
    for path in files:
        text = path.read_text(encoding="utf-8")
        lists = re.search(r"every_entry|usable_entries|\bentries\(\)", text)
        if not lists or not speaks_of.search(text) or ("backward" in path.stem and gradients.search(text)):
            continue
        found.append({"file": str(path.relative_to(root)), "cases": len(re.findall(r"(?m)^TEST_CASE\(", text))})
    return found


def rows_of(root, words):
    """The rows of "<file> column=value column~part ..."."""
    file, *conditions = words.split()
    path = root / "bench/results" / file
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".json":
        rows = [{**row, "rapt_error": row["rapt"]["rel_err"], "torch_error": row["torch"]["rel_err"], "ratio": row["vs_torch_back_to_back"]}
                for row in json.loads(text)["rows"]]
    else:
        rows = list(csv.DictReader(text.splitlines()))
    for condition in conditions:
        column, sign, value = re.match(r"(\w+)([=~])(.+)", condition).groups()
        rows = [row for row in rows if (row[column] == value if sign == "=" else value in row[column])]
    return rows


def number(value):
    try:
        return float(value)
    except (TypeError, ValueError):
        return None


def numbers(rows, pattern):
    """Of all columns whose whole name matches; a range such as "81-84" counts as its ends."""
    found = []
    for row in rows:
        for column, value in row.items():
            if re.fullmatch(pattern, column):
                parts = value.split("-") if isinstance(value, str) and re.fullmatch(r"\d+-\d+", value) else [value]
                found += [x for x in map(number, parts) if x is not None]
    return found


def span(values):
    return {"min": min(values), "max": max(values)} if values else None


def ratios_of(rows):
    """(column, [PyTorch's time over rapt's]): of the first column that has them, or by the times of a form of its own in PyTorch."""
    for column in ("ratio", "ratio_best", "gqa_ratio"):
        if numbers(rows, column):
            return column, numbers(rows, column)
    for column in rows[0] if rows else ():
        if re.fullmatch(r"torch_\w+_ms", column):
            return column, [number(row[column]) / number(row["rapt_ms"]) for row in rows if number(row[column])]
    return None, []


def figures(root, words):
    """What the rows of one file say; None of what they do not have. Of files with columns of their own only: the columns' ranges."""
    rows = rows_of(root, words)
    column, ratios = ratios_of(rows)
    errors = {"rapt": numbers(rows, "rapt_error"), "torch": numbers(rows, "torch_error")}
    peak = numbers(rows, "percent") + [100 * share for share in numbers(rows, r"of_peak_(\w+_)?\d+_threads?")]
    read = numbers(rows, "percent_of_read") + [100 * share for share in numbers(rows, r"of_read_\d+_threads?")]
    registers, spills = numbers(rows, "registers"), numbers(rows, "spills")
    found = {
        "times_as_fast_as_torch": {"column": column, **span(ratios), "mean": math.exp(sum(map(math.log, ratios)) / len(ratios))} if ratios else None,
        "largest_error": {side: max(values) for side, values in errors.items()} if all(errors.values()) else None,
        "percent_of_peak": span([share for share in peak if share > 0]),  # 0: was not taken
        "percent_of_read": span(read),
        "registers": span(registers),
        "spilled_bytes": span(spills),
    }
    spans = {} if any(found.values()) else {column: span(numbers(rows, re.escape(column))) for column in (rows[0] if rows else ())}
    return {"data": words, "rows": len(rows), **found, "columns": {column: ends for column, ends in spans.items() if ends}}


def all_pages(root):
    pages = []
    for name, section in sections(Path(root)).items():
        (operation,) = section["entries"].get("operation", ["attention"])
        (backend,) = section["entries"]["backend"]
        pages.append({"name": name, "backend": backend, **section, "data": [figures(root, words) for words in section["data"]],
                      "tests": tests_of(root, operation, backend)})
    return pages
