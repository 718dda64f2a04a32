"""What calls of flash-attn's functions share: arguments checked and brought to rapt's terms, and results to
flash-attn's."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

import rapt
from rapt import _refusals
from rapt._flash_attn import attend, used_rows
from rapt._scalars import boolean, finite, integer, real

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)

# Keywords of flash-attn 3 that say how a GPU divides the work: no result depends on them.
_HINTS = frozenset({"fa_version", "num_splits", "pack_gqa", "scheduler_metadata", "sm_margin"})
# Those that change results in a way that rapt has no kernels for, with what they may be.
_REFUSED = {"attention_chunk": 0, "k_descale": None, "q_descale": None, "q_v": None, "qv": None, "v_descale": None}


class Options(NamedTuple):
    """What is no tensor, as attend() takes it."""

    scale: float | None
    causal: bool
    window: tuple[int, int]
    softcap: float
    dropout_p: float = 0.0


def options(softmax_scale: Any, causal: Any, window_size: Any, softcap: Any, dropout_p: Any = 0.0) -> Options:
    cap = (softcap if type(softcap) is float else real("softcap", softcap)) or 0.0
    if cap != 0 and not 1e-30 <= cap <= 1e30:
        raise ValueError(f"softcap: got {softcap}; wanted 0 (none), or 1e-30 to 1e30")
    # Of `self.training and 0.1` it may be False.
    share = 0.0 if dropout_p is False or dropout_p is None else real("dropout_p", dropout_p)
    if share is None or not 0 <= share <= 1:
        raise ValueError(f"dropout_p: got {dropout_p}; wanted 0 to 1")
    scale = None if softmax_scale is None else finite("softmax_scale", softmax_scale)
    return Options(scale, boolean("causal", causal), _window(window_size), cap, share)


def _window(given: Any) -> tuple[int, int]:
    wanted = "a pair (left, right) of ints; None or -1 leaves a side open"
    if given is None:
        return -1, -1
    if not isinstance(given, (tuple, list)) or len(given) != 2:
        raise TypeError(f"window_size: got {given!r}; wanted {wanted}")
    left, right = given
    if type(left) is not int or type(right) is not int:
        left, right = (-1 if side is None else integer("window_size", side) for side in given)
    if not (-1 <= left < 2**63 and -1 <= right < 2**63):
        raise ValueError(f"window_size: got {given!r}; wanted {wanted}")
    return left, right


def check_extras(extras: dict[str, Any]) -> None:
    """Keyword arguments that flash-attn 2 does not have."""
    for name, value in extras.items():
        if name in _HINTS:
            continue
        if name not in _REFUSED:
            raise TypeError(f"{name}: got an unknown keyword; wanted flash-attn's arguments")
        if value is not None and (isinstance(value, Tensor) or value != _REFUSED[name]):
            got = f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else repr(value)
            raise NotImplementedError(f"{name}: got {got}; wanted {_REFUSED[name]}: rapt has no kernels for it")


def check(tensors: dict[str, Tensor | None], shapes: dict[str, str]) -> None:
    """Raises where a tensor is none, or its number of dimensions is not that of its shape in words."""
    _refusals.check_tensors(tensors, "an array by torch.from_dlpack()")
    for name, shape in shapes.items():
        x = tensors[name]
        if x is None:
            raise TypeError(f"{name}: got None; wanted a tensor {shape}")
        if x.dim() != shape.count(",") + 1:
            raise ValueError(f"{name}: got shape {list(x.shape)}; wanted {shape}")


def check_rows(q: Tensor, k: Tensor, v: Tensor, names: tuple[str, str, str] = ("q", "k", "v")) -> None:
    """Raises where types, heads or head dimensions do not fit; `names` are the caller's."""
    for name, x in zip(names, (q, k, v)):
        if x.dtype not in _DTYPES:
            raise TypeError(f"{name}: got {x.dtype}; wanted torch.bfloat16, torch.float16 or torch.float32")
        if x.dtype != q.dtype:
            raise TypeError(f"{name}: got {x.dtype}; wanted q's {q.dtype}")
    if k.shape[:-1] != v.shape[:-1]:
        rows = ", ".join(map(str, k.shape[:-1]))
        raise ValueError(f"{names[2]}: got shape {list(v.shape)}; wanted [{rows}, dv], as {names[1]} has rows")
    if q.shape[-1] != k.shape[-1]:
        wanted = f"heads of {q.shape[-1]} columns, as {names[0]} has"
        raise ValueError(f"{names[1]}: got shape {list(k.shape)}; wanted {wanted}")
    if k.shape[-2] == 0 or q.shape[-2] % k.shape[-2] != 0:
        wanted = f"a number of heads that divides {names[0]}'s {q.shape[-2]}"
        raise ValueError(f"{names[1]}: got shape {list(k.shape)}; wanted {wanted}")


def check_modifiers(alibi_slopes: Tensor | None, s_aux: Tensor | None, batch: int, heads: int) -> None:
    for name, x, shapes in (("alibi_slopes", alibi_slopes, ((heads,), (batch, heads))), ("s_aux", s_aux, ((heads,),))):
        if x is None:
            continue
        if x.dtype not in _DTYPES:
            raise TypeError(f"{name}: got {x.dtype}; wanted torch.float32, torch.bfloat16 or torch.float16")
        if tuple(x.shape) not in shapes:
            wanted = " or ".join(str(list(shape)) for shape in shapes)
            raise ValueError(f"{name}: got shape {list(x.shape)}; wanted {wanted}")


def check_without_gradients(why: str, **tensors: Tensor | None) -> None:
    if not torch.is_grad_enabled():
        return
    for name, x in tensors.items():
        if x is not None and x.requires_grad:
            wanted = "one that does not, or torch.no_grad()"
            raise NotImplementedError(f"{name}: got a tensor that requires grad; wanted {wanted}: {why}")


Signature = tuple[Any, ...]


def signature_of(usual: Iterable[Any], rare: Iterable[Any]) -> Signature | None:
    """All that the checks of a call's arguments depend on; None where that is more than types and shapes: where not all
    tensors are plain and without gradients, or one of `rare` is given."""
    if not _refusals.is_eager():
        return None
    for x in rare:
        if x is not None:
            return None
    grad = torch.is_grad_enabled()
    parts: list[Any] = []
    for x in usual:
        if x is None or type(x) is int:
            parts.append(type(x))
        elif _refusals.is_plain(x) and not (grad and x.requires_grad):
            parts += (x.shape, x.dtype)
        else:
            return None
    return tuple(parts)


class Passed:
    """Signatures of calls that passed all checks, which loops repeat: in small calls checks cost more than the kernel."""

    _MOST = 1024

    def __init__(self) -> None:
        self._signatures: set[Signature] = set()

    def __contains__(self, signature: Signature | None) -> bool:
        return signature is not None and signature in self._signatures

    def add(self, signature: Signature | None) -> bool:
        """Whether there is one."""
        if signature is None:
            return False
        if len(self._signatures) >= self._MOST:
            self._signatures.clear()
        self._signatures.add(signature)
        return True


def returned(lse: Tensor) -> Tensor:
    """lse as flash-attn has it: ragged [h, total], and +inf of rows without keys."""
    lse = lse.masked_fill(lse == -torch.inf, torch.inf)
    return lse.T.contiguous() if lse.dim() == 2 else lse


def compact(x: Tensor, borders: Tensor, used: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """The rows of x [total, ...] that are among the first used[i] of their sequence i, as indices, and the borders of the shorter
    sequences that they form. `name`: of `used` in errors."""
    if used.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name}: got {used.dtype}; wanted torch.int32 or torch.int64")
    if used.shape != (borders.shape[0] - 1,):
        raise ValueError(f"{name}: got shape {list(used.shape)}; wanted [{borders.shape[0] - 1}]")
    if not torch.compiler.is_compiling() and bool(((used < 0) | (used > borders.diff())).any()):
        raise ValueError(f"{name}: got {used.tolist()}; wanted 0 to the sequences' lengths, {borders.diff().tolist()}")
    row = torch.arange(x.shape[0], device=x.device)
    sequence = torch.searchsorted(borders[1:].long(), row, right=True)
    ends = torch.cat((borders[:-1] + used, borders.new_zeros(1)))  # and of the rows of no sequence
    new_borders = torch.nn.functional.pad(used.cumsum(0), (1, 0)).to(borders.dtype)
    chosen = torch.nonzero(row < ends[sequence]).flatten()
    return chosen, new_borders


def _longest(name: str, given: Any, borders: Tensor) -> int:
    length, there = integer(name, given), max(borders.diff().tolist(), default=0)
    if length < there:
        raise ValueError(f"{name}: got {length}; wanted {there} or more, the longest sequence")
    return length


def probabilities(tensors: tuple[Any, ...], given: Options, seed: Tensor | None, longest: tuple[Any, Any]) -> Tensor:
    """S_dmask [b, h, sq, sk] of a call with dropout: its probabilities before dropout, negative where one was dropped;
    empty without dropout. `longest`: sq and sk of ragged batches."""
    q: Tensor = tensors[0]
    if seed is None:
        return q.new_empty(0)
    k, borders_q, borders_k = tensors[1], tensors[5], tensors[6]
    if borders_q is None:
        (b, rows, h, _), keys = q.shape, k.shape[1]
        place = torch.arange(keys, device="cpu").expand(b, keys)
    else:
        b, h = borders_q.shape[0] - 1, q.shape[1]
        rows, keys = _longest("max_seqlen_q", longest[0], borders_q), _longest("max_seqlen_k", longest[1], borders_k)
        k = k[: used_rows(k, borders_k)]
        place = torch.arange(k.shape[0], device="cpu") - torch.repeat_interleave(borders_k[:-1], borders_k.diff())
    if keys > _refusals.MAX_HEAD_DIM:
        raise NotImplementedError(f"return_attn_probs: got {keys} keys with dropout; wanted at most {_refusals.MAX_HEAD_DIM}")
    with torch.no_grad():
        # Values that are rows of the identity make results that are the probabilities.
        one_hot = torch.nn.functional.one_hot(place.to(q.device).long(), keys).to(q.dtype).unsqueeze(-2)
        one_hot = one_hot.expand(*k.shape[:-1], keys)
        made, _, _ = attend((q, k, one_hot, *tensors[3:]), *given._replace(dropout_p=0.0))
        if borders_q is not None:
            padded = made.new_zeros((b, rows, h, keys))
            for i, (begin, end) in enumerate(pairwise(borders_q.tolist())):
                padded[i, : end - begin] = made[begin:end]
            made = padded
        kept = torch.from_numpy(rapt.dropout_mask(b, h, rows, keys, given.dropout_p, int(seed))).to(q.device)
        made = made.transpose(1, 2)
        return torch.where(kept, made, -made)
