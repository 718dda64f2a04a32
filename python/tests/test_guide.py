"""The Python of docs/guide, docs/tutorials and README.md runs as it stands."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = (ROOT / "docs" / "guide", ROOT / "docs" / "tutorials")
PAGES = {
    str(path.relative_to(ROOT)): "\n".join(re.findall(r"^```python\n(.*?)^```", path.read_text(encoding="utf-8"), re.M | re.S))
    for path in (ROOT / "README.md", *sorted(page for folder in FOLDERS for page in folder.rglob("*.md")))
}
# Pages of shell commands, of C++ and of C.
WITHOUT = {"cli.md", "cpp.md", "engine.md", "profiling.md", "python.md", "vllm.md"}


def test_pages_have_examples():
    assert {Path(name).name for name, code in PAGES.items() if not code} == WITHOUT


@pytest.mark.parametrize("name", [name for name, code in PAGES.items() if code])
def test_examples(name):
    pytest.importorskip("transformers")
    import torch

    code = compile(PAGES[name], name, "exec")
    if name.endswith("onnxruntime.md"):
        pytest.skip("compiled only: test_onnxruntime_claims.py runs it")
    if name.endswith("cuda.md") and not torch.cuda.is_available():
        pytest.skip("compiled only: no CUDA device")
    exec(code, {"__name__": "guide"})
