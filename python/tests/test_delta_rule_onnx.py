"""ONNX's LinearAttention by rapt.delta_rule, against a loop in float64."""

import numpy as np
import pytest
import rapt
from delta_rule_reference import delta_rule


def onnx_linear_attention(
    query, key, value, past_state=None, decay=None, beta=None, *, q_num_heads, kv_num_heads, update_rule, scale=0.0
):  # fmt: skip
    """ONNX's LinearAttention by rapt: tensors [B, T, heads * size]; decay [B, T, heads * size] or [B, T, heads], beta
    [B, T, heads] or [B, T, 1]. Returns (output, present_state)."""
    sizes = {"q": (query, q_num_heads), "k": (key, kv_num_heads), "v": (value, kv_num_heads)}
    q, k, v = (np.ascontiguousarray(x).reshape(*x.shape[:2], n, -1) for x, n in sizes.values())
    if decay is not None and decay.shape[-1] != kv_num_heads:
        decay = decay.reshape(k.shape)
    if beta is not None:
        beta = np.broadcast_to(beta, (*beta.shape[:2], kv_num_heads))
    out, state = rapt.delta_rule(
        q, k, v, decay, beta, rule=update_rule, scale=scale or None, initial_state=past_state, return_state=True
    )
    return out.reshape(*out.shape[:2], -1), state


@pytest.mark.parametrize("readers", [1, 3])
@pytest.mark.parametrize("of_channels", [False, True])
@pytest.mark.parametrize("one_beta", [False, True])
@pytest.mark.parametrize("update_rule", ["linear", "gated", "delta", "gated_delta"])
def test_linear_attention_of_onnx(update_rule, of_channels, one_beta, readers):
    rng = np.random.default_rng(0)
    B, T, H, D, V = 2, 11, 2, 16, 24
    query, key, value = (rng.standard_normal((B, T, n), np.float32) for n in (H * readers * D, H * D, H * V))
    key /= np.sqrt(D, dtype=np.float32)
    decay = -rng.random((B, T, H * D if of_channels else H), np.float32) if "gated" in update_rule else None
    beta = rng.random((B, T, 1 if one_beta else H), np.float32) if "delta" in update_rule else None
    past = rng.standard_normal((B, H, D, V), np.float32)
    options = {"q_num_heads": H * readers, "kv_num_heads": H, "update_rule": update_rule}
    output, present = onnx_linear_attention(query, key, value, past, decay, beta, **options)
    wanted, states = delta_rule(
        query.reshape(B, T, -1, D), key.reshape(B, T, H, D), value.reshape(B, T, H, V),
        None if decay is None else decay.reshape((B, T, H, D) if of_channels else (B, T, H)),
        None if beta is None else np.broadcast_to(beta, (B, T, H)), rule=update_rule, initial_state=past
    )  # fmt: skip
    np.testing.assert_allclose(output, wanted.reshape(B, T, -1), rtol=0, atol=2e-5)
    np.testing.assert_allclose(present, states[:, -1], rtol=0, atol=2e-5)
    # In two calls, from the state that the first one leaves.
    cut = [[None if x is None else x[:, a:b] for x in (query, key, value, decay, beta)] for a, b in ((0, 4), (4, T))]
    first, state = onnx_linear_attention(*cut[0][:3], past, *cut[0][3:], **options)
    second, last = onnx_linear_attention(*cut[1][:3], state, *cut[1][3:], **options)
    np.testing.assert_allclose(np.concatenate((first, second), 1), output, rtol=0, atol=1e-5)
    np.testing.assert_allclose(last, present, rtol=0, atol=1e-5)
