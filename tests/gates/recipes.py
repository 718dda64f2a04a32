"""Fails if a recipe of src/README.md leaves out a file, or sends its reader to more existing files than the maximum here.

usage: recipes.py <repository> [--list]

Each recipe is held to examples: names that only the thing itself uses. A file where such a name stands must be the
example's own, or the recipe names it, or it is an exception here: it uses the example and need not change for another.
Files that a script of tools writes count for nothing, if a test of python/tests fails when they are stale.
--list prints the files of each example that are not its own.
"""

import re
import sys
from pathlib import Path

FOLDERS = ("src", "include", "bench", "tools", "python/src", "python/rapt", "tests/operations", "tests/support", "tests/fuzz", "cmake")
SUFFIXES = (".hpp", ".cpp", ".h", ".cu", ".cuh", ".py", ".pyi", ".def", ".cmake")
LISTS = ("CMakeLists.txt", "python/CMakeLists.txt", "tests/CMakeLists.txt", "tests/c/CMakeLists.txt", "tests/fuzz/CMakeLists.txt",
         "bench/CMakeLists.txt", "tools/CMakeLists.txt")
TESTS = re.compile(r"/(unit|kernel)_\w+\.cpp$")  # tests of what is there already
COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/|(?m:^\s*#(?!\s*(?:if|define|include))[^\n]*)", re.DOTALL)

# The most existing files that a recipe may send its reader to, over what its examples need. Lower these; the aims are
# 1, 6, 8, 7 and 5.
MAXIMA = {"An operation": 1, "A score modifier": 6, "A KV layout": 7, "An element type": 8, "An ISA": 4}

# (recipe, pattern of the example, pattern of its own files' paths, beginnings of exceptions)
EXAMPLES = [
    ("An ISA", r"(?i)neonbf16", r"/neonbf16\.hpp$", []),
    # Models of PyTorch and ONNX have the modifiers that these pass on; another modifier leaves them as they are.
    ("A score modifier", r"softcap", r"/(modifier|case)_softcap\.hpp$",
     ["python/rapt/_distributed", "python/rapt/distributed.py", "python/rapt/_flash_attn", "python/rapt/_model_attention.py",
      "python/rapt/_model_flash.py", "python/rapt/_sparse_torch.py", "python/rapt/_vllm_attention.py", "python/rapt/flash_attn.py", "python/rapt/transformers.py",
      "python/rapt/vllm.py", "python/src/eager.", "python/src/module.cpp", "src/api/onnxruntime/"]),
    # GPU kernels know rings; a layout that they do not know, they refuse. Processes form another ring, and gather keys, too.
    ("A KV layout", r"\bring\b|KV_RING", r"/(kind|layout)_ring\.[ch]pp$",
     ["src/cuda/", "python/rapt/__init__.py", "python/rapt/_distributed", "python/rapt/distributed.py"]),
    # PyTorch has a function of its own for gathered keys.
    ("A KV layout", r"\bgathered\b|KV_GATHERED|\bkv_counts\b|\bpages_stride_token\b",
     r"/(kind_gathered|layout_gathered|attention/lists|(cpu|cuda)_gathered|gathered_lists)\.([ch]pp|cu)$",
     ["python/rapt/_distributed", "python/rapt/_sparse_torch.py"]),
    ("An element type", r"(?i)\bf8e5m2\b|RAPT_F8E5M2", None, ["python/rapt/_vllm_attention.py"]),  # vLLM has no other types
]


def operation(name, *exceptions):
    pascal = name.title().replace("_", "")
    names = rf"(?<![a-z_]){name}(?!_?[a-z])|\b{pascal}(Args|Problem|Params|Case|Kernels?)\b|_{name.upper()}\b"
    return ("An operation", names, rf"(^|/){name}\w*[/.]", list(exceptions))


# Exceptions: its own files under other names, and files that use it.
EXAMPLES += [
    operation("merge_states", "python/rapt/_cache.py", "python/rapt/_distributed", "python/rapt/_model_fork.py",
              "python/rapt/_vllm_shards.py", "src/cuda/kernels/kernels.hpp", "tools/check.cpp", "tools/command.cpp"),
    operation("rotary_append_kv", "python/rapt/_cache.py", "python/rapt/_model_cache_place.py", "python/rapt/_model_rotary.py",
              "src/api/onnxruntime/", "src/cuda/kernels/append_kv.", "src/cuda/kernels/kernels.hpp"),
    operation("append_kv", "include/rapt/rotary_append_kv", "python/rapt/__init__.py", "python/rapt/_cache.py", "python/rapt/_codes.py",
              "python/rapt/_flash_attn_cache.py", "python/rapt/_fp8_rows.py", "python/rapt/_model_cache_place.py", "python/rapt/_vllm_attention.py", "python/rapt/mla.py",
              "src/api/onnxruntime/", "src/cuda/kernels/kernels.hpp", "src/cuda/tile/append_row.cuh", "src/operations/rotary_append_kv/",
              "tests/operations/rotary_append_kv/"),
    operation("select_topk", "python/rapt/_dsa", "python/rapt/dsa.py", "python/rapt/torch.py", "python/src/dsa.cpp", "src/operations/index_scores/",
              "tests/fuzz/fuzz_validate_index_scores.cpp", "tests/operations/index_scores/"),
    operation("index_scores", "python/rapt/_dsa", "python/rapt/dsa.py", "python/rapt/torch.py", "python/src/dsa.cpp",
              "src/cpu/tile/index_rows.hpp", "tests/fuzz/fuzz_validate_index_scores.cpp"),
    operation("delta_rule_backward", "python/rapt/__init__.py", "python/rapt/_delta_rule", "python/rapt/_distributed", "python/src/delta_rule.cpp", "tests/fuzz/fuzz_validate_delta_rule.cpp"),
]


def recipes(readme):
    section = readme[readme.index("## Recipes"):]
    for text in re.split(r"^- ", section, flags=re.MULTILINE)[1:]:
        yield re.match(r"\*\*(.+?)\*\*", text)[1], text


def named(text):
    """The files that a recipe names, from the root of the repository or below src or include/rapt."""
    return set(re.findall(r"`([\w./<>*-]+\.\w+)`", text))


def is_there(root, file):
    return any(True for folder in ("", "src", "include/rapt") for _ in (root / folder).glob(re.sub(r"<\w+>", "*", file)))


def matches(name, file):
    """Whether the path `name` is the recipe's `file`."""
    pattern = re.sub(r"<\w+>|\\\*", r"[\\w-]+", re.escape(file).replace(r"\<", "<").replace(r"\>", ">"))
    return re.fullmatch(f"(src/|include/rapt/)?{pattern}", name) is not None


def is_generated(root, text):
    by = re.match(r"# Generated by (tools/\w+\.py)", text)
    return bool(by) and any(by[1] in path.read_text() for path in (root / "python/tests").glob("test_*.py"))


def files_with(root, pattern):
    sources = (p for folder in FOLDERS for p in (root / folder).rglob("*") if p.suffix in SUFFIXES)
    for path in sorted((*sources, *(root / name for name in LISTS))):
        name = path.relative_to(root).as_posix()
        text = path.read_text()
        if not TESTS.search(name) and not is_generated(root, text) and re.search(pattern, COMMENT.sub("", text)):
            yield name


def violations(root, lists):
    texts = dict(recipes((root / "src/README.md").read_text()))
    for title, text in texts.items():
        for file in sorted(named(text)):
            if not is_there(root, file):
                yield f'the recipe "{title}" names {file}, which is not there'
    needed = {title: 0 for title in MAXIMA}
    for title, pattern, own, exceptions in EXAMPLES:
        if title not in texts:
            yield f'src/README.md has no recipe "{title}"'
            continue
        found = list(files_with(root, pattern))
        if not found:
            yield f'nothing has {pattern}: the recipe "{title}" needs another example'
        for exception in exceptions:
            if not any(name.startswith(exception) for name in found):
                yield f'{exception} has no {pattern}: it is no exception to the recipe "{title}"'
        edited = [name for name in found
                  if not (own and re.search(own, name)) and not any(name.startswith(e) for e in exceptions)]
        if lists:
            print(f"{title}, {pattern}: {len(edited)}", *edited, sep="\n  ")
        needed[title] = max(needed[title], len(edited))
        files = named(texts[title])
        for name in edited:
            if not any(matches(name, file) for file in files):
                yield f'{name} has {pattern}, and the recipe "{title}" does not name it'
        if len(edited) > MAXIMA[title]:
            yield f'{len(edited)} existing files have {pattern}; the recipe "{title}" may need {MAXIMA[title]} at most'
    for title, most in MAXIMA.items():
        if needed[title] < most:
            yield f'the maximum of "{title}" is {most}, and its examples need {needed[title]}: lower it'


def main():
    root = Path(sys.argv[1])
    found = list(violations(root, "--list" in sys.argv[2:]))
    print("\n".join(found) or f"{len(EXAMPLES)} examples: their recipes name every file that has to change, within the maxima")
    sys.exit(bool(found))


main()
