"""rapt's kernels on what a rank holds: blocks of queries and keys, and the gradients of blocks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.profiler import record_function

import rapt
from rapt import _core
from rapt._attention import forward_arguments
from rapt._distributed_parts import Options
from rapt._scalars import Alignment


def keywords(options: Options, align: Alignment, alibi: Tensor | None) -> dict[str, Any]:
    """Arguments of rapt.attention. align=None: all rows see all keys."""
    given: dict[str, Any] = {"scale": options.scale, "softcap": options.softcap}
    if align is not None:
        given |= {"causal": options.causal, "align": align, "alibi": alibi, "window": (options.left, options.right)}
    return given


def forward(q: Tensor, k: Tensor, v: Tensor, dtype: torch.dtype, **given: Any) -> tuple[Tensor, Tensor]:
    """out of `dtype`, and lse. Partial results should be float32: merging rounds again."""
    packed = "cu_seqlens_q" in given
    if packed:
        q, k, v = (to_packed(x) for x in (q, k, v))
    out = q.new_empty((*q.shape[:-1], v.shape[-1]), dtype=dtype)
    with record_function("rapt.distributed.kernel"):
        out, lse = rapt.attention(q, k, v, out=out, return_lse=True, **given)
    return (to_batch(out), to_batch(lse)) if packed else (out, lse)


def backward(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, **given: Any
) -> tuple[Tensor, Tensor]:
    """float32 gradients of q, and of concatenated(k, v). out and lse are those of all keys, of which k may be a part."""
    packed = "cu_seqlens_q" in given
    if packed:
        dout, q, k, v, out, lse = (to_packed(x) for x in (dout, q, k, v, out, lse))
        dlse = None if dlse is None else to_packed(dlse)
    dq = q.new_empty(q.shape, dtype=torch.float32)
    dkv = q.new_empty((*k.shape[:-1], k.shape[-1] + v.shape[-1]), dtype=torch.float32)
    dk, dv = keys_and_values(dkv, k.shape[-1])
    arguments = forward_arguments(q, k, v, out=out, **given)
    with record_function("rapt.distributed.kernel"):
        _core.attention_backward(arguments, (dout, lse, dlse, dq, dk, dv, None, None, None))
    return (to_batch(dq), to_batch(dkv)) if packed else (dq, dkv)


def added(total: Tensor | None, part: Tensor, at: slice, rows: int) -> Tensor:
    """total[:, :, at] += part, of `rows` rows: of None, part itself if it has them all."""
    if total is None and part.shape[2] == rows:
        return part
    total = part.new_zeros((*part.shape[:2], rows, part.shape[3])) if total is None else total
    total[:, :, at] += part
    return total


def ragged(given: dict[str, Any], rows: Sequence[int], keys: Sequence[int], device: torch.device) -> dict[str, Any]:
    """keywords() for packed sequences, in a batch of one."""
    # Blocking, the copy to a GPU would wait for its queue.
    of_rows, of_keys = (torch.tensor(x, device="cpu").to(device, non_blocking=True) for x in (rows, keys))
    return given | {"cu_seqlens_q": of_rows, "cu_seqlens_k": of_keys}


def to_packed(x: Tensor) -> Tensor:
    """[1, h, t, ...] as [t, h, ...]."""
    return x[0].transpose(0, 1)


def to_batch(x: Tensor) -> Tensor:
    """[t, h, ...] as [1, h, t, ...]."""
    return x.transpose(0, 1)[None]


def detached(saved: Sequence[Tensor | None]) -> list[Any]:
    """What a forward has saved, without autograd's flags: kernels refuse an `out` that requires grad."""
    return [x if x is None else x.detach() for x in saved]


def concatenated(k: Tensor, v: Tensor) -> Tensor:
    """[b, h, s, d + dv]: keys and values in one message."""
    return torch.cat((k, v), -1)


def keys_and_values(kv: Tensor, d: int) -> tuple[Tensor, Tensor]:
    return kv[..., :d], kv[..., d:]


def padded(q: Tensor, first: int, count: int) -> Tensor:
    """q as rows [first, first + sq) of `count` rows, the others 0."""
    if count == q.shape[2]:
        return q
    rows = q.new_zeros((*q.shape[:2], count, q.shape[3]))
    rows[:, :, first : first + q.shape[2]] = q
    return rows


@lru_cache(maxsize=256)
def padding(
    shape: tuple[int, ...],
    rows: int,
    start: int,
    dtype: torch.dtype,
    options: Options,
    has_alibi: bool,
    has_sinks: bool,
) -> tuple[int, int]:
    """(rows before, rows in total) for which a call for rows [start, start + rows) has the bits of a call for all rows.

    `shape` is (b, hq, hk, sq, sk, d, dv) of the call for all rows. The number of rows selects the kernel and the splits
    of the keys (docs/contract.md, Determinism). If a part would select others, it is padded with rows whose results are
    discarded.
    """
    b, hq, hk, sq, sk, d, dv = shape

    def explained(count: int, keys: int, entry: str | None = None) -> Any:
        one = torch.empty(1, dtype=dtype, device="cpu")
        numbers = one.float().expand(hq)
        return rapt.explain(
            one.expand(b, hq, count, d),
            one.expand(b, hk, keys, d),
            one.expand(b, hk, keys, dv),
            sinks=numbers if has_sinks else None,
            threads=1,
            kernel=entry,
            **keywords(options, options.offset, numbers if has_alibi else None),
        )

    def kernel(count: int) -> tuple[Any, ...]:
        shown = explained(count, sk)
        # On one thread, keys add work items only if they are split, and one key is not.
        return shown.entry, shown.candidates, shown.work_items > explained(count, 1, shown.entry).work_items

    wanted = kernel(sq)
    if wanted[-1]:  # the keys of each split depend on the number of rows and on the keys that all of them see
        return start, sq
    low, high = rows, sq  # the smallest number of rows with this kernel lies between
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if kernel(middle) == wanted else (middle + 1, high)
    return high - rows, high
