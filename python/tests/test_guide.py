"""The Python of docs/python.md and README.md runs as it stands."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", ["docs/python.md", "README.md"])
def test_examples(name):
    pytest.importorskip("transformers")
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / name).read_text(encoding="utf-8"), re.M | re.S)
    assert blocks
    exec(compile("\n".join(blocks), name, "exec"), {"__name__": "guide"})
