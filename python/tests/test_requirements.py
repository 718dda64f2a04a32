"""Importing parts of rapt without the packages that they need, or with ones that are too old."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from rapt._requirements import MINIMUM

ROOT = Path(__file__).parents[2]


def error_of(module, stand_in):
    """The error of importing a module after this code."""
    code = f"import sys, types\n{stand_in}\ntry:\n    import {module}\nexcept Exception as error:\n    print(type(error).__name__, error)"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.parametrize("module", ["rapt.torch", "rapt.mla", "rapt.flash_attn", "rapt.transformers"])
def test_without_pytorch(module):
    extra = "transformers" if module == "rapt.transformers" else "torch"
    wanted = f"ImportError {module} needs torch 2.13 or newer, which is not installed: pip install 'rapt-attention[{extra}]'"
    assert error_of(module, "sys.modules['torch'] = None") == wanted


def test_bench_without_pytorch():
    got = error_of("rapt.bench", "sys.modules['torch'] = None")
    assert got.startswith("ImportError rapt.bench compares with PyTorch, which is not installed: pip install torch.")


def test_without_transformers():
    got = error_of("rapt.transformers", "sys.modules['transformers'] = None")
    assert got.startswith("ImportError rapt.transformers needs transformers 5.23 or newer, which is not installed: pip install")


@pytest.mark.parametrize("version", ["4.57.1", "5.22.0.dev0"])
def test_with_an_old_transformers(version):
    old = f"old = sys.modules['transformers'] = types.ModuleType('transformers'); old.__version__ = {version!r}"
    got = error_of("rapt.transformers", old)
    assert got.startswith(f"ImportError rapt.transformers needs transformers 5.23 or newer; installed is {version}: pip install")


def test_versions_are_those_of_the_extras():
    project = ROOT / "pyproject.toml"
    if not project.exists():
        pytest.skip("installed without its sources")
    for package, oldest in MINIMUM.items():
        asked = re.findall(rf'"{package}>=([\d.]+)"', project.read_text(encoding="utf-8"))
        assert asked and set(asked) == {".".join(map(str, oldest))}
