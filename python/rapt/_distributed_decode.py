"""rapt.distributed.decode_attention: each rank attends to its part of a KV cache, and one all-gather merges them."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

import rapt
from rapt import _refusals
from rapt._distributed_check import Call, Numbers, Ranks, agree, window_sides
from rapt._scalars import boolean, finite

_OF_CACHE = ("cache_seqlens", "block_table", "k_scale", "v_scale", "k_zero", "v_zero", "k_tail", "q_scale")


def call(ranks: Ranks, given: dict[str, Any]) -> Any:
    """rapt.distributed.decode_attention. `given` has its arguments."""
    made: Call | None = None
    error: Exception | None = None
    q, k, v, sinks = (given[name] for name in ("q", "k", "v", "sinks"))
    try:
        made = _checked(ranks, given)
    except Exception as refused:  # of any kind, or the other ranks would wait
        error = refused
    agree(ranks, made, error)
    assert made is not None
    b, hq, sq, dv = (made[name] for name in ("b", "hq", "sq", "dv"))
    left = window_sides(given["window"])[0]
    # The first element is 0, or 1 on a rank with an error: only the kernel can find some, such as wrong tables.
    sent = torch.zeros(1 + b * hq * sq * (dv + 1), dtype=torch.float32)
    out, lse = sent[1 : 1 + b * hq * sq * dv].view(b, hq, sq, dv), sent[1 + b * hq * sq * dv :].view(b, hq, sq)
    lse.fill_(-math.inf)
    seen: Tensor | None = None
    if sq > 1 or left >= 0:
        seen = _seen(ranks, k, given, b, sq, left)
    try:
        if seen is None or bool(seen.any()):
            more = {name: given[name] for name in (*_OF_CACHE, "scale", "softcap", "kv_dtype")}
            made_lse = rapt.attention(q, k, v, mask=seen, out=out, return_lse=True, **more)[1]
            lse.copy_(made_lse)
    except Exception as refused:
        error, sent[0] = refused, 1
    parts = ranks.gather(sent).view(ranks.size, -1)
    if error is not None:
        raise error
    for rank, failed in zip(ranks.numbers, parts[:, 0].tolist()):
        if failed:
            got = f"rank {rank} refuses its part of the cache, and says why"
            raise ValueError(f"group: {got}; wanted a valid one on every rank")
    outs = [part[1 : 1 + out.numel()].view(out.shape) for part in parts]
    lses = [part[1 + out.numel() :].view(lse.shape) for part in parts]
    if sinks is not None:  # a partial result with out 0, and the logit as lse
        outs.append(torch.zeros_like(out))
        lses.append(sinks.float().view(1, -1, 1).expand(lse.shape).contiguous())
    dtype = q.dtype if q.dtype in (torch.float32, torch.bfloat16, torch.float16) else torch.bfloat16
    merged, total = rapt.merge_states(outs, lses, out=torch.empty(out.shape, dtype=dtype), return_lse=True)
    return (merged, total) if given["return_lse"] else merged


def _seen(ranks: Ranks, k: Tensor, given: dict[str, Any], b: int, sq: int, left: int) -> Tensor:
    """bool [b, 1, sq, keys]: the keys of this rank that each query row sees."""
    table, lengths = given["block_table"], given["cache_seqlens"]
    count = _capacity(k, table)
    own = torch.full((b,), count) if lengths is None else lengths.to(torch.int64)
    every = ranks.gather(own).view(ranks.size, b)
    keys = torch.arange(count)[None]  # their positions in the whole sequence
    keys = keys * ranks.size + ranks.rank if given["interleaved"] else keys + every[: ranks.rank].sum(0)[:, None]
    rows = (every.sum(0)[:, None] - sq + torch.arange(sq))[:, :, None]
    seen = (keys[:, None] <= rows) & (torch.arange(count) < own[:, None])[:, None]
    if left >= 0:
        seen &= rows - keys[:, None] <= left
    return seen[:, None]


def _capacity(k: Tensor, table: Tensor | None) -> int:
    """The keys of a sequence that this rank has room for."""
    return k.shape[2] if table is None else k.shape[2] * table.shape[1]


def _checked(ranks: Ranks, given: dict[str, Any]) -> Call:
    """What must be the same on every rank."""
    q, v = given["q"], given["v"]
    tensors = {name: given[name] for name in ("q", "k", "v", "sinks", *_OF_CACHE)}
    _refusals.check_tensors(tensors, "tensors", "decode over ranks is not tested on GPUs")
    for name in ("q", "k", "v"):
        if tensors[name] is None or tensors[name].dim() != 4:
            got = "None" if tensors[name] is None else f"shape {list(tensors[name].shape)}"
            raise ValueError(f"{name}: got {got}; wanted 4 dimensions, as for rapt.attention")
    for name in ("q", "k", "v", "sinks"):
        if _refusals.needs_grad(tensors[name]):
            wanted = f"{name}.detach(): decode has no gradients"
            raise ValueError(f"{name}: got a tensor that requires grad; wanted {wanted}")
    ranks.check_device("q", q)
    b, hq, sq, _ = q.shape
    if given["sinks"] is not None and tuple(given["sinks"].shape) != (hq,):
        raise ValueError(f"sinks: got shape {list(given['sinks'].shape)}; wanted [{hq}], one for each query head")
    lengths, table = given["cache_seqlens"], given["block_table"]
    if lengths is not None and (tuple(lengths.shape) != (b,) or lengths.dtype not in (torch.int32, torch.int64)):
        got = f"{lengths.dtype} of shape {list(lengths.shape)}"
        raise ValueError(f"cache_seqlens: got {got}; wanted int32 or int64 [{b}]")
    if table is not None and (lengths is None or table.dim() != 2):
        raise ValueError(
            "block_table: got one without cache_seqlens, or not of 2 dimensions; wanted [b, n] and lengths"
        )
    if lengths is not None:
        capacity = _capacity(given["k"], table)
        for i, length in enumerate(lengths.tolist()):
            if not 0 <= length <= capacity:
                raise ValueError(f"cache_seqlens: got {length} for sequence {i}; wanted 0 to {capacity}")
    left, right = window_sides(given["window"])
    if right > 0:
        raise ValueError(f"window: got {given['window']!r}; wanted (left, 0) or (left, None): later keys are not seen")
    interleaved = boolean("interleaved", given["interleaved"])
    scale, softcap = (finite(name, given[name]) for name in ("scale", "softcap"))
    call: Call = {"method": "decode_attention", "dtype": str(q.dtype), "b": b, "hq": hq, "sq": sq, "d": q.shape[3]}
    dv = v.shape[3] * (2 if given["kv_dtype"] == "i4x2" else 1)  # two elements to a byte
    call |= {"dv": dv, "q": Numbers.of(q) if ranks.size > 1 else 0, "window[0]": left}
    call |= {"scale": math.inf if scale is None else scale, "softcap": math.inf if softcap is None else softcap}
    call |= {"interleaved": interleaved}
    return call | {"sinks": Numbers.of(given["sinks"]), "return_lse": boolean("return_lse", given["return_lse"])}
