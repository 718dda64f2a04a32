"""Multi-head latent attention (MLA: DeepSeek-V2 to V3.2, GLM-5, Kimi) for PyTorch tensors.

    out = rapt.mla.attention(q_nope, q_rope, kv, w_uk, w_uv, causal=True, align="bottom_right", seqlens=lengths)

The cache keeps one row per token for the keys and values of all heads: a latent c, and a rotary part that all heads
share (DeepSeek-V2, 2024). There are two forms of attention to such rows. Their results are equal up to rounding:

- absorbed: queries are projected into the latent space, q_nope W_UK. There is one KV head; its keys are the rows, and
  its values are their first columns. W_UV projects the results out of the latent space. Every (query, key) pair costs
  more.
- expanded: keys W_UK c and values W_UV c of all heads are computed from the rows, for ordinary attention. Every key
  costs more.

flash_mla_with_kvcache, get_mla_metadata and flash_mla_sparse_fwd are FlashMLA's functions: code for GPUs runs on CPUs
with them. rapt.append_kv writes a cache of such rows, append_fp8_rows a cache of 8-bit floats (FlashMLA's rows of 656
bytes), and rapt.dsa chooses the keys of sparse attention.
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

from rapt._requirements import require

require("rapt.mla", "torch")

import torch
from torch import Tensor

import rapt
from rapt import _refusals
from rapt._autocast import without_autocast
from rapt._fp8_rows import LATENT, ROTARY, check_fp8, is_fp8, keys_and_values
from rapt._mla import Options, Sizes, attend, cheaper_form, product, seen_keys
from rapt._flash_mla import flash_mla_sparse_fwd, flash_mla_with_kvcache, get_mla_metadata
from rapt._scalars import Alignment, alignment, boolean, real

__all__ = ["append_fp8_rows", "attention", "flash_mla_sparse_fwd", "flash_mla_with_kvcache", "get_mla_metadata"]

Form: TypeAlias = Literal["auto", "absorbed", "expanded"]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_INTEGERS = (torch.int32, torch.int64)


@without_autocast
def attention(
    q_nope: Tensor,
    q_rope: Tensor | None,
    kv: Tensor,
    w_uk: Tensor,
    w_uv: Tensor,
    *,
    causal: bool = False,
    align: Alignment = None,
    scale: float | None = None,
    seqlens: Tensor | None = None,
    block_table: Tensor | None = None,
    indices: Tensor | None = None,
    counts: Tensor | None = None,
    sinks: Tensor | None = None,
    form: Form = "auto",
    return_lse: bool = False,
) -> Any:
    """Attention of queries [q_nope; q_rope] to keys [w_uk c; k_rope] with values w_uv c, for rows kv = [c; k_rope].

    Source: DeepSeek-V2, 2024. Symbols: b batch, sq query tokens, h heads, sk keys; nope, rope, rank and v are the sizes
    of a head's part without positions, its rotary part, a latent and a head's values (in DeepSeek-V3 128, 64, 512 and
    128).

    q_nope          [b, sq, h, nope] of float32, bfloat16 or float16.
    q_rope          [b, sq, h, rope] of the same type, rotated; None if kv has no rotary part.
    kv              [b, sk, rank + rope] of float32, bfloat16 or float16: latents, normalised, and the keys' rotary
                    parts, rotated. Or, for a rank of 512 and a rope of 64, uint8 or float8_e4m3fn [b, sk, 656]:
                    FlashMLA's rows (see flash_mla_with_kvcache), in absorbed form, without gradients.
    w_uk, w_uv      [h, nope, rank] and [h, v, rank] of q_nope's type: they compute keys and values from a latent. In
                    DeepSeek's models kv_b_proj.weight contains both: w_uk, w_uv = weight.view(h, nope + v,
                    rank).split((nope, v), 1).
    causal          True: query i attends to keys up to i + offset.
    align           Where query 0 sits among the keys: "top_left" (at key 0), "bottom_right" (the last query at the last
                    key, for KV caches), or the offset as an int. Required for causal if their numbers differ.
    scale           Default (nope + rope)**-0.5, in both forms. Models with YaRN have another factor.
    seqlens         int32 or int64 [b]: number of keys of each sequence. Rows past it never count; the absorbed form
                    does not read them.
    block_table     int32 or int64 [b, n], requires seqlens: kv is pages, [pages, page_size, rank + rope].
    indices         int32 or int64 [b, sq, n]: the keys that each query attends to, -1 for none. kv may be [1, rows,
                    rank + rope], one pool for all sequences, such as flattened pages, in which a key is page *
                    page_size + offset. Absorbed form; without causal, align, seqlens and block_table.
    counts          int32 or int64 [b, sq], requires indices: the first counts[i, t] of the n indices count. Default n.
    sinks           [h]: one extra logit in each head's denominator.
    form            "absorbed", "expanded", or "auto": the form with fewer operations for a full kv. The choice depends
                    on the tensors' sizes, not on lengths, so a sequence has the same form with any other sequences, and
                    in graphs.
    return_lse      True: returns (out, lse). lse is float32 [b, h, sq]: the natural log of the sum of exp of a query's
                    scores.

    Returns [b, sq, h, v] of q_nope's type, C-contiguous. A query without keys has 0, with an lse of -inf. There are
    gradients of q_nope, q_rope, kv, w_uk, w_uv and sinks, also through lse, but not with pages. Under torch.compile the
    call is matrix products and one operator. Autocast has no effect, also in the backward. On a GPU there are no
    gradients, and values of seqlens, block_table, indices and counts are clamped, not refused. Raises TypeError or
    ValueError, which names the argument.
    """
    named = {"q_nope": q_nope, "q_rope": q_rope, "kv": kv, "w_uk": w_uk, "w_uv": w_uv, "sinks": sinks}
    numbers = {"seqlens": seqlens, "block_table": block_table, "indices": indices, "counts": counts}
    _refusals.check_tensors(named | numbers, "an array by torch.from_dlpack()")
    _refusals.check_one_device(named | numbers)
    if _refusals.needs_grad(*named.values()):
        _refusals.check_tensors(named, "a tensor", "gradients of latent attention have no GPU kernels yet")
    if counts is not None and indices is None:
        raise ValueError("counts: got a tensor without indices; wanted both: they count the entries of lists")
    if indices is not None:
        for name, x in (("seqlens", seqlens), ("block_table", block_table)):
            if x is not None:
                raise ValueError(f"{name}: got one with indices; wanted None: lists say which keys there are")
    sizes = _sizes(named, block_table, seqlens, indices)
    given, return_lse = _options(sizes, causal, align, scale), boolean("return_lse", return_lse)
    if form not in ("auto", "absorbed", "expanded"):
        raise ValueError(f'form: got {form!r}; wanted "auto", "absorbed" or "expanded"')
    if _refusals.needs_grad(*named.values()):
        if block_table is not None:
            raise ValueError("block_table: got one with inputs that require grad; wanted None, or torch.no_grad(): no gradients")
    if is_fp8(kv):
        if _refusals.needs_grad(*named.values()):
            raise ValueError(f"kv: got {kv.dtype} with inputs that require grad; wanted torch.no_grad(): no gradients of rows of bytes")
        if form == "expanded":
            raise ValueError(f'form: got "expanded" with kv of {kv.dtype}; wanted "absorbed" or "auto"')
        form = "absorbed"
    if indices is not None:
        if form == "expanded":
            raise ValueError('form: got "expanded" with indices; wanted "absorbed" or "auto"')
        form = "absorbed"
    lengths = None
    if seqlens is not None and seqlens.is_cpu and not torch.compiler.is_compiling():
        lengths = seqlens.tolist()
        for i, n in enumerate(lengths):
            if not 0 <= n <= sizes.sk:
                raise ValueError(f"seqlens: got length {n} of sequence {i}; wanted 0 to {sizes.sk}, the keys that kv has room for")
    if (cheaper_form(sizes, given) if form == "auto" else form) == "absorbed":
        q = product("bshn,hnc->bshc", q_nope, w_uk, idle="y")
        q = q if q_rope is None else torch.cat((q, q_rope), -1)
        tensors = (_heads_first(q), kv[:, None], None, sinks, seqlens, block_table, indices, counts)
        latent, lse = attend(tensors, given._replace(dv=sizes.rank))
        out = product("bhsc,hvc->bshv", latent, w_uv, idle="x").contiguous()
    else:
        rows = _in_use(kv, seqlens, block_table, lengths)[:, : seen_keys(sizes, given)].to(q_nope.dtype)
        seqlens = seqlens if seqlens is None else seqlens.clamp(max=rows.shape[1])
        q = q_nope if q_rope is None else torch.cat((q_nope, q_rope), -1)
        keys, values = _expanded(rows, w_uk, w_uv)
        out, lse = attend((_heads_first(q), keys, values, sinks, seqlens, None, None, None), given)
        out = out.transpose(1, 2)
    return (out, lse) if return_lse else out


def append_fp8_rows(
    kv_new: Tensor, kv: Tensor, seqlens: Tensor, *, block_table: Tensor | None = None, cu_seqlens: Tensor | None = None
) -> None:
    """Appends tokens to a cache of FlashMLA's rows of 656 bytes, quantised to 8-bit floats.

    kv_new          [b, n, 576] of float32, bfloat16 or float16, latents and rotary parts; with cu_seqlens [total, 576].
    kv              The cache, written in place: uint8 or float8_e4m3fn [b, sk, 656], or with block_table pages [pages,
                    page_size, 656]. FlashMLA's k_cache is k_cache[:, :, 0].
    seqlens         int32 or int64 [b]: number of tokens of each sequence before the call. The caller updates it.
    block_table     int32 or int64 [b, m]: the pages of each sequence.
    cu_seqlens      int32 or int64 [b + 1]: sequence i has the new rows cu_seqlens[i] to cu_seqlens[i + 1].

    A scale is the largest magnitude among its 128 columns divided by 448, or 1 if all are 0. Rotary columns are rounded
    to bfloat16. Raises TypeError or ValueError, which names the argument, before anything is written.
    """
    named = {"kv_new": kv_new, "kv": kv, "seqlens": seqlens, "block_table": block_table, "cu_seqlens": cu_seqlens}
    _refusals.check_tensors(named, "an array by torch.from_dlpack()")
    _refusals.check_memory(named)
    check_fp8("kv", kv)
    for name, x, dims in (("kv_new", kv_new, 3 if cu_seqlens is None else 2), ("kv", kv, 3)):
        if x.dim() != dims:
            raise ValueError(f"{name}: got shape {list(x.shape)}; wanted {dims} dimensions")
    if kv_new.shape[-1] != LATENT + ROTARY:
        raise ValueError(f"kv_new: got shape {list(kv_new.shape)}; wanted rows of {LATENT + ROTARY} columns")
    if seqlens is None or seqlens.dim() != 1:
        raise ValueError(f"seqlens: got {'None' if seqlens is None else f'shape {list(seqlens.shape)}'}; wanted [b]")
    for name, x, given in (("kv_new", kv_new, cu_seqlens), ("kv", kv, block_table)):
        if given is None and x.shape[0] != len(seqlens):  # rapt.append_kv would speak of its own view of them
            raise ValueError(f"{name}: got shape {list(x.shape)}; wanted {len(seqlens)} sequences, as seqlens has")
    k, v, coding = keys_and_values(kv[:, None], LATENT)
    new = kv_new[:, None]
    with _refusals.renamed(k_new="kv_new", k="kv", k_scale="kv", k_tail="kv", cache_seqlens="seqlens"):
        rapt.append_kv(new, new[..., :LATENT], k, v, seqlens, block_table=block_table, cu_seqlens=cu_seqlens, **coding)


def _heads_first(x: Tensor) -> Tensor:
    return x.transpose(1, 2)


def _expanded(rows: Tensor, w_uk: Tensor, w_uv: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values of all heads, [b, h, sk, nope + rope] and [b, h, sk, v]."""
    latent, k_rope = rows[..., : w_uk.shape[2]], rows[..., w_uk.shape[2] :]
    k, v = (product("bkc,hnc->bhkn", latent, w) for w in (w_uk, w_uv))
    return torch.cat((k, k_rope[:, None].expand(-1, k.shape[1], -1, -1)), 3), v


def _in_use(kv: Tensor, seqlens: Tensor | None, block_table: Tensor | None, lengths: list[int] | None) -> Tensor:
    """[b, keys, rank + rope] without pages, and 0 past a length: what is there may be NaN, which gradients of w_uk would get."""
    if seqlens is None:
        return kv
    if block_table is not None:
        page = kv.shape[1]
        used = torch.arange(block_table.shape[1], device=seqlens.device) * page < seqlens[:, None]
        table = torch.where(used, block_table, 0)
        if lengths is not None and bool(((table < 0) | (table >= kv.shape[0]))[used].any()):
            raise ValueError(f"block_table: got entries in use that are no page; wanted 0 to {kv.shape[0] - 1}, one of kv's pages")
        if lengths is None:
            table = table.clamp(0, max(kv.shape[0] - 1, 0))
        else:
            table = table[:, : -(-max(lengths, default=0) // page)]
        kv = kv[table.long()].flatten(1, 2)
    if lengths is not None:
        kv = kv[:, : max(lengths, default=0)]
    past = torch.arange(kv.shape[1], device=seqlens.device) >= seqlens[:, None]
    return kv.masked_fill(past[:, :, None], 0)


def _sizes(
    named: dict[str, Tensor | None], block_table: Tensor | None, seqlens: Tensor | None, indices: Tensor | None
) -> Sizes:
    """Of arguments whose shapes and types fit; what is left to ask is asked by rapt.attention."""
    for name, x in named.items():
        if x is None and name in ("q_rope", "sinks"):
            continue
        if x is None:
            raise TypeError(f"{name}: got None; wanted a tensor")
        if x.dtype not in _DTYPES and not (name == "kv" and is_fp8(x)):
            wanted = "torch.float32, torch.bfloat16 or torch.float16"
            if name == "kv":
                wanted = "torch.float32, torch.bfloat16, torch.float16, or rows of bytes of torch.uint8 or torch.float8_e4m3fn"
            raise TypeError(f"{name}: got {x.dtype}; wanted {wanted}")
    q_nope, q_rope, kv, w_uk, w_uv, _ = named.values()
    assert q_nope is not None and kv is not None and w_uk is not None and w_uv is not None
    if q_nope.dim() != 4:
        raise ValueError(f"q_nope: got shape {list(q_nope.shape)}; wanted [b, sq, h, nope]")
    b, sq, h, nope = q_nope.shape
    if w_uk.dim() != 3 or tuple(w_uk.shape[:2]) != (h, nope):
        raise ValueError(f"w_uk: got shape {list(w_uk.shape)}; wanted [{h}, {nope}, rank], as q_nope has {h} heads of {nope}")
    rank = w_uk.shape[2]
    if rank == 0:
        raise ValueError(f"w_uk: got shape {list(w_uk.shape)}; wanted a rank of 1 or more")
    if w_uv.dim() != 3 or w_uv.shape[0] != h or w_uv.shape[2] != rank:
        raise ValueError(f"w_uv: got shape {list(w_uv.shape)}; wanted [{h}, v, {rank}], as of w_uk")
    if w_uv.shape[1] == 0:
        raise ValueError(f"w_uv: got shape {list(w_uv.shape)}; wanted values of 1 column or more")
    if q_rope is not None and (q_rope.dim() != 4 or q_rope.shape[:3] != q_nope.shape[:3]):
        raise ValueError(f"q_rope: got shape {list(q_rope.shape)}; wanted [{b}, {sq}, {h}, rope], as of q_nope")
    rope = 0 if q_rope is None else q_rope.shape[3]
    if nope + rope == 0:
        raise ValueError(f"q_nope: got shape {list(q_nope.shape)} without a rotary part; wanted heads of 1 column or more")
    for name, x in (("q_rope", q_rope), ("w_uk", w_uk), ("w_uv", w_uv)):
        if x is not None and x.dtype != q_nope.dtype:
            raise TypeError(f"{name}: got {x.dtype}; wanted q_nope's {q_nope.dtype}")
    if is_fp8(kv):
        if (rank, rope) != (LATENT, ROTARY):
            raise ValueError(f"kv: got {kv.dtype} for {rank} latent and {rope} rotary columns; wanted {LATENT} and {ROTARY}")
        check_fp8("kv", kv)
    if kv.dim() != 3 or (not is_fp8(kv) and kv.shape[2] != rank + rope):
        kind = "[b, sk" if block_table is None else "[pages, page_size"
        raise ValueError(f"kv: got shape {list(kv.shape)}; wanted {kind}, {rank + rope}], {rank} latent and {rope} rotary columns")
    if seqlens is not None and (tuple(seqlens.shape) != (b,) or seqlens.dtype not in _INTEGERS):
        raise ValueError(f"seqlens: got {seqlens.dtype} {list(seqlens.shape)}; wanted int32 or int64 [{b}]")
    if block_table is None:
        if kv.shape[0] != b and (indices is None or kv.shape[0] != 1):
            wanted = f"[{b}{'' if indices is None else ' or 1'}, sk, {rank + rope}], as q_nope has {b} sequences"
            raise ValueError(f"kv: got shape {list(kv.shape)}; wanted {wanted}")
        sk = kv.shape[1]
    else:
        if block_table.dim() != 2 or block_table.shape[0] != b or block_table.dtype not in _INTEGERS:
            raise ValueError(f"block_table: got {block_table.dtype} {list(block_table.shape)}; wanted int32 or int64 [{b}, n]")
        if seqlens is None:
            raise ValueError("block_table: got pages without seqlens; wanted both")
        sk = block_table.shape[1] * kv.shape[1]
    return Sizes(b, sq, sk, nope, rope, rank, w_uv.shape[1])


def _options(sizes: Sizes, causal: Any, align: Any, scale: Any) -> Options:
    factor = real("scale", scale)
    if factor is None:
        factor = (sizes.nope + sizes.rope) ** -0.5  # of either form: that of 576 columns would be another softmax
    return Options(sizes.v, factor, boolean("causal", causal), *alignment(align))
