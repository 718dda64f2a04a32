"""flash-attn 2's functions with rapt's kernels, on the CPU: code that calls flash_attn runs without a GPU.

    from rapt.flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
    rapt.flash_attn.install()           # `import flash_attn` gives them too, in this process

Names, order and defaults of arguments, layouts ([b, s, h, d], ragged [total, h, d]) and results are flash-attn's. rapt
takes flash-attn 3's keywords where it supports them. Others raise an error that names them.

rapt also supports float32; head dimensions up to 8192, and values of another head dimension than keys; pages of any
size; int64 lengths; gradients through softmax_lse, and of alibi_slopes and s_aux. The dropout mask is rapt's, with a
seed from PyTorch's default generator. Results and gradients are always deterministic. On a GPU, if rapt has its
GPU backend, inputs may require grad in bfloat16 and float16 on Hopper, with heads of up to 128 columns, without dropout.
alibi_slopes may not. Other calls with gradients raise NotImplementedError. Dropout without gradients takes dense calls.
"""

from __future__ import annotations

from typing import Any

from rapt._requirements import require

require("rapt.flash_attn", "torch")

from torch import Tensor

from rapt import _refusals
from rapt._flash_attn import attend
from rapt._flash_attn_cache import flash_attn_with_kvcache
from rapt._flash_attn_calls import (
    Options,
    Passed,
    check,
    check_extras,
    check_modifiers,
    check_rows,
    check_without_gradients,
    compact,
    options,
    probabilities,
    returned,
    signature_of,
)
from rapt._flash_attn_module import install, uninstall
from rapt._scalars import boolean

__version__ = "2.8.3+rapt"  # of the flash-attn whose functions these are
__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "install",
    "uninstall",
]

Window = tuple[int | None, int | None] | None
_passed, _passed_ragged = Passed(), Passed()


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    s_aux: Tensor | None = None,
    **flash_attn_3: Any,
) -> Any:
    """Attention of a batch of sequences with equal lengths: softmax(softmax_scale q k^T, masked) v.

    q, k, v         [b, sq, hq, d], [b, sk, hk, d] and [b, sk, hk, dv] of bfloat16, float16 or float32; hk divides hq.
    dropout_p       The share of probabilities that are dropped; 0 in inference.
    softmax_scale   Default d**-0.5.
    causal          True: row i attends to keys up to i + sk - sq, so the last row attends to all keys.
    window_size     (left, right): row i attends to keys i + sk - sq - left to i + sk - sq + right. -1 or None leaves a
                    side open.
    softcap         c: scores become c * tanh(score / c), before biases and masks. 0: none.
    alibi_slopes    [hq] or [b, hq]: the score of row i and key j loses slope * |i + sk - sq - j|.
    deterministic   Ignored: gradients are always deterministic.
    return_attn_probs
                    True: returns (out, softmax_lse, S_dmask).
    s_aux           [hq]: attention sinks, one extra logit in each head's denominator (flash-attn 3).
    flash_attn_3    num_splits, pack_gqa, sm_margin, scheduler_metadata and fa_version are ignored on the CPU. qv,
                    q_descale, k_descale, v_descale and attention_chunk are errors, unless they are None or 0.

    Returns out [b, sq, hq, dv] of q's type; rows without keys are 0. softmax_lse is float32 [b, hq, sq], the natural
    log of the sum of exp of a row's scores, +inf for a row without keys. S_dmask is empty without dropout. With dropout
    it is [b, hq, sq, sk], the probabilities before dropout, negative for dropped ones. Raises TypeError, ValueError or
    NotImplementedError, which names the argument.
    """
    check_extras(flash_attn_3)
    return _dense(
        *(q, k, v, ("q", "k", "v"), alibi_slopes, s_aux),
        *(options(softmax_scale, causal, window_size, softcap, dropout_p), deterministic, return_attn_probs),
    )


def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """flash_attn_func with keys and values in one tensor, kv [b, sk, 2, hk, d]."""
    check({"kv": kv}, {"kv": "[b, sk, 2, hk, d]"})
    k, v = _unpacked("kv", kv, 2, 2)
    return _dense(
        *(q, k, v, ("q", "kv", "kv"), alibi_slopes, None),
        *(options(softmax_scale, causal, window_size, softcap, dropout_p), deterministic, return_attn_probs),
    )


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """flash_attn_func with queries, keys and values in one tensor, qkv [b, s, 3, h, d]."""
    check({"qkv": qkv}, {"qkv": "[b, s, 3, h, d]"})
    q, k, v = _unpacked("qkv", qkv, 3, 2)
    return _dense(
        *(q, k, v, ("qkv", "qkv", "qkv"), alibi_slopes, None),
        *(options(softmax_scale, causal, window_size, softcap, dropout_p), deterministic, return_attn_probs),
    )


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: Any,
    max_seqlen_k: Any,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
    *,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    s_aux: Tensor | None = None,
    **flash_attn_3: Any,
) -> Any:
    """flash_attn_func for sequences of unequal length, end to end.

    q, k, v         [total_q, hq, d], [total_k, hk, d] and [total_k, hk, dv]. Result rows past the last sequence are 0.
    cu_seqlens_q    int32 or int64 [b + 1], from 0: sequence n has the rows cu_seqlens_q[n] to cu_seqlens_q[n + 1].
    cu_seqlens_k    The same for k and v. With block_table, sequences have cu_seqlens_k.diff() keys. None with
                    seqused_k.
    max_seqlen_q, max_seqlen_k
                    The lengths of the longest sequences: sizes of S_dmask, otherwise ignored.
    block_table     int32 or int64 [b, n]: k and v are pages, [pages, page_size, hk, d], and key j of sequence i is row
                    j % page_size of page block_table[i, j // page_size]. Pages have no gradients.
    seqused_q, seqused_k
                    [b]: how many rows (keys) of each sequence count (flash-attn 3). Default: all. Without block_table
                    rapt copies them. Result rows that do not count are 0.

    Other arguments are those of flash_attn_func. Returns out [total_q, hq, dv], or (out, softmax_lse [hq, total_q],
    S_dmask [b, hq, max_seqlen_q, max_seqlen_k]). Raises as flash_attn_func does.
    """
    check_extras(flash_attn_3)
    return _ragged(
        *(q, k, v, ("q", "k", "v"), cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, alibi_slopes, s_aux),
        *(options(softmax_scale, causal, window_size, softcap, dropout_p), deterministic, return_attn_probs),
        *(block_table, seqused_q, seqused_k),
    )


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: Any,
    max_seqlen_k: Any,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """flash_attn_varlen_func with keys and values in one tensor, kv [total_k, 2, hk, d]."""
    check({"kv": kv}, {"kv": "[total_k, 2, hk, d]"})
    k, v = _unpacked("kv", kv, 2, 1)
    return _ragged(
        *(q, k, v, ("q", "kv", "kv"), cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, alibi_slopes, None),
        *(options(softmax_scale, causal, window_size, softcap, dropout_p), deterministic, return_attn_probs),
    )


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: Any,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """flash_attn_varlen_func with queries, keys and values in one tensor, qkv [total, 3, h, d]."""
    check({"qkv": qkv, "cu_seqlens": cu_seqlens}, {"qkv": "[total, 3, h, d]", "cu_seqlens": "[b + 1]"})
    q, k, v = _unpacked("qkv", qkv, 3, 1)
    return _ragged(
        *(q, k, v, ("qkv", "qkv", "qkv"), cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, alibi_slopes, None),
        *(options(softmax_scale, causal, window_size, softcap, dropout_p), deterministic, return_attn_probs),
    )


def _unpacked(name: str, x: Tensor, count: int, dim: int) -> tuple[Tensor, ...]:
    if x.shape[dim] != count:
        raise ValueError(f"{name}: got shape {list(x.shape)}; wanted {count} in dimension {dim}")
    return x.unbind(dim)  # its backward is one copy, into one tensor


def _dense(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    names: tuple[str, str, str],
    alibi_slopes: Tensor | None,
    s_aux: Tensor | None,
    given: Options,
    deterministic: bool,
    return_attn_probs: bool,
) -> Any:
    signature = signature_of((q, k, v), (alibi_slopes, s_aux))
    if signature not in _passed:
        shape = "[b, s, h, d]"
        named = {"q": q, "k": k, "v": v, "alibi_slopes": alibi_slopes, "s_aux": s_aux}
        check(named, {"q": shape, "k": shape, "v": shape})
        check_rows(q, k, v, names)
        if q.shape[0] != k.shape[0]:
            raise ValueError(f"{names[1]}: got shape {list(k.shape)}; wanted {q.shape[0]} sequences, as {names[0]} has")
        check_modifiers(alibi_slopes, s_aux, q.shape[0], q.shape[2])
        _passed.add(signature)
    boolean("deterministic", deterministic)
    return_attn_probs = boolean("return_attn_probs", return_attn_probs)
    tensors = (q, k, v, alibi_slopes, s_aux, None, None, None, None, None)
    out, lse, seed = attend(tensors, *given, with_lse=return_attn_probs, name=names[0])
    if lse is None:
        return out
    return out, returned(lse), probabilities(tensors, given, seed, (None, None))


def _ragged(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    names: tuple[str, str, str],
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: Any,
    max_seqlen_k: Any,
    alibi_slopes: Tensor | None,
    s_aux: Tensor | None,
    given: Options,
    deterministic: bool,
    return_attn_probs: bool,
    block_table: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
) -> Any:
    rare = {"alibi_slopes": alibi_slopes, "s_aux": s_aux, "block_table": block_table}
    rare |= {"seqused_q": seqused_q, "seqused_k": seqused_k}
    signature = signature_of((q, k, v, cu_seqlens_q, cu_seqlens_k), rare.values())
    if signature not in _passed_ragged:
        named = {"q": q, "k": k, "v": v, "cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k} | rare
        rows = "[total_k, hk, d]" if block_table is None else "[pages, page_size, hk, d]"
        shapes = {"q": "[total_q, hq, d]", "k": rows, "v": rows, "cu_seqlens_q": "[b + 1]"}
        if block_table is None or seqused_k is None:
            shapes["cu_seqlens_k"] = "[b + 1]"
        check(named, shapes)
        check_rows(q, k, v, names)
        check_modifiers(alibi_slopes, s_aux, cu_seqlens_q.shape[0] - 1, q.shape[1])
        _passed_ragged.add(signature)
    boolean("deterministic", deterministic)
    return_attn_probs = boolean("return_attn_probs", return_attn_probs)
    seqlens, seqlens_are = None, "seqused_k"
    if block_table is not None:
        check_without_gradients("pages have no gradients", q=q, k=k, v=v, alibi_slopes=alibi_slopes, s_aux=s_aux)
        if given.dropout_p != 0 and return_attn_probs:
            got = "True with dropout and block_table"
            raise NotImplementedError(f"return_attn_probs: got {got}; wanted False: of pages there is no S_dmask")
        if seqused_k is None and cu_seqlens_k is not None:
            seqused_k, seqlens_are = cu_seqlens_k.diff(), "cu_seqlens_k"
        seqlens, cu_seqlens_k = seqused_k, None
    elif seqused_k is not None and cu_seqlens_k is not None:
        chosen, cu_seqlens_k = compact(k, cu_seqlens_k, seqused_k, "seqused_k")
        k, v = k[chosen], v[chosen]
    total, counting = q.shape[0], None
    if seqused_q is not None:
        counting, cu_seqlens_q = compact(q, cu_seqlens_q, seqused_q, "seqused_q")
        q = q[counting]
    tensors = (q, k, v, alibi_slopes, s_aux, cu_seqlens_q, cu_seqlens_k, seqlens, block_table, None)
    with _refusals.renamed(cache_seqlens=seqlens_are):
        out, lse, seed = attend(tensors, *given, with_lse=return_attn_probs, name=names[0])
    if counting is not None:
        out = out.new_zeros((total, *out.shape[1:])).index_copy(0, counting, out)
    if lse is None:
        return out
    if counting is not None:
        lse = lse.new_full((total, lse.shape[1]), -float("inf")).index_copy(0, counting, lse)
    return out, returned(lse), probabilities(tensors, given, seed, (max_seqlen_q, max_seqlen_k))
