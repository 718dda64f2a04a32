"""Fails if docs/kernels.md does not name a kernel's source, or if tools/kernel_code.py miscounts a listing that is known.

usage: kernel_code.py <repository>
"""

import sys
from pathlib import Path

X86 = """
0000000000000000 <product>:
   0:\tmov    %rsp,%rbp
   3:\tvxorps %xmm0,%xmm0,%xmm0
  10:\tvmovups (%rdi),%ymm4
  14:\tvfmadd231ps (%rsi),%ymm4,%ymm0
  18:\tvfmadd231ps 0x20(%rsi),%ymm4,%ymm1        # 40 <product+0x40>
  1c:\tvfmadd231ps -0x40(%rbp),%ymm4,%ymm2
  20:\tadd    $0x20,%rdi
  24:\tcmp    %rdi,%rax
  28:\tjne    10 <product+0x10>
  2a:\tvmovaps %ymm5,%ymm6
  2e:\tvfmadd231ps %ymm5,%ymm6,%ymm6
  32:\tjb     2a <product+0x2a>
  36:\tjmp    0 <product>
  3a:\tret
"""
# The first loop carries ymm0 to ymm2 and reads the stack once; the second computes a new ymm6 in each pass; the third has loops within.
X86_SAYS = {"loops": 1, "loops_on_stack": 1, "largest": {"accumulators": 3, "sums": 3, "registers": 4, "on_stack": 1}}
AARCH64 = """
0000000000000000 <product>:
   0:\tldr\tq4, [x0], #16
   4:\tldr\tq5, [sp, #32]
   8:\tfmla\tv0.4s, v4.4s, v5.s[0]
   c:\tfmla\tv1.4s, v4.4s, v5.s[1]
  10:\tcmp\tx0, x1
  14:\tb.ne\t0 <product>  // b.any
  18:\tret
"""
AARCH64_SAYS = {"loops": 1, "loops_on_stack": 1, "largest": {"accumulators": 2, "sums": 2, "registers": 4, "on_stack": 1}}
TILES = """
0000000000000000 <product>:
   0:\ttileloadd (%rax,%rbx,1),%tmm4
   6:\ttdpbf16ps %tmm5,%tmm4,%tmm0
   b:\ttdpbf16ps %tmm6,%tmm4,%tmm1
  10:\tjne    0 <product>
"""
TILES_SAYS = {"loops": 1, "loops_on_stack": 0, "largest": {"accumulators": 2, "sums": 2, "registers": 0, "on_stack": 0}}
RESOURCES = """
arch = sm_90a
 Function _Z1aPf:
  REG:168 STACK:0 SHARED:1024 LOCAL:0 CONSTANT[0]:560 TEXTURE:0 SURFACE:0 SAMPLER:0
 Function _Z1bPf:
  REG:64 STACK:48 SHARED:0 LOCAL:0 CONSTANT[0]:560 TEXTURE:0 SURFACE:0 SAMPLER:0
"""
RESOURCES_SAY = [{"architecture": "sm_90a", "kernels": 2, "registers": 168, "stack_bytes": 48, "shared_bytes": 1024}]


def violations(root, kernel_code):
    for listing, says in ((X86, X86_SAYS), (AARCH64, AARCH64_SAYS), (TILES, TILES_SAYS)):
        if kernel_code.read_listing(listing) != says:
            yield f"kernel_code.py reads {kernel_code.read_listing(listing)} in a listing with {says}"
    if kernel_code.read_resources(RESOURCES) != RESOURCES_SAY:
        yield f"kernel_code.py reads {kernel_code.read_resources(RESOURCES)} of GPU kernels with {RESOURCES_SAY}"
    page = (root / "docs/kernels.md").read_text(encoding="utf-8")
    for path in sorted([*root.glob("src/cpu/kernels/*.cpp"), *root.glob("src/cuda/kernels/*.cu")]):
        source = path.relative_to(root)
        if path.name != "table.cpp" and f"`{source}`" not in page:
            yield f"{source}: in no section of docs/kernels.md"


def main():
    root = Path(sys.argv[1]).resolve()
    sys.path.insert(0, str(root / "tools"))
    sys.dont_write_bytecode = True
    import kernel_code
    found = list(violations(root, kernel_code))
    print("\n".join(found) or "every kernel's source is on the page")
    sys.exit(1 if found else 0)


main()
