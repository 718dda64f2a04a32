"""rapt.distributed.delta_rule: each rank passes over its own tokens, and one all-gather of states joins the parts."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

import rapt
from rapt import _refusals
from rapt._delta_rule_torch import Options, checked
from rapt._distributed_check import Call, Numbers, Ranks, agree, check_offsets, check_total
from rapt._distributed_kernel import detached
from rapt._distributed_state import Inputs, Part, Reads, moved, moved_back, no_transition, pass_without_state
from rapt._scalars import boolean

_NAMES = ("q", "k", "v", "g", "beta", "a_log", "dt_bias")


class RankTokens(NamedTuple):
    """Where a rank's tokens lie."""

    continues: bool  # the first sequence has begun on a rank before this one
    offsets: Tensor | None  # cu_seqlens of this rank's tokens; None: a batch of parts of sequences


def call(ranks: Ranks, given: dict[str, Any], rank_tokens: RankTokens | None = None) -> Any:
    """rapt.distributed.delta_rule. `given` has its arguments. `rank_tokens` is where this rank's tokens lie, of callers that
    know it; cu_seqlens is then None."""
    made, error, x = None, None, None
    try:
        x, made = _checked(given)
        ranks.check_device("q", x.q)
        if rank_tokens is not None and (x.q.shape[0] != 1 or rank_tokens.offsets is None or int(rank_tokens.offsets[-1]) != x.q.shape[1]):
            wanted = f"offsets up to this rank's {x.q.shape[1]} tokens, for a batch of 1"
            raise ValueError(f"cu_seqlens: got {rank_tokens.offsets} in the context; wanted {wanted}")
    except Exception as refused:  # of any kind, or the other ranks would wait
        error = refused
    lengths = agree(ranks, made, error, 0 if x is None else x.q.shape[1])
    assert x is not None
    if given["cu_seqlens"] is not None:
        rank_tokens = _rank_tokens(given["cu_seqlens"], lengths, ranks.rank)
    elif rank_tokens is None:
        rank_tokens = RankTokens(ranks.rank > 0, None)
    state, v_first, return_state = (given[name] for name in ("initial_state", "state_v_first", "return_state"))
    state = state.mT if state is not None and v_first else state
    apply: Any = _DeltaRule.apply
    out, final = apply(*x[:7], state, x.options, ranks, rank_tokens, return_state)
    if not return_state:
        return out
    return out, final.mT.contiguous() if v_first else final


class _DeltaRule(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *given: Any) -> tuple[Tensor, Tensor | None]:
        *tensors, initial, options, ranks, rank_tokens, return_state = given
        x = Inputs._make((*tensors, options))
        head = _continued(x, rank_tokens)
        out = x.q.new_empty((*x.q.shape[:2], max(x.q.shape[2], x.heads), x.v.shape[3]))
        part = pass_without_state(x.tokens(0, head), out[:, :head]) if head else None
        own, transition = _rest(x, head, rank_tokens, initial, out, part)
        states = _gathered(ranks, own, transition)
        arrives = states[0][0] if ranks.rank > 0 else torch.zeros(x.state_shape, dtype=torch.float32)
        for state, move in states[1 : ranks.rank]:
            arrives = moved(move, arrives) + state
        reads = [] if part is None else part.reads
        for read in reads:
            read.write(out, arrives)
        final = None
        if return_state:
            final = arrives
            for state, move in states[ranks.rank :]:
                final = moved(move, final) + state
        queries = [read.queries.to(x.q.dtype, copy=True) for read in reads] if any(ctx.needs_input_grad) else []
        ctx.save_for_backward(*tensors, initial, arrives, transition, *queries)
        ctx.call = options, ranks, rank_tokens, return_state, [read[:4] for read in reads]
        ctx.set_materialize_grads(False)
        return out, final

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor | None, dfinal: Tensor | None) -> tuple[Any, ...]:
        saved = detached(ctx.saved_tensors)
        tensors, (initial, arrives, transition), queries = saved[:7], saved[7:10], saved[10:]
        options, ranks, rank_tokens, return_state, reads = ctx.call
        x = Inputs._make((*tensors, options))
        own = torch.zeros(x.state_shape, dtype=torch.float32)
        if dout is not None:
            for read, of_tokens in zip(reads, queries):
                made = Reads._make((*read, of_tokens, None)).gradient(dout)
                own.index_add_(1, torch.arange(x.heads) if read[2] is None else read[2], made)
        sent = own
        if return_state:
            sent = torch.cat((own, torch.zeros_like(own) if dfinal is None else dfinal), -1)
        states = _gathered(ranks, sent, transition)
        gradient = torch.zeros(x.state_shape, dtype=torch.float32)  # of the state after the last rank, then before it
        size = x.state_shape[3]
        if return_state:
            for state, _ in states:
                gradient += state[..., size:]
        for state, move in reversed(states[ranks.rank + 1 :]):
            gradient = moved_back(move, gradient) + state[..., :size]
        return *_gradients(ctx, x, rank_tokens, initial, arrives, dout, gradient), *[None] * 4


def _continued(x: Inputs, rank_tokens: RankTokens) -> int:
    """The number of this rank's tokens that depend on an earlier rank."""
    if not rank_tokens.continues:
        return 0
    return x.q.shape[1] if rank_tokens.offsets is None else int(rank_tokens.offsets[1])


def _rest(
    x: Inputs, head: int, rank_tokens: RankTokens, initial: Tensor | None, out: Tensor, part: Part | None
) -> tuple[Tensor, Tensor]:
    """Computes tokens from `head` on. Returns U and M of all this rank's tokens."""
    if part is not None and head == x.q.shape[1]:
        return part.state, part.transition
    if rank_tokens.offsets is None:
        return x.run(out, initial), no_transition(x)
    offsets = rank_tokens.offsets[1:] - head if head else rank_tokens.offsets
    return x.tokens(head, x.q.shape[1]).run(out[:, head:], cu_seqlens=offsets)[-1:], no_transition(x)


def _gathered(ranks: Ranks, state: Tensor, transition: Tensor) -> list[tuple[Tensor, Tensor]]:
    """These of all ranks, in their order."""
    sent = torch.cat((state, transition), -1)
    parts = ranks.gather(sent).chunk(ranks.size)
    return [(part[..., : state.shape[-1]], part[..., state.shape[-1] :]) for part in parts]


def _gradients(
    ctx: Any, x: Inputs, rank_tokens: RankTokens, initial: Tensor | None, arrives: Tensor, dout: Tensor | None, leaves: Tensor
) -> list[Tensor | None]:
    """Those of x's tensors and of the initial state, by the kernel, from the states at both ends of the part."""
    names = [*_NAMES, "initial_state"]
    want: Any = [name for name, wanted in zip(names, ctx.needs_input_grad) if wanted]
    of_first = rank_tokens.offsets is None and not rank_tokens.continues  # it has the initial state itself
    first, last = (initial if of_first else arrives), leaves
    if rank_tokens.offsets is not None:
        count = rank_tokens.offsets.shape[0] - 1
        first, last = (y.new_zeros((count, *y.shape[1:])) for y in (arrives, leaves))
        first[0], last[-1] = arrives[0] if rank_tokens.continues else 0, leaves[0]
    of_kernel = [name for name in want if name != "initial_state" or of_first]
    given = x.arguments() | {"initial_state": first, "cu_seqlens": rank_tokens.offsets, "dout": dout, "dfinal_state": last}
    made = rapt.delta_rule_backward(**given, want=of_kernel)._asdict()
    found = [made[f"d{name}"] for name in names]
    if "initial_state" in want and not of_first:
        assert initial is not None
        found[-1] = torch.zeros_like(initial)
    return found


def _checked(given: dict[str, Any]) -> tuple[Inputs, Call]:
    """A rank's inputs, and what must be the same on every rank. Raises what the kernel would, before any message."""
    given = {name: x for name, x in given.items() if name != "group"}
    tensors = {name: given[name] for name in (*_NAMES, "initial_state", "cu_seqlens")}
    _refusals.check_tensors(tensors, "parts of a sequence as tensors", "the delta rule over ranks is for CPUs")
    options = checked(Options(*(given[name] for name in Options._fields)))._asdict()
    v_first, return_state = options.pop("state_v_first"), boolean("return_state", given["return_state"])
    for name in ("q", "k", "v"):
        if tensors[name] is None or tensors[name].dim() != 4:
            shape = "None" if tensors[name] is None else f"shape {list(tensors[name].shape)}"
            raise ValueError(f"{name}: got {shape}; wanted [b, t, heads, size]")
    x = Inputs._make((*(tensors[name] for name in _NAMES), options))
    b, t, hq, size = x.q.shape
    if t == 0:
        raise ValueError("q: got 0 tokens; wanted 1 or more on every rank")
    for name in ("k", "v", "g", "beta"):
        if tensors[name] is not None and tensors[name].dim() > 1 and tuple(tensors[name].shape[:2]) != (b, t):
            got = list(tensors[name].shape)
            raise ValueError(f"{name}: got shape {got}; wanted {b} sequences of {t} tokens, as q has")
    state = tensors["initial_state"]
    with torch.no_grad():  # all other errors of the kernel
        rapt.delta_rule(**x.tokens(0, 0).arguments(), initial_state=state, state_v_first=v_first)
    cu_seqlens = tensors["cu_seqlens"]
    if cu_seqlens is not None:
        check_offsets(cu_seqlens)
        if b != 1:
            wanted = "[1, t, heads, size]: this rank's share of all tokens"
            raise ValueError(f"q: got {b} sequences with cu_seqlens; wanted {wanted}")
        for name, wrong in (("initial_state", state is not None), ("return_state", return_state)):
            if wrong:
                raise ValueError(f"{name}: got one with cu_seqlens; wanted none: a rank has some of the sequences")
    grads = [tensors[name] is not None and _refusals.needs_grad(tensors[name]) for name in (*_NAMES, "initial_state")]
    call: Call = {"method": "delta_rule", "b": b, "hq": hq, "hk": x.k.shape[2], "hv": x.v.shape[2]}
    call |= {"K": size, "V": x.v.shape[3], "requires_grad": any(grads), "initial_state": state is not None}
    call |= {"g": 0 if x.g is None else x.g.dim(), "beta": x.beta is not None, "cu_seqlens": Numbers.of(cu_seqlens)}
    call |= {"return_state": return_state, "state_v_first": v_first} | options
    scale, lower = options["scale"], options["gate_lower_bound"]
    call |= {"scale": size**-0.5 if scale is None else scale, "gate_lower_bound": 1.0 if lower is None else lower}
    return x, call


def _rank_tokens(cu_seqlens: Tensor, lengths: list[int], rank: int) -> RankTokens:
    """This rank's share of a packed batch."""
    begin, total = sum(lengths[:rank]), sum(lengths)
    end = begin + lengths[rank]
    check_total(cu_seqlens, total)
    starts = set(cu_seqlens.tolist())
    inner = sorted(at - begin for at in starts if begin < at < end)
    return RankTokens(begin not in starts, torch.tensor([0, *inner, end - begin]))
