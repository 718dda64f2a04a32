"""Which calls on a GPU's tensors rapt.torch leaves to PyTorch. Needs no GPU: test_cuda.py has what does."""

from unittest import mock

import pytest
import rapt.torch
import torch
from torch.nn import functional

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
