"""rapt.flash_attn as `flash_attn`, as libraries look for it."""

import importlib
import importlib.metadata
import importlib.util
import sys
import types

import pytest
import torch
from rapt import flash_attn


@pytest.fixture
def installed():
    flash_attn.install()
    yield
    flash_attn.uninstall()


def test_modules(installed):
    import flash_attn as module
    from flash_attn import flash_attn_func, flash_attn_with_kvcache
    from flash_attn.bert_padding import index_first_axis, pad_input, unpad_input
    from flash_attn.flash_attn_interface import flash_attn_varlen_func

    assert flash_attn_func is flash_attn.flash_attn_func and flash_attn_varlen_func is flash_attn.flash_attn_varlen_func
    assert flash_attn_with_kvcache is module.flash_attn_interface.flash_attn_with_kvcache
    assert all(callable(f) for f in (index_first_axis, pad_input, unpad_input))
    assert module.__version__ == flash_attn.__version__ == importlib.metadata.version("flash_attn")
    assert importlib.metadata.version("flash-attn") == module.__version__
    assert "flash-attn" in importlib.metadata.packages_distributions()["flash_attn"]
    for name in ("flash_attn", "flash_attn.bert_padding", "flash_attn.flash_attn_interface"):
        assert importlib.util.find_spec(name).name == name
    with pytest.raises(ImportError):
        importlib.import_module("flash_attn.layers")


def test_it_comes_and_goes():
    before = dict(sys.modules), list(sys.meta_path)
    for _ in range(2):
        flash_attn.install()
        flash_attn.install()
        assert "flash_attn" in sys.modules
        flash_attn.uninstall()
        flash_attn.uninstall()
        assert importlib.util.find_spec("flash_attn") is None and "flash_attn.bert_padding" not in sys.modules
        with pytest.raises(importlib.metadata.PackageNotFoundError):
            importlib.metadata.version("flash-attn")
    assert (dict(sys.modules), list(sys.meta_path)) == before


def test_another_flash_attn_stays(monkeypatch, tmp_path):
    other = types.ModuleType("flash_attn")
    monkeypatch.setitem(sys.modules, "flash_attn", other)
    with pytest.raises(ImportError, match="flash_attn: got a module without a spec"):
        flash_attn.install()
    flash_attn.uninstall()
    assert sys.modules["flash_attn"] is other
    monkeypatch.delitem(sys.modules, "flash_attn")
    (tmp_path / "flash_attn.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ImportError, match=r"flash_attn: got .*flash_attn\.py"):
        flash_attn.install()


def test_padding(installed):
    from flash_attn.bert_padding import index_first_axis, pad_input, unpad_input

    x = torch.randn(3, 5, 2, 4, requires_grad=True)
    mask = torch.tensor([[1, 1, 0, 0, 0], [0, 0, 0, 0, 0], [0, 1, 1, 1, 1]])
    rows, indices, borders, longest, used = unpad_input(x, mask)
    assert torch.equal(rows, x[mask.bool()]) and borders.tolist() == [0, 2, 2, 6] and borders.dtype is torch.int32
    assert (longest, used.tolist()) == (4, [2, 0, 4]) and torch.equal(index_first_axis(x.flatten(0, 1), indices), rows)
    padded = pad_input(rows, indices, 3, 5)
    assert torch.equal(padded, x * mask[:, :, None, None])
    padded.sum().backward()
    assert torch.equal(x.grad, torch.ones_like(x) * mask[:, :, None, None])
    spare = torch.tensor([[0, 0, 1, 0, 0], [1, 0, 0, 0, 0], [0, 0, 0, 0, 0]])
    _, _, borders, _, used = unpad_input(x, mask.bool(), spare.bool())
    assert borders.tolist() == [0, 3, 4, 8] and used.tolist() == [2, 0, 4]


def test_transformers_takes_it_where_there_is_a_gpu(installed, monkeypatch):
    """Without one transformers asks no further, whatever is installed."""
    utils = pytest.importorskip("transformers.utils.import_utils")
    attention = importlib.import_module("transformers.modeling_flash_attention_utils")
    caches = (utils._package_distribution_mapping, utils.is_flash_attn_2_available, utils.is_flash_attn_greater_or_equal)
    try:
        for gpu in (False, True):
            monkeypatch.setattr(utils, "is_torch_cuda_available", lambda gpu=gpu: gpu)
            for cached in caches:
                cached.cache_clear()
            assert utils.is_flash_attn_2_available() is gpu
        assert utils.is_flash_attn_greater_or_equal("2.3.3")
        functions = attention._lazy_imports("flash_attention_2")
        names = ("flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache")
        assert [functions[i] for i in range(3)] == [getattr(flash_attn, name) for name in names]
        takes = attention._lazy_define_process_function(functions[1]).keywords["supports_mapping"]
        assert all(takes[name] for name in ("dropout_p", "window_size", "softcap", "deterministic", "s_aux", "max_seqlen_q", "block_table"))
    finally:
        for cached in caches:
            cached.cache_clear()
