"""Fails if a recipe of src/README.md leaves out a file: each is held to something that was made by it.

usage: recipes.py <repository>

An example is a name that only the thing itself uses. Where it stands in a file that the recipe does not name, whoever
follows the recipe would miss that file. Nor may a recipe name a file that is gone, or an exception here be without use.
"""

import re
import sys
from pathlib import Path

FOLDERS = ("src", "include", "bench", "tools", "python/src", "python/rapt", "tests/oracle", "tests/support", "tests/fuzz")
SUFFIXES = (".hpp", ".cpp", ".h", ".cu", ".cuh", ".py", ".pyi")
LISTS = ("CMakeLists.txt", "python/CMakeLists.txt", "tests/c/CMakeLists.txt")  # of files

# (beginning of the recipe, pattern of the example, part of the names of its own files, beginnings of other files that have
# it: its own, too, or that nobody has to change)
EXAMPLES = [
    ("A new ISA", r"\bneonbf16\b", None, []),
    ("A score modifier", r"softcap", None, []),
    ("A KV layout", r"\bring\b", None, ["src/cpu/kernels/", "src/cuda/", "python/rapt/__init__.py"]),
    ("A KV layout", r"\bgathered\b", None, []),
    ("A cache type", r"\bf8e5m2\b", None, []),
    ("An operation", r"merge_states|Merge(States|Case)", "merge", [
        "python/src/cache.", "python/rapt/_cache.py", "tools/main.cpp", "python/rapt/_info.py"]),
    ("An operation", r"attention_backward|\b(Attention)?Backward(Args|Problem|Params|Case)", "backward", [
        "python/src/call.", "python/rapt/_sdpa", "python/rapt/_sparse_torch.py", "python/rapt/_model_attention.py",
        "python/rapt/_mla.py"]),
    ("An operation", r"delta_rule|DeltaRule(Args|Problem|Params|Case)", "delta_rule", [
        "src/api/c/c_api.hpp", "python/rapt/_fla.py", "python/rapt/_info.py", "python/rapt/torch.py"]),
    ("An operation", r"delta_rule_backward|DeltaRuleBackward(Args|Problem|Params|Case)", "delta_rule", []),
    ("An operation", r"index_scores|IndexScores(Args|Problem|Params|Case)", "index", [
        "python/src/dsa.", "python/rapt/_dsa", "python/rapt/dsa.py", "python/rapt/torch.py"]),
    ("An operation", r"select_topk|SelectTopk(Args|Problem|Params|Case)", "topk", [
        "tests/fuzz/fuzz_validate_index_scores.cpp", "python/src/dsa.", "python/rapt/_dsa", "python/rapt/dsa.py",
        "python/rapt/torch.py", "python/rapt/_info.py"]),
]
COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)


def recipes(readme):
    section = readme[readme.index("## Recipes"):]
    for text in re.split(r"^- ", section, flags=re.MULTILINE)[1:]:
        yield re.match(r"\*\*(.+?)\*\*", text)[1], text


def named(text):
    """The files that a recipe names, below src, include or the repository."""
    return set(re.findall(r"`([\w./<>]+\.\w+|cpu/(?:isa|kernels|tile)|tests/oracle)`", text))


def is_there(root, file):
    return "<" in file or any((root / folder / file).exists() for folder in ("", "src", "include/rapt"))


def violations(root):
    texts = dict(recipes((root / "src/README.md").read_text()))
    for title, text in texts.items():
        for file in sorted(named(text)):
            if not is_there(root, file):
                yield f"the recipe \"{title}\" names {file}, which is not there"
    for title, pattern, own, users in EXAMPLES:
        if title not in texts:
            yield f"src/README.md has no recipe \"{title}\""
            continue
        files = named(texts[title])
        found, unused = 0, set(users)
        sources = (p for folder in FOLDERS for p in (root / folder).rglob("*") if p.suffix in SUFFIXES)
        for path in sorted((*sources, *(root / name for name in LISTS))):
            name = path.relative_to(root).as_posix()
            if not re.search(pattern, COMMENT.sub("", path.read_text())):
                continue
            found += 1
            known = name in files or name not in LISTS and any(
                f"/{name}".endswith(f"/{file}") or f"/{file}/" in f"/{name}" for file in files
            )
            excepted = {user for user in users if name.startswith(user)}
            unused -= excepted
            if not known and not excepted and not (own and own in name):
                yield f"{name} has {pattern}, and the recipe \"{title}\" does not name it"
        if not found:
            yield f"nothing has {pattern}: the recipe \"{title}\" needs another example"
        for user in sorted(unused):
            yield f"{user} has no {pattern}: it is no exception to the recipe \"{title}\""


def main():
    root = Path(sys.argv[1])
    found = list(violations(root))
    print("\n".join(found) or f"{len(EXAMPLES)} examples: their recipes name every file that they are in")
    sys.exit(bool(found))


main()
