"""Latent attention (MLA) in transformers' models, over the rows that their caches have.

Layers of DeepSeek-V2 to V3.2, GLM-5, Kimi Linear and others keep a latent and a rotary part of each token, and make the keys and
values of all heads of them for every call, by their method expand_kv. Of a layer that attends by rapt that method says what it would
make (LazyTensor), and few queries attend to the rows themselves: they go into the latent space, and results out of it, as in rapt.mla.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Container
from functools import cache, wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from rapt import _model_fork, _model_sparse, _refusals
from rapt._codes import Codes, OnlyForRapt, Rows
from rapt._mla import Options, Sizes, cheaper_form
from rapt._model_lazy import LazyTensor, materialized

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_MARK = "rapt_latent"

# transformers 5.23 has this method in 17 files. Of a layer whose method does anything else, keys and values are made as it says.
_KNOWN = """
def expand_kv(self, kv_nope, k_rot):
    batch_size, _, seq_length, _ = kv_nope.shape
    key_shape = (batch_size, seq_length, -1, self.qk_nope_head_dim + self.v_head_dim)
    kv_nope = self.kv_b_proj(kv_nope).view(key_shape).transpose(1, 2)
    k_nope, value_states = torch.split(kv_nope, [self.qk_nope_head_dim, self.v_head_dim], dim=-1)
    k_rot = k_rot.expand(-1, k_nope.shape[1], -1, -1)
    key_states = kv_nope.new_empty(*kv_nope.shape[:-1], self.qk_nope_head_dim + self.qk_rope_head_dim)
    key_states[..., :self.qk_nope_head_dim].copy_(k_nope)
    key_states[..., self.qk_nope_head_dim:].copy_(k_rot)
    return (key_states, value_states)
"""


def prepare(model: nn.Module, names: Container[str]) -> None:
    """Lets a model's layers of latent attention, where their config's attention is one of these names, hand over the cache's rows."""
    for kind in {type(layer) for layer in model.modules()}:
        for base in kind.__mro__:
            theirs: Any = vars(base).get("expand_kv")
            if theirs is not None and not hasattr(theirs, _MARK) and _is_known(theirs):
                setattr(base, "expand_kv", _deferring(theirs, names))


def _statements(source: str) -> str:
    """Of a function, without comments, its docstring and the types of its arguments."""
    function: Any = ast.parse(textwrap.dedent(source)).body[0]
    body = [x for x in function.body if not (isinstance(x, ast.Expr) and isinstance(x.value, ast.Constant))]
    return "\n".join([", ".join(x.arg for x in function.args.args), *map(ast.unparse, body)])


@cache
def _is_known(function: Any) -> bool:
    try:
        return _statements(inspect.getsource(function)) == _statements(_KNOWN.strip())
    except (OSError, TypeError, SyntaxError):
        return False


class Tokens(NamedTuple):
    """A layer, and of its tokens latents [b, 1, m, rank] and rotary parts [b, 1, m, rope]."""

    layer: Any
    latent: Tensor | OnlyForRapt
    rope: Tensor | OnlyForRapt


def _deferring(theirs: Any, names: Container[str]) -> Any:
    @wraps(theirs)
    def expand_kv(self: Any, kv_nope: Any, k_rot: Any) -> tuple[Tensor, Tensor]:
        rows = Tokens(self, kv_nope, k_rot)
        if self.config._attn_implementation not in names or not _may_wait(rows):
            now: tuple[Tensor, Tensor] = theirs(self, kv_nope, k_rot)
            return now
        both: list[tuple[Tensor, Tensor]] = []

        def expanded(i: int) -> Tensor:
            if not both:
                both.append(theirs(self, kv_nope, k_rot))
            return both[0][i]

        b, _, m, _ = kv_nope.shape
        nope, v, rope = self.qk_nope_head_dim, self.v_head_dim, k_rot.shape[-1]
        h = self.kv_b_proj.out_features // (nope + v)
        return (
            LazyTensor((b, h, m, nope + rope), k_rot, k_rot.dtype, rows, lambda: expanded(0)),
            LazyTensor((b, h, m, v), k_rot, k_rot.dtype, rows, lambda: expanded(1)),
        )

    setattr(expand_kv, _MARK, True)
    return expand_kv


def _may_wait(rows: Tokens) -> bool:
    """Whether keys and values may stay unmade: in eager code without gradients, with a plain matrix of the rows' type and device, and
    on a GPU with a kernel for one row over many keys, or rows that only rapt reads."""
    if torch.is_grad_enabled() or _refusals.is_traced():
        return False
    latent, rope, projection = rows.latent, rows.rope, rows.layer.kv_b_proj
    if type(projection) is not nn.Linear or projection.bias is not None or projection._forward_hooks or projection._forward_pre_hooks:
        return False
    device = projection.weight.device
    if "forward" in vars(projection) or device.type not in ("cpu", "cuda"):  # replaced, as accelerate does it, or offloaded
        return False
    if torch.is_autocast_enabled(device.type):
        return False
    if isinstance(rope, Codes):  # of a quantised cache that was made without the model's config
        return False
    if any(type(x) is not Tensor and not isinstance(x, OnlyForRapt) or x.device != device for x in (latent, rope)):
        return False
    if rope.dtype not in _DTYPES or not latent.dtype is rope.dtype is projection.weight.dtype or not latent.shape[1] == rope.shape[1] == 1:
        return False
    if device.type == "cpu":
        return True
    rank = latent.shape[-1]
    # Rows of a quantised or forked cache cannot be expanded.
    return isinstance(latent, OnlyForRapt) or _refusals.cuda_decodes(rope.dtype, rank + rope.shape[-1], rank)


def attend(
    query: Tensor,
    rows: Tokens,
    mask: Tensor | None,
    bias: Tensor | None,
    sinks: Tensor | None,
    indices: Tensor | None,
    causal: bool,
    window: int | None,
    cap: float | None,
    scaling: float | None,
) -> Tensor | None:
    """[b, n, h, v] in the latent space. None where that is more work than over the keys and values of all heads, if these can be made."""
    if indices is not None and mask is None:  # a mask of numbers, which the expanded form takes
        return None
    layer, latent, rope = rows
    (b, h, n, d), (m, rank) = query.shape, latent.shape[2:]
    nope, v = layer.qk_nope_head_dim, layer.v_head_dim
    scale = float(d) ** -0.5 if scaling is None else float(scaling)
    sizes = Sizes(b, n, m, nope, rope.shape[-1], rank, v)
    listed = m
    if indices is not None and query.is_cuda and _model_sparse.prefers_lists(n, m, indices.shape[-1], h, is_cuda=True):
        listed = indices.shape[-1]
    if isinstance(latent, Tensor) and cheaper_form(sizes, Options(v, scale, causal, "bottom_right"), listed) == "expanded":
        return None
    mask = materialized(mask)
    w_uk, w_uv = layer.kv_b_proj.weight.view(h, nope + v, rank).split((nope, v), 1)
    absorbed = torch.cat((torch.einsum("bhnd,hdc->bhnc", query[..., :nope], w_uk), query[..., nope:]), -1)
    key = _model_fork.by_parts(_joined, latent, rope)
    value = _model_fork.by_parts(lambda rows: rows if isinstance(rows, Codes) else rows[..., :rank], key)
    plain = bias is None and cap is None and window is None and not isinstance(key, _model_fork.SharedRows)
    if indices is not None and mask is not None and plain and _model_sparse.takes(absorbed, key, value, mask, indices, sinks):
        out = _model_sparse.over_lists(absorbed, key, value, mask, indices, sinks, scale)
    else:
        mask = mask if indices is None else _model_sparse.masked(mask, indices, m)
        left = window - 1 if causal and window is not None and window < m else -1
        out = _model_fork.forward(absorbed, key, value, mask, bias, sinks, causal and n > 1, left, cap, scale)
    return torch.einsum("bnhc,hvc->bnhv", out, w_uv)


def _joined(latent: Rows, rope: Tensor) -> Rows:
    """[b, 1, m, rank + rope]: as it lies in a rapt.transformers.Cache, else a copy."""
    if isinstance(latent, Codes):
        return latent.with_tail(rope)
    (b, _, m, rank), columns = latent.shape, rope.shape[-1]
    neighbours = latent.data_ptr() + rank * latent.element_size() == rope.data_ptr() and latent.stride() == rope.stride()
    if neighbours and latent.stride(2) >= rank + columns and latent.untyped_storage().data_ptr() == rope.untyped_storage().data_ptr():
        return latent.as_strided((b, 1, m, rank + columns), latent.stride())
    return torch.cat((latent, rope), -1)
