"""rapt's kernels in the models of Hugging Face transformers, on the CPU and, if rapt was built with CUDA, on GPUs.

    import rapt.transformers
    rapt.transformers.register()
    model = AutoModelForCausalLM.from_pretrained(..., attn_implementation="rapt")   # or model.set_attn_implementation("rapt")

Registers the attention function, and with it the function that makes masks. Key heads are not repeated. Causal masks and
sliding windows without padding are not made: the kernel knows where rows sit. Softcap, sinks and position biases are taken.
Padding, packed sequences, chunks and static caches arrive as boolean masks. Rows of padding give 0, as with "sdpa".

Gradients are PyTorch's, as in rapt.torch. Dropout, float64 and what rapt.torch leaves to PyTorch on other devices are computed
by PyTorch operators, with a rapt.torch.FallbackWarning. Weights of attention are not returned: use "eager" for output_attentions.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import causal_mask_function, sdpa_mask

import rapt
from rapt import torch as rapt_torch

__all__ = ["register"]


def register(name: str = "rapt") -> None:
    """Makes `attn_implementation=name` known to transformers."""
    AttentionInterface.register(name, _attention_forward)
    AttentionMaskInterface.register(name, _mask)


def _mask(**arguments: Any) -> Tensor | None:
    """What transformers gives to _attention_forward as attention_mask; its arguments are those of sdpa_mask. None stands
    for "causal, within the layer's sliding window, and query and keys end together", and "all" in layers that are not."""
    if _is_plainly_causal(**arguments):
        return None
    # Its own reasons to leave a causal mask out are about PyTorch's alignment.
    mask: Tensor | None = sdpa_mask(**arguments | {"allow_is_causal_skip": False})
    return mask


def _is_plainly_causal(
    kv_length: int,
    q_length: int | None = None,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Any = causal_mask_function,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    config: Any = None,
    **_: Any,
) -> bool:
    # Versions before q_length had other means to say where rows sit; a tensor of an offset is a static cache's.
    if not allow_is_causal_skip or q_length is None or isinstance(q_offset, Tensor):
        return False
    if local_size is None:
        known = mask_function is causal_mask_function
    else:  # of a window, or of chunks
        windowed = getattr(config, "sliding_window", None) == local_size
        known = windowed and getattr(config, "attention_chunk_size", None) is None
    if not known or q_offset + q_length != kv_offset + kv_length:
        return False
    if attention_mask is None:
        return True
    traced = torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None  # numbers cannot be looked at
    if traced or attention_mask.shape[-1] < kv_offset + kv_length:
        return False
    return bool(attention_mask[:, kv_offset : kv_offset + kv_length].all())


def _attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of [b, hq, n, d] with keys and values of hk heads, as [b, n, hq, dv]; the second result is no weights."""
    if kwargs.get("cache") is not None:
        raise NotImplementedError('cache: got that of continuous batching; wanted "sdpa" or "eager" for it')
    n, m, gqa = query.shape[2], key.shape[2], query.shape[1] != key.shape[1]
    causal = attention_mask is None and bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    left = sliding_window - 1 if causal and sliding_window is not None and sliding_window < m else -1
    causal &= n > 1  # one row at the end sees all
    mask, bias = _mask_and_bias(attention_mask, position_bias)
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    if left < 0 and softcap is None and s_aux is None and (mask is None or bias is None) and not (causal and n != m):
        plain = rapt_torch._is_eager(query, key, value, mask, bias) and not rapt_torch._needs_grad(query, key, value, bias)
        reason = rapt_torch._refusal(query, key, value, mask, gqa) or rapt_torch._preference(query, value)
        if not plain or dropout != 0 or reason:
            out = rapt_torch.scaled_dot_product_attention(
                query, key, value, bias if mask is None else mask, dropout, causal, scale=scale, enable_gqa=gqa
            )
            return out.transpose(1, 2).contiguous(), None
    reason = "dropout" if dropout != 0 else rapt_torch._refusal(query, key, value, None, gqa)
    options = (mask, bias, s_aux, causal, left, softcap, scale)
    if reason:
        rapt_torch._warn(reason)
        return _composed(query, key, value, *options, dropout=dropout), None
    tensors = (query, key, value, mask, bias, s_aux)
    if rapt_torch._is_eager(*tensors) and not rapt_torch._needs_grad(*tensors):
        return _forward(query, key, value, *options), None
    return _operator(query, key, value, *options), None


def _mask_and_bias(mask: Tensor | None, bias: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """A boolean mask and a bias of float32 for transformers' mask of either kind and its position bias."""
    if mask is not None and mask.dtype is not torch.bool:
        bias = mask if bias is None else mask + bias
        mask = None
    return mask, None if bias is None else bias.float()


def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    sinks: Tensor | None,
    causal: bool,
    left: int,
    softcap: float | None,
    scale: float,
) -> Tensor:
    out = _result(query, value)
    with torch.no_grad():
        rapt.attention(
            *(query, key, value),
            causal=causal,
            window=(left, -1) if left >= 0 else None,
            align="bottom_right",
            scale=scale,
            mask=mask,
            bias=bias,
            softcap=softcap,
            sinks=None if sinks is None else sinks.float(),
            out=out.transpose(1, 2),
        )
    return out


def _result(query: Tensor, value: Tensor) -> Tensor:
    b, h, n, _ = query.shape
    return query.new_empty((b, n, h, value.shape[-1]))


@torch.library.custom_op("rapt::attention", mutates_args=(), device_types=("cpu", "cuda"))
def _operator(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    sinks: Tensor | None,
    causal: bool,
    left: int,
    softcap: float | None,
    scale: float,
) -> Tensor:
    return _forward(query, key, value, mask, bias, sinks, causal, left, softcap, scale)


@_operator.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> Tensor:
    return _result(query, value)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:6])
    ctx.options = inputs[6:]


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors
    with torch.enable_grad():
        inputs = [t if t is None or not t.is_floating_point() else t.detach().requires_grad_() for t in saved]
        out = _composed(*inputs, *ctx.options)
    wanted = [i for i, t in enumerate(inputs) if t is not None and t.requires_grad]
    grads: list[Tensor | None] = [None] * (len(inputs) + len(ctx.options))
    for i, t in zip(wanted, torch.autograd.grad(out, [inputs[i] for i in wanted], grad)):
        grads[i] = t
    return tuple(grads)


_operator.register_autograd(_backward, setup_context=_setup_context)


def _composed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    sinks: Tensor | None,
    causal: bool,
    left: int,
    softcap: float | None,
    scale: float,
    dropout: float = 0.0,
) -> Tensor:
    """_forward by PyTorch's operators, with the matrix of scores."""
    b, h, n, _ = query.shape
    m, group = key.shape[2], h // key.shape[1]
    key, value = (t.repeat_interleave(group, 1) for t in (key, value))
    scores = (query @ key.transpose(2, 3)).float() * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias
    distance = torch.arange(m, device=query.device) - torch.arange(m - n, m, device=query.device)[:, None]
    hidden = distance > 0 if causal else torch.zeros_like(distance, dtype=torch.bool)
    if left >= 0:
        hidden = hidden | (distance < -left)
    if mask is not None:
        hidden = hidden | ~mask
    # Twice, so that a row that is hidden altogether is 0 and has no gradient.
    scores = scores.masked_fill(hidden, torch.finfo(scores.dtype).min)
    if sinks is not None:
        scores = torch.cat([scores, sinks.float()[:, None, None].expand(b, h, n, 1)], -1)
    p = torch.softmax(scores, -1)[..., :m].masked_fill(hidden, 0)
    p = torch.nn.functional.dropout(p, dropout).to(value.dtype)
    return (p @ value).transpose(1, 2).contiguous()
