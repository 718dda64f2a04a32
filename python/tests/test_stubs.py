"""What type checkers read is what the extension and the package have."""

import subprocess
import sys
from pathlib import Path

import rapt

_ROOT = Path(__file__).resolve().parents[2]


def test_generated_files_are_not_stale():
    """`tools/dev stubs` writes them again."""
    run = subprocess.run([sys.executable, _ROOT / "tools/stubs.py", "--check"], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


def test_a_stale_file_is_named(tmp_path):
    """A copy of the package with another list of names."""
    (tmp_path / "tools").mkdir()
    package = tmp_path / "python/rapt"
    package.mkdir(parents=True)
    (tmp_path / "tools/stubs.py").write_bytes((_ROOT / "tools/stubs.py").read_bytes())
    (package / "_core.pyi").write_bytes((_ROOT / "python/rapt/_core.pyi").read_bytes())
    (package / "_new.py").write_text("__all__ = ['new']\n")
    (package / "_public.py").write_bytes((_ROOT / "python/rapt/_public.py").read_bytes())
    check = [sys.executable, tmp_path / "tools/stubs.py", "--check"]
    run = subprocess.run(check, capture_output=True, text=True)
    assert run.returncode == 1 and run.stderr == "python/rapt/_public.py: stale; `tools/dev stubs` writes what it should be\n"
    subprocess.run(check[:-1], check=True)
    assert "from rapt._new import new" in (package / "_public.py").read_text()
    assert subprocess.run(check).returncode == 0


def test_public_names():
    assert len(set(rapt.__all__)) == len(rapt.__all__)
    for name in rapt.__all__:
        assert getattr(rapt, name) is not None
    assert {"attention", "append_kv", "delta_rule", "dsa", "Explanation", "guards"} <= set(rapt.__all__)
