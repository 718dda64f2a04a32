"""Fails if docs/kernels.md lacks a kernel's source, or a section lacks something that `rapt dossier` prints; and if what reads objects
miscounts a listing that is known. That every entry has a section is tested by tests/cli/test_dossier.py, which can list them.

usage: kernel_pages.py <repository>
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

# Of EntryInfo, as `rapt info --json` names them.
FIELDS = {"backend", "operation", "phase", "arithmetic", "isa"}


def violations(root, pages, objects):
    for listing, says in ((X86, X86_SAYS), (AARCH64, AARCH64_SAYS), (TILES, TILES_SAYS)):
        if objects.read_listing(listing) != says:
            yield f"objects.py reads {objects.read_listing(listing)} in a listing with {says}"
    if objects.read_resources(RESOURCES) != RESOURCES_SAY:
        yield f"objects.py reads {objects.read_resources(RESOURCES)} of GPU kernels with {RESOURCES_SAY}"
    found = pages.all_pages(root)
    for page in found:
        name = page["name"]
        for field in ("computes", "sources", "entries", "sizes", "limits", "tests"):
            if not page[field]:
                yield f"{name}: nothing for {field}"
        if not page["data"] and not page["no_data"]:
            yield f"{name}: neither data nor a word about there being none"
        for field in set(page["entries"]) - FIELDS:
            yield f"{name}: entries have no field {field}"
        for source in page["sources"]:
            if not (root / source).is_file():
                yield f"{name}: {source}: no such file"
        for data in page["data"]:
            if data["rows"] == 0:
                yield f"{name}: no rows in {data['data']}"
            elif not any(value for key, value in data.items() if key not in ("data", "rows")):
                yield f"{name}: no figure of {data['data']}"
        for text in (page["computes"], page["no_data"], *page["sizes"], *page["limits"]):
            if "](" in text:  # from where a dossier is read it leads nowhere
                yield f"{name}: a link in a dossier: {text}"
    kernels = [path for pattern in ("cpu/kernels/*.cpp", "cuda/kernels/*.cu") for path in (root / "src").glob(pattern)]
    listed = {source for page in found for source in page["sources"]}
    for path in sorted(kernels):
        if path.name != "table.cpp" and str(path.relative_to(root)) not in listed:
            yield f"{path.relative_to(root)}: a source of no kernel in docs/kernels.md"


def main():
    root = Path(sys.argv[1]).resolve()
    sys.path.insert(0, str(root / "tools/dossier"))
    sys.dont_write_bytecode = True
    import objects
    import pages
    found = list(violations(root, pages, objects))
    print("\n".join(found) or "every kernel has its page")
    sys.exit(1 if found else 0)


main()
