"""Which calls on a GPU's tensors rapt.torch leaves to PyTorch. Needs no GPU: test_cuda.py has what does."""

from contextlib import contextmanager
from types import SimpleNamespace
from unittest import mock

import pytest
import rapt._model_attention
import rapt.flash_attn
import rapt.torch
import torch
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

ours = rapt.torch.scaled_dot_product_attention

pytestmark = pytest.mark.usefixtures("without_fallbacks")


class Model(torch.nn.Module):
    def forward(self, x):
        return functional.scaled_dot_product_attention(x, x, x, is_causal=True)


def cuda_entries(*entries):
    return mock.patch.object(rapt._refusals, "_cuda_entries", return_value=list(entries))


def entry(arithmetic, dtypes, largest, largest_value, phase="prefill", operation="attention"):
    kernel = {"operation": operation, "phase": phase, "arithmetic": arithmetic, "dtypes": dtypes, "unusable": "", "opt_in": ""}
    return kernel | {"min_head_dim": 1, "max_head_dim": largest, "max_value_head_dim": largest_value}


ALL = ["f32", "bf16", "f16", "i8"]
SIMT, PREFILL = entry("f32", ALL, 8192, 576), entry("bf16", ["bf16", "i8"], 256, 256)
LATENT, NAIVE = entry("bf16", ["bf16"], 576, 512, "all"), entry("f32", ALL, 8192, 8192, "naive")
MERGE = entry("bf16", ["bf16"], 8192, 8192, "all", "merge_states")
GPU_CASES = [
    ([], torch.float32, 16, "tensors on a GPU: "),
    ([SIMT | {"unusable": "no CUDA device"}], torch.float32, 16, "rapt cannot run: no CUDA device"),
    ([SIMT], torch.float32, 16, ""),
    ([SIMT, NAIVE, MERGE], torch.float32, 600, "more than 576 columns"),
    ([SIMT], torch.bfloat16, 16, "torch.bfloat16 on a GPU, for which dispatch has no tensor-core kernel"),
    ([PREFILL | {"opt_in": "only if forced"}, SIMT], torch.bfloat16, 16, "no tensor-core kernel"),
    ([PREFILL, SIMT], torch.bfloat16, 16, ""),
    ([PREFILL, SIMT, MERGE], torch.bfloat16, 264, "no tensor-core kernel"),
    ([PREFILL, LATENT, SIMT], torch.bfloat16, 264, ""),
    ([PREFILL, LATENT, SIMT, NAIVE], torch.bfloat16, 520, "heads of 520 and 520 columns on a GPU, for which .* no tensor-core"),
    ([PREFILL, LATENT, SIMT], torch.float16, 264, "no tensor-core kernel"),
    ([PREFILL, SIMT], torch.float16, 16, "no tensor-core kernel"),
]


@pytest.mark.parametrize("entries, dtype, d, reason", GPU_CASES)
def test_what_goes_to_pytorch_on_a_gpu(entries, dtype, d, reason, monkeypatch):
    """On tensors without memory, which need no GPU."""
    monkeypatch.delenv("RAPT_KERNEL", raising=False)
    mode = torch._subclasses.fake_tensor.FakeTensorMode()
    with mode:
        x = torch.empty(2, 9, 4, d, dtype=dtype, device="cuda").transpose(1, 2)
    operator = torch.ops.rapt.scaled_dot_product_attention.default
    with cuda_entries(*entries), rapt.torch.enabled(), mode:
        if reason:
            with pytest.raises(rapt.torch.FallbackWarning, match=reason):
                ours(x, x, x)
        else:
            out = ours(x, x, x)
            assert (out.device, out.dtype, out.stride()) == (x.device, dtype, x.stride())
            for strict in (True, False):
                graph = torch.export.export(Model(), (x,), strict=strict).graph
                assert operator in [node.target for node in graph.nodes]
        with pytest.raises(rapt.torch.FallbackWarning, match="different devices"):
            ours(x, x, torch.empty(x.shape, dtype=dtype))


def test_the_operator_on_a_gpu_says_what_is_missing():
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    key = torch._C.DispatchKey.CUDA
    assert torch._C._dispatch_has_kernel_for_dispatch_key("rapt::scaled_dot_product_attention", key)
    x = torch.empty(2, 4, 9, 16, device="meta")
    with pytest.raises(ValueError, match="out: got a tensor on meta; wanted one on the cpu"):
        rapt._sdpa.forward(x, x, x, None, False, None, False)


def backward(name, dtypes, largest, phase="all", takes=()):
    """An entry, and the words of problems that it takes beside types and sizes."""
    return entry("", dtypes, largest, largest, phase, "attention_backward") | {"name": name, "takes": takes}


EVERYTHING = {"mask", "bias", "dbias", "alibi", "dalibi", "softcap", "sinks", "dsinks", "dropout"}
TILES = backward("tiles", ["bf16", "f16"], 128, takes=EVERYTHING - {"dbias", "dalibi"})
PAIR_BY_PAIR = backward("pair by pair", ["f32", "bf16", "f16"], 8192, "naive", EVERYTHING)


@pytest.fixture
def dispatch():
    """Dispatch over entries of a GPU, of problems that rapt's own can read."""
    explain = rapt._core.explain_problem

    @contextmanager
    def over(*entries):
        def choose(problem, *limits):
            explain(problem.replace("device=cuda ", ""), *limits)
            words = dict(word.partition("=")[::2] for word in problem.split()[1:])
            assert words.pop("device") == "cuda"
            dtype, d, dv, _ = words.pop("dtype"), int(words.pop("d")), int(words.pop("dv")), words.pop("sq")
            for e in entries:
                if dtype in e["dtypes"] and max(d, dv) <= e["max_head_dim"] and words.keys() <= set(e["takes"]):
                    return SimpleNamespace(entry=e["name"])
            raise ValueError("problem: no entry takes it")

        rapt._refusals._phase_of.cache_clear()
        with cuda_entries(*entries), mock.patch.object(rapt._core, "explain_problem", choose):
            yield

    yield over
    rapt._refusals._phase_of.cache_clear()


def on_gpu(*shape, dtype=torch.bfloat16):
    with torch._subclasses.fake_tensor.FakeTensorMode():
        return torch.empty(*shape, dtype=dtype, device="cuda").requires_grad_(dtype is not torch.bool)


MASK, BIAS, FIXED_BIAS = on_gpu(9, 9, dtype=torch.bool), on_gpu(9, 9), on_gpu(9, 9).detach()
SINKS, ROW_SINKS = on_gpu(4), on_gpu(2, 4, 9, 1)
GRADIENTS = [
    ("sdpa", {}, True),
    ("sdpa", {"d": 128, "dv": 64}, True),
    ("sdpa", {"d": 64, "dv": 136}, False),
    ("sdpa", {"d": 136}, False),
    ("sdpa", {"dtype": torch.float16}, True),
    ("sdpa", {"dtype": torch.float32}, False),
    ("sdpa", {"heads": 8}, True),
    ("sdpa", {"heads": 12}, True),
    ("sdpa", {"mask": MASK}, False),
    ("sdpa", {"mask": BIAS}, False),
    ("models", {}, True),
    ("models", {"mask": MASK}, True),
    ("models", {"bias": BIAS}, False),
    ("models", {"bias": FIXED_BIAS}, True),
    ("models", {"sinks": SINKS}, True),
    ("models", {"sinks": ROW_SINKS}, True),
    ("models", {"softcap": 30.0}, True),
    ("models", {"dropout": 0.1}, True),
    ("flash", {}, True),
    ("flash", {"sinks": SINKS}, True),
    ("flash", {"alibi": SINKS}, False),
    ("flash", {"alibi": SINKS.detach()}, True),
    ("flash", {"softcap": 30.0}, True),
    ("flash", {"dropout": 0.1}, False),
    ("flash", {"dtype": torch.float32}, False),
]


def differentiates(function, d=64, dv=0, dtype=torch.bfloat16, heads=4, mask=None, bias=None, sinks=None, alibi=None, softcap=None, dropout=0.0):
    q, v = on_gpu(2, heads, 9, d, dtype=dtype), on_gpu(2, 4, 9, dv or d, dtype=dtype)
    if function == "sdpa":
        by_rapt = rapt._refusals.differentiates(q, v, mask)
        assert bool(rapt._refusals.gradient_refusal(q, q, v, mask)) != by_rapt
        return by_rapt
    if function == "models":
        return rapt._model_attention.differentiates(q, q, v, mask, bias, sinks, True, -1, softcap, 0.25, dropout)
    return rapt._flash_attn.differentiates(q, v, alibi, sinks, softcap or 0.0, dropout)


@pytest.mark.parametrize("function, call, wanted", GRADIENTS)
def test_whose_gradients_on_a_gpu(dispatch, function, call, wanted):
    """Those of rapt where dispatch has an entry that is not naive."""
    for entries, has_entry in (((TILES, PAIR_BY_PAIR), True), ((TILES,), True), ((PAIR_BY_PAIR,), False), ((), False)):
        with dispatch(*entries):
            assert differentiates(function, **call) == (wanted and has_entry)


def test_gradients_of_gpu_tensors_in_flash_attn(dispatch):
    """Recorded where rapt computes them, and refused before the forward where it does not: in a graph, too."""

    class Flash(torch.nn.Module):
        def forward(self, x):
            return rapt.flash_attn.flash_attn_func(x, x, x, causal=True)

    operator = torch.ops.rapt.flash_attention.default
    with dispatch(TILES, PAIR_BY_PAIR):
        x = on_gpu(2, 9, 4, 64, dtype=torch.float32)
        with pytest.raises(NotImplementedError, match="q: got tensors on cuda:0, .*; wanted .*tensors on the cpu, or torch.no_grad"):
            rapt.flash_attn.flash_attn_func(x, x, x)
        # PyTorch for CPUs cannot record gradients of such tensors: it is told that they are wanted.
        x = x.detach().bfloat16()
        with mock.patch.object(rapt._refusals, "needs_grad", lambda *_: True), x.fake_mode:
            graph = torch.export.export(Flash(), (x,), strict=True).graph
    assert operator in [node.target for node in graph.nodes]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_masks_are_rounded_for_pytorch(dtype):
    """To the query's type, and finite numbers to finite ones: what hides a key is another thing."""
    lowest = torch.finfo(torch.float32).min
    mask = torch.tensor([0.1, lowest, -1e6, -torch.inf, torch.inf, torch.nan]).requires_grad_()
    got = rapt._sdpa.rounded(mask, torch.empty(1, dtype=dtype))
    most = torch.finfo(dtype).max
    wanted = torch.tensor([0.1, -most, max(-1e6, -most), -torch.inf, torch.inf, torch.nan], dtype=dtype)
    assert got.dtype is dtype and torch.equal(got[:5], wanted[:5]) and got[5].isnan() and got.requires_grad
    for other in (mask.bfloat16(), mask > 0):
        assert rapt._sdpa.rounded(other, torch.empty(1, dtype=torch.float16)) is other
    assert rapt._sdpa.rounded(mask, torch.empty(1)) is mask


def test_meta_tensors_need_no_kernel():
    """FLOPs of a model on the meta device, whatever GPU there is."""
    q, k, v = (torch.empty(2, 9, 4, 64, device="meta", requires_grad=True) for _ in range(3))
    with FlopCounterMode(display=False) as counted:
        out = rapt.flash_attn.flash_attn_func(q, k, v)
    assert out.is_meta
    assert counted.get_total_flops() == 2 * 4 * 9 * 9 * (64 + 64) * 2


@pytest.mark.parametrize("name", ["scaled_dot_product_attention", "attention", "flash_attention"])
def test_operators_of_gradients_have_kernels_on_a_gpu(name):
    for operator in (name, name + "_with_lse", name + "_backward"):
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"rapt::{operator}", torch._C.DispatchKey.CUDA)
