"""What flash-attn's functions refuse, and by which name; that over a cache is in test_flash_attn_cache.py."""

import pytest
import torch
from rapt.flash_attn import flash_attn_func, flash_attn_kvpacked_func, flash_attn_qkvpacked_func, flash_attn_varlen_func

X, CU = torch.zeros(2, 5, 4, 16), torch.tensor([0, 5, 10])
FLAT = X.flatten(0, 1)
DENSE = {"q": X, "k": X, "v": X}
RAGGED = {"q": FLAT, "k": FLAT, "v": FLAT, "cu_seqlens_q": CU, "cu_seqlens_k": CU, "max_seqlen_q": 5, "max_seqlen_k": 5}


@pytest.mark.parametrize(
    "change, error, message",
    [
        ({"q": X.numpy()}, TypeError, "q: got numpy.ndarray"),
        ({"q": X[0]}, ValueError, r"q: got shape \[5, 4, 16\]; wanted \[b, s, h, d\]"),
        ({"k": None}, TypeError, "k: got None"),
        ({"q": X.double(), "k": X.double(), "v": X.double()}, TypeError, "q: got torch.float64"),
        ({"v": X.half()}, TypeError, "v: got torch.float16; wanted q's torch.float32"),
        ({"k": X[:1], "v": X[:1]}, ValueError, "k: got shape .*; wanted 2 sequences"),
        ({"v": X[:, :4]}, ValueError, "v: got shape"),
        ({"k": X[..., :8]}, ValueError, "k: got shape .* wanted heads of 16 columns"),
        ({"k": X[:, :, :3], "v": X[:, :, :3]}, ValueError, "k: got shape .* divides q's 4"),
        ({"dropout_p": 1.5}, ValueError, "dropout_p: got 1.5"),
        ({"softmax_scale": float("nan")}, ValueError, "softmax_scale: got nan"),
        ({"softmax_scale": "1"}, TypeError, "softmax_scale: got '1'"),
        ({"causal": 1}, TypeError, "causal: got 1"),
        ({"window_size": 4}, TypeError, "window_size: got 4"),
        ({"window_size": (1, 2, 3)}, TypeError, "window_size"),
        ({"window_size": (-2, 0)}, ValueError, r"window_size: got \(-2, 0\)"),
        ({"softcap": -1.0}, ValueError, "softcap: got -1.0"),
        ({"alibi_slopes": torch.zeros(3)}, ValueError, "alibi_slopes: got shape"),
        ({"s_aux": torch.zeros(2, 4)}, ValueError, "s_aux: got shape"),
        ({"deterministic": None}, TypeError, "deterministic: got None"),
        ({"return_attn_probs": 1}, TypeError, "return_attn_probs: got 1"),
        ({"attention_chunk": 8}, NotImplementedError, "attention_chunk: got 8; wanted 0"),
        ({"qv": X}, NotImplementedError, r"qv: got a tensor of shape \[2, 5, 4, 16\]"),
        ({"k_descale": torch.ones(2, 4)}, NotImplementedError, "k_descale"),
        ({"head_mask": None}, TypeError, "head_mask: got an unknown keyword"),
    ],
)
def test_bad_input(change, error, message):
    with pytest.raises(error, match=message):
        flash_attn_func(**DENSE | change)


@pytest.mark.parametrize(
    "change, error, message",
    [
        ({"q": X}, ValueError, "q: got shape"),
        ({"cu_seqlens_q": None}, TypeError, "cu_seqlens_q: got None"),
        ({"cu_seqlens_k": None}, TypeError, "cu_seqlens_k: got None"),
        ({"cu_seqlens_q": CU[:2]}, ValueError, "cu_seqlens_"),
        ({"cu_seqlens_k": torch.tensor([0, 7, 5])}, ValueError, "cu_seqlens_k"),
        ({"cu_seqlens_k": torch.tensor([0, 5, 11])}, ValueError, "cu_seqlens_k"),
        ({"cu_seqlens_q": CU.float()}, TypeError, "cu_seqlens_q"),
        ({"seqused_k": torch.tensor([6, 1])}, ValueError, "seqused_k: got"),
        ({"seqused_k": torch.tensor([1.5, 1.5])}, TypeError, "seqused_k: got torch.float32"),
        ({"seqused_q": torch.tensor([-1, 1])}, ValueError, "seqused_q: got"),
        ({"seqused_q": torch.tensor([1])}, ValueError, "seqused_q: got shape"),
        ({"k": X, "v": X, "block_table": torch.tensor([[0], [7]])}, ValueError, "block_table"),
        ({"k": X, "v": X, "block_table": torch.tensor([[0], [1]]), "seqused_k": torch.tensor([3, 9])}, ValueError, "seqused_k|block_table"),
        ({"k": X.clone().requires_grad_(), "v": X, "block_table": torch.tensor([[0], [1]])}, NotImplementedError, "k: got a tensor that req"),
    ],
)
def test_bad_ragged_input(change, error, message):
    with pytest.raises(error, match=message):
        flash_attn_varlen_func(**RAGGED | change)


def test_packed_input_is_refused_by_its_name():
    with pytest.raises(ValueError, match=r"qkv: got shape \[2, 5, 4, 16\]"):
        flash_attn_qkvpacked_func(X)
    with pytest.raises(ValueError, match="kv: got shape .* wanted 2 in dimension 2"):
        flash_attn_kvpacked_func(X, torch.zeros(2, 5, 3, 4, 16))
    with pytest.raises(TypeError, match="qkv: got torch.float64"):
        flash_attn_qkvpacked_func(torch.zeros(2, 5, 3, 4, 16, dtype=torch.float64))
