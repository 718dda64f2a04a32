"""Fails if an #include points against the architecture (src/README.md).

usage: include_dag.py <repository>

Each folder has the list of what its files may include; the first line that a file matches decides.
"""

import re
import sys
from pathlib import Path

INCLUDE = re.compile(r"^\s*#\s*include\s+(.+?)\s*(//.*|/\*.*)?$")
STD = r"<[a-z_]+>"
LIST = r'"rapt/(operations|dtypes|isas)\.def"'
C_STD = r"<(std[a-z]+|string)\.h>"
# Plain data and functions that are always inlined, which the kernels of every backend may know.
POD = r'"core/pod\.hpp"'
SEMANTICS = r'"semantics/\w+\.hpp"'
PARAMS = r'"operations/\w+/params\.hpp"'
STDINT = r"<cstd(def|int)>"
# What CPU kernels are, as data: of an operation, of all.
KERNEL_ROWS = [r'"operations/(\w+/kernels|all_kernels)\.hpp"', LIST]
# What a kernel may know besides: the rows it is listed in, xsimd, intrinsics, and freestanding headers that leave no
# code behind. Of kernels' folders, each sees itself and those before it.
KERNEL = KERNEL_ROWS + [POD, SEMANTICS, PARAMS]
CPU_KERNEL = KERNEL + [r'"cpu/registry\.hpp"', r"<xsimd/xsimd\.hpp>", r"<(immintrin|emmintrin|arm_neon)\.h>",
                       r"<(cstddef|cstdint|type_traits|utility|limits|bit)>"]
CUDA_KERNEL = KERNEL + [r"<(algorithm|array|cmath|numeric|optional|type_traits|utility|cuda\w*|cstddef|cstdint)(\.h)?>"]
# Launches, and what the host knows of kernels.
CUDA_HOST = r'"cuda/(\w+/)?\w+\.hpp"'
# The folders without kernels, each with those below it. None sees SIMD, or a backend's kernels.
STANDARD = r"<(?!xsimd|Eigen|fmt|immintrin|cuda|nvtx|ittnotify)[^>]+>"
PUBLIC = r'"rapt/\w+\.(hpp|h|def)"'
CORE = [STANDARD, PUBLIC, r'"core/\w+\.hpp"']
OPERATIONS = CORE + [SEMANTICS, r'"operations/(\w+/)?\w+\.hpp"']
DISPATCH = OPERATIONS + [r'"dispatch/\w+\.hpp"']
# Programs see the public interface, the oracle, how problems are timed and the files beside them, never src.
PROGRAM = [r'"(rapt|support|bench)/[\w/]+\.(hpp|h|def)"', r'"operations/\w+/(case|case_\w+|(all_)?layouts?|layout_\w+|oracle\w*|sums|\w+_inputs|sampler|captured)\.hpp"',
           r"<(?!rapt/)[^>]+>", "beside"]

RULES = [  # (pattern of the path's beginning, or of all of it and $; allowed includes)
    ("include/rapt/interop/", [STD, r'"rapt/\w+\.hpp"', r"<(Eigen/Core|dlpack/dlpack\.h)>"]),
    (r"include/rapt/\w+.h$", [C_STD, r'"rapt/\w+\.(h|def)"']),
    ("include/rapt/enums.hpp$", [r"<cstdint>", LIST]),
    ("include/rapt/", [STD, r'"rapt/\w+\.(hpp|h|def)"']),
    ("src/core/pod.hpp$", [r"<cstdint>", r'"rapt/enums\.hpp"', LIST]),
    ("src/core/float_environment.hpp$", [r"<cstdint>"]),
    ("src/core/itt.hpp$", CORE + [r"<ittnotify\.h>"]),
    ("src/core/", CORE),
    ("src/semantics/", [POD, SEMANTICS]),
    (r"src/operations/\w+/params.hpp$", [POD, SEMANTICS, PARAMS]),
    (r"src/operations/\w+/kernels.hpp$", [STDINT, PARAMS]),
    # What an operation has for backends and guards stands above dispatch.
    (r"src/operations/\w+/cpu\w*.[ch]pp$", DISPATCH + [r'"cpu/\w+\.hpp"']),
    (r"src/operations/\w+/cuda\w*.[ch]pp$", DISPATCH + [r"<cuda[^>]*>", CUDA_HOST]),
    (r"src/operations/\w+/guards\w*.[ch]pp$", DISPATCH + [r'"guards/\w+\.hpp"']),
    ("src/operations/", OPERATIONS),
    ("src/dispatch/", DISPATCH),
    ("src/guards/", DISPATCH + [r'"guards/\w+\.hpp"']),
    # ONNX Runtime's provider uses rapt as any program does.
    ("src/api/onnxruntime/", [STANDARD, PUBLIC, r'"api/onnxruntime/\w+\.hpp"']),
    ("src/api/", DISPATCH + [r'"guards/guards\.hpp"', r'"api/c/c_api\.hpp"']),
    ("src/cpu/registry.hpp$", [STDINT] + KERNEL_ROWS),
    ("src/cpu/isa/", CPU_KERNEL + [r'"cpu/isa/\w+\.hpp"', r'"core/float_environment\.hpp"', r"RAPT_LEAF_\(RAPT_(ISA|AMX_MODEL)\)"]),
    ("src/cpu/tile/", CPU_KERNEL + [r'"cpu/(isa|tile)/\w+\.hpp"']),
    ("src/cpu/kernels/", CPU_KERNEL + [r'"cpu/(isa|tile|kernels)/\w+\.hpp"']),
    ("src/cpu/", DISPATCH + [r'"cpu/\w+\.hpp"']),
    ("src/cuda/tile/", CUDA_KERNEL + [r'"cuda/tile/\w+\.(cuh|hpp)"']),
    ("src/cuda/hopper/", CUDA_KERNEL + [r'"cuda/(tile|hopper)/\w+\.(cuh|hpp)"']),
    ("src/cuda/kernels/", CUDA_KERNEL + [r'"cuda/(tile|hopper|kernels)/\w+\.(cuh|hpp)"']),
    ("src/cuda/", DISPATCH + [r"<(cuda|nvtx)[^>]*>", CUDA_HOST]),
    ("tools/", PROGRAM),
    ("bench/", PROGRAM),
    ("python/", PROGRAM),
    ("tests/support/", PROGRAM),
    (r"tests/operations/\w+/(unit|kernel|fake|emulated)_", [".+"]),
    ("tests/operations/", PROGRAM),
]


def violations(root):
    for folder in ("include", "src", "tools", "bench", "tests/support", "tests/operations"):
        for path in sorted((root / folder).rglob("*")):
            if path.suffix not in (".hpp", ".cpp", ".h", ".c", ".cu", ".cuh"):
                continue
            name = path.relative_to(root).as_posix()
            allowed = next((patterns for pattern, patterns in RULES if re.match(pattern, name)), [])
            if "beside" in allowed:
                allowed = allowed + [f'"{re.escape(header.name)}"' for header in path.parent.glob("*.hpp")]
            for number, line in enumerate(path.read_text().splitlines(), 1):
                match = INCLUDE.match(line)
                if match and not any(re.match(pattern, match[1]) for pattern in allowed):
                    yield f"{name}:{number}: may not include {match[1]}"


def main():
    root = Path(sys.argv[1])
    if not (root / "include/rapt/rapt.hpp").is_file():
        sys.exit(f"{root} is not the repository")
    found = list(violations(root))
    print("\n".join(found) or "every include points the right way")
    sys.exit(bool(found))


main()
