"""Writes the C++ source with what `rapt dossier` has from the build: the pages of kernels, and what their objects say.

usage: make.py <output> <what objects.py wrote> <compiler> <CUDA's compiler>
"""

import json
import sys
from pathlib import Path

import pages


def main():
    output, objects, compiler, cuda_compiler = sys.argv[1:]
    code = json.loads(Path(objects).read_text(encoding="utf-8"))
    strings = []
    for page in pages.all_pages(Path(__file__).resolve().parents[2]):
        page["compiler"] = cuda_compiler if page["backend"] == "cuda" else compiler
        page["code"] = [found for found in code if found["source"] in page["sources"]]
        strings.append(f'      R"dossier({json.dumps(page)})dossier",\n')
    Path(output).write_text(f"""// Made by tools/dossier/make.py.
#include "tools/dossier.hpp"

namespace rapt::tools {{

std::span<const char* const> kernel_pages() {{
  static constexpr const char* kPages[] = {{
{"".join(strings)}  }};
  return kPages;
}}

}}  // namespace rapt::tools
""", encoding="utf-8")


main()
