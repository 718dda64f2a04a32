"""Attention and the delta rule over a sequence that is spread over the ranks of a torch.distributed group (context
parallelism).

    q, k, v = (rapt.distributed.shard_sequence(x, 2, balanced=True) for x in (q, k, v))     # this rank's part
    out = rapt.distributed.all_gather_attention(q, k, v, causal=True, balanced=True)        # gathers all keys
    out = rapt.distributed.ring_attention(q, k, v, causal=True, balanced=True)              # least memory
    out = rapt.distributed.ulysses_attention(q, k, v, causal=True, balanced=True)           # spreads the heads
    out = rapt.distributed.ring_attention(q, k, v, causal=True, balanced=True, group=mesh)  # both, on a 2-D DeviceMesh
    out = rapt.distributed.delta_rule(q, k, v, g, beta)          # linear attention: parts in order, of any lengths
    whole = rapt.distributed.unshard_sequence(out.detach(), 2, balanced=True)

Rank r of n holds part r of n parts of the sequence. With `balanced`, it holds chunks r and 2 n - 1 - r of 2 n chunks,
one after the other: causal attention is then the same work on every rank.

All ranks call the same function with the same sizes and options. If they differ, every rank raises ValueError. If a
rank ends or does not call, the others raise RuntimeError, at the latest after the group's timeout.

Gradients are those of this rank's q, k and v, for the outputs of all ranks. All ranks must run the backward. Gradients
have no second derivatives. Autocast changes nothing. torch.compile is not tested.

Attention, shard_sequence() and unshard_sequence() take tensors on GPUs, with NCCL: docs/guide/python/distributed.md says
how. Kernels run on PyTorch's current stream.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from rapt import _distributed_decode, _distributed_delta_rule, _refusals
from rapt._attention import KvDtype
from rapt._autocast import without_autocast
from rapt._delta_rule import Rule
from rapt._distributed_check import (
    Group,
    Numbers,
    agree_along,
    attention_call,
    check_total,
    dimension,
    dimensions_of,
    flattened,
    ranks_of,
    whole_call,
)
from rapt._distributed_gather import GatheredAttention
from rapt._distributed_kernel import to_packed
from rapt._distributed_packed import as_batch
from rapt._distributed_parts import in_sequence, spans
from rapt._distributed_ring import RingAttention
from rapt._distributed_ulysses import by_heads, readers
from rapt._scalars import Alignment, boolean

__all__ = [
    "all_gather_attention",
    "decode_attention",
    "delta_rule",
    "ring_attention",
    "shard_sequence",
    "ulysses_attention",
    "unshard_sequence",
]


@without_autocast
def all_gather_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    align: Alignment = None,
    window: Sequence[int | None] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    alibi: Tensor | None = None,
    sinks: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    balanced: bool = False,
    group: Group = None,
    return_lse: bool = False,
) -> Any:
    """rapt.attention over the whole sequence, for this rank's rows. Gathers the keys and values of all ranks.

    On CPUs of one model, the result has the bits of one process's rapt.attention over the whole
    sequence. Gradients of k and v are summed over ranks in their order, and round differently from one process's.

    q, k, v         [b, hq, sq, d], [b, hk, sk, d], [b, hk, sk, dv]: this rank's part, of float32, bfloat16 or float16.
                    sq and sk may differ (cross attention). Every rank has the same sizes.
    causal, window, scale, softcap
                    As for rapt.attention.
    alibi, sinks    [hq], without gradients. As for rapt.attention. The same on every rank.
    cu_seqlens      int32 or int64 [sequences + 1], the same on every rank: offsets into the tokens of all ranks, which
                    are packed sequences. q, k and v are [t, hq, d], [t, hk, d] and [t, hk, dv], this rank's part of the
                    tokens, as large as the others'; out is [t, hq, dv], and lse [t, hq]. Sequences may begin and end
                    anywhere, and may be empty. Results are then within the bounds of rapt.attention, without the
                    promise of one process's bits. align is refused.
    align           Where query row 0 of the whole sequence sits among all keys. As for rapt.attention.
    balanced        Whether a part is chunks r and 2 n - 1 - r of 2 n, of queries and of keys. Of packed sequences, the
                    chunks are of all tokens.
    group           A process group, or a DeviceMesh of one or two dimensions. All processes if not given. In a mesh of m x n
                    ranks, rank (i, j) has part i n + j. An exchange along the last dimension gives each rank the rows of
                    n parts, for 1 / n of the heads. Keys travel along the first. hq must be a multiple of n, and hk
                    a multiple or a divisor of n. Results are then within the bounds of rapt.attention.
    return_lse      Returns (out, lse), lse float32 [b, hq, sq], with gradients through both.

    Memory for the keys and values of the whole sequence is used during a call only: the backward gathers them again.
    Returns [b, hq, sq, dv] of q's type. Raises TypeError or ValueError, naming the argument, on all ranks.
    """
    return _attention("all_gather_attention", GatheredAttention.apply, locals())


@without_autocast
def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    align: Alignment = None,
    window: Sequence[int | None] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    alibi: Tensor | None = None,
    sinks: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    balanced: bool = False,
    group: Group = None,
    return_lse: bool = False,
) -> Any:
    """rapt.attention over the whole sequence, for this rank's rows. Keys and values travel around a ring of ranks.

    While the kernel computes with the keys of one rank, those of the next rank are under way: a rank holds the keys of
    two ranks at a time. Blocks of keys that no row sees are not computed. Results are within the bounds of
    rapt.attention (docs/contract.md), and have the same bits in every run with the same number of ranks.

    Arguments and errors are those of all_gather_attention. With a mesh, the ring is its first dimension. With packed
    sequences, one call of the kernel is for what a rank's tokens see of each other.
    """
    return _attention("ring_attention", RingAttention.apply, locals())


@without_autocast
def ulysses_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    align: Alignment = None,
    window: Sequence[int | None] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    alibi: Tensor | None = None,
    sinks: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    balanced: bool = False,
    group: Group = None,
    return_lse: bool = False,
) -> Any:
    """rapt.attention over the whole sequence, for this rank's rows. An exchange gives each rank all rows of some heads.

    hq must be a multiple of the number of ranks n, and hk a multiple or a divisor of n. If hk is less than n, a key
    head goes to each rank that reads it, and the gradients of these ranks are added in the type of k.

    Arguments, results and errors are those of all_gather_attention. A mesh must have one dimension.
    """
    return _attention("ulysses_attention", GatheredAttention.apply, locals())


@without_autocast
def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    beta: Tensor | None = None,
    *,
    rule: Rule = "gated_delta",
    scale: float | None = None,
    initial_state: Tensor | None = None,
    return_state: bool = False,
    cu_seqlens: Tensor | None = None,
    l2norm_qk: bool = False,
    beta_sigmoid: bool = False,
    beta_double: bool = False,
    gate: bool = False,
    a_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    gate_lower_bound: float | None = None,
    state_v_first: bool = False,
    group: Group = None,
) -> Any:
    """rapt.delta_rule over the whole sequence, for this rank's tokens. Each rank passes over its tokens once, and one
    all-gather joins the states.

    q, k, v, g, beta
                    As for rapt.delta_rule, this rank's part: [b, t, heads, size]. Rank r has the tokens after those of
                    rank r - 1. t may differ between ranks: x.tensor_split(ranks, 1)[rank] divides any length. Every
                    rank has 1 or more tokens: a sequence shorter than the number of ranks is refused.
    initial_state   The state before the whole sequence. Every rank gives one, and the first rank's counts: it gets the
                    gradient, and the others get 0.
    return_state    Returns (out, state): the state after the whole sequence, on every rank, float32, with gradients.
    cu_seqlens      int32 or int64 [sequences + 1], the same on every rank: offsets into the tokens of all ranks, which
                    are packed sequences. b is 1. Sequences may begin and end anywhere. initial_state and return_state
                    are refused.
    a_log, dt_bias  The same on every rank. Their gradients, and that of a g of [h], are those of this rank's tokens:
                    sum them over ranks, as those of parameters.

    The other options are those of rapt.delta_rule. Results are those of one process but for rounding: states are
    float32, and what a part reads of a state is added in float32. With a delta in the rule, a head's state counts as
    forgotten when its decays have multiplied it by less than 2^-64. Without one, a product of decays above e^88.02 (g
    above 0) counts as e^88.02. The bits are the same in every run with the same
    parts. Returns out [b, t, max(hq, h), V] of q's type. Raises TypeError or ValueError, naming the argument, on all
    ranks. CPU only.
    """
    return _distributed_delta_rule.call(ranks_of(group, "delta_rule"), locals())


@without_autocast
def decode_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cache_seqlens: Tensor | None = None,
    block_table: Tensor | None = None,
    window: Sequence[int | None] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    interleaved: bool = False,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    k_zero: Tensor | None = None,
    v_zero: Tensor | None = None,
    k_tail: Tensor | None = None,
    kv_dtype: KvDtype | None = None,
    q_scale: Tensor | None = None,
    group: Group = None,
    return_lse: bool = False,
) -> Any:
    """Causal attention of a sequence's last tokens to a KV cache over ranks (decode context parallelism).

    Each rank attends to its own keys. One all-gather of the results, float32 [b, hq, sq, dv + 1] per rank, merges them
    in the order of ranks. With a window or sq > 1, an all-gather of the lengths, int64 [b], comes first.

    q               [b, hq, sq, d], the same on every rank: the last sq tokens of each sequence, whose keys are in the
                    cache. An error says if it differs.
    k, v            This rank's part of the cache, as for rapt.attention: plain, quantised, or pages with block_table.
    cache_seqlens   int32 or int64 [b]: this rank's number of keys of each sequence, 0 or more. Default: all rows of k.
    block_table     int32 or int64 [b, n]: this rank's pages of each sequence.
    window          (left, 0): as for rapt.attention. Keys outside of it are read if any key of the rank is inside.
    interleaved     Where the keys lie, which matters with a window or sq > 1. False: those of rank r follow those of
                    rank r - 1. True: key j of rank r of n is the sequence's key j * n + r.
    sinks           [hq], the same on every rank. They count once.
    scale, softcap, k_scale, v_scale, k_zero, v_zero, k_tail, kv_dtype, q_scale
                    As for rapt.attention.

    Returns out [b, hq, sq, dv] of q's type, bfloat16 if that is a float8, or (out, lse). On CPUs of one instruction
    set, with the same number of threads, every rank has the same bits. Results are within the bounds of rapt.attention.
    No gradients, CPU only. Raises TypeError or ValueError, naming the argument, on all ranks.
    """
    return _distributed_decode.call(ranks_of(group, "decode_attention"), locals())


def shard_sequence(x: Tensor, dim: int, *, balanced: bool = False, group: Group = None) -> Tensor:
    """This rank's part of x along the dimension `dim`. All ranks have x. Contiguous, with gradients.

    The size of `dim` must be a multiple of the number of ranks n, of 2 n if `balanced`. `group` may also be a DeviceMesh
    of one or two dimensions. Sends no messages. Raises TypeError or ValueError, naming the argument.
    """
    ranks = flattened(dimensions_of(group, "shard_sequence"))
    _refusals.check_tensors({"x": x}, "a tensor")
    dim, balanced = dimension(x, dim), boolean("balanced", balanced)
    unit = ranks.size * (2 if balanced else 1)
    if x.shape[dim] % unit != 0:
        got = f"{x.shape[dim]} rows along dimension {dim}"
        raise ValueError(f"x: got {got}; wanted a multiple of {unit}: pad the sequence")
    own = spans(ranks.rank, ranks.size, x.shape[dim] // ranks.size, balanced)
    pieces = [x.narrow(dim, s.start, s.end - s.begin) for s in own]
    return torch.cat(pieces, dim) if len(pieces) > 1 else pieces[0].clone(memory_format=torch.contiguous_format)


def unshard_sequence(x: Tensor, dim: int, *, balanced: bool = False, group: Group = None) -> Tensor:
    """The whole sequence, on every rank, of parts x that shard_sequence() has made with the same group. No gradients.

    Raises TypeError or ValueError, naming the argument, on all ranks, if their parts differ in shape or type.
    """
    dimensions = dimensions_of(group, "unshard_sequence")
    whole = flattened(dimensions)
    call, error = None, None
    try:
        call, dim = whole_call(whole, x, dim, balanced)
    except Exception as refused:  # of any kind, or the other ranks would wait
        error = refused
    agree_along(dimensions, call, error)
    parts = x.detach().movedim(dim, 0)
    for ranks in reversed(dimensions):
        parts = ranks.gather(parts)
    return in_sequence(parts, whole.size, 0, balanced).movedim(0, dim).clone(memory_format=torch.contiguous_format)


def _attention(method: str, run: Callable[..., Any], given: dict[str, Any]) -> Any:
    dimensions = dimensions_of(given["group"], method)
    ranks, heads = dimensions if len(dimensions) == 2 else (dimensions[0], None)
    if method == "ulysses_attention":
        if heads is not None:
            raise ValueError("group: got a mesh of 2 dimensions; wanted one dimension, or ring_attention")
        ranks, heads = ranks._replace(rank=0, size=1), ranks
    call, request, error = None, None, None
    offsets = given["cu_seqlens"]
    try:
        given = given if offsets is None else as_batch(given)
        call, request = attention_call(flattened(dimensions), given)
        if offsets is not None:
            request = request._replace(offsets=offsets.tolist())
        call["cu_seqlens"] = Numbers.of(offsets)
        if heads is not None:
            readers(call["hq"], call["hk"], heads.size)
    except Exception as refused:  # of any kind, or the other ranks would wait
        error = refused
    agree_along(dimensions, call, error)
    assert request is not None
    if offsets is not None:  # which are the same on every rank, as is the number of tokens
        check_total(offsets, request.ranks.size * given["q"].shape[2])
    q, k, v, request = given["q"], given["k"], given["v"], request._replace(ranks=ranks)
    out, lse = run(q, k, v, request) if heads is None else by_heads(run, q, k, v, request, heads)
    if offsets is not None:
        out, lse = (x if x is None else to_packed(x).contiguous() for x in (out, lse))
    return (out, lse) if given["return_lse"] else out
