"""rapt.mla: attention over latents or over what they expand to, as an operator of PyTorch's with gradients; products with the
matrices between the two; and which is cheaper."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

import rapt
from rapt import _core, _flops, _refusals
from rapt._attention import forward_arguments
from rapt._autograd import no_second_derivatives
from rapt._fp8_rows import keys_and_values
from rapt._scalars import given_alignment

_TENSORS = "Tensor q, Tensor k, Tensor? v, Tensor? sinks, Tensor? seqlens, Tensor? block_table, Tensor? indices, Tensor? counts"
_OPTIONS = "SymInt dv, float scale, bool causal, str? align, SymInt offset"
_LEARNT = 4  # of the tensors, so many may have gradients


class Options(NamedTuple):
    """What is no tensor. An alignment is None, "top_left", "bottom_right" or, with an offset, "offset"."""

    dv: int
    scale: float
    causal: bool = False
    align: str | None = None
    offset: int = 0


def _memory(q: Tensor, dv: int) -> tuple[Tensor, Tensor]:
    """Of out [b, h, sq, dv], with tokens before heads, and lse."""
    b, h, sq, _ = q.shape
    return q.new_empty((b, sq, h, dv)).transpose(1, 2), q.new_empty((b, h, sq), dtype=torch.float32)


def _run(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    sinks: Tensor | None,
    seqlens: Tensor | None,
    block_table: Tensor | None,
    indices: Tensor | None,
    counts: Tensor | None,
    *options: Any,
) -> tuple[Tensor, Tensor]:
    given = Options(*options)
    out, _ = _memory(q, given.dv)
    coding: dict[str, Any] = {}
    if v is None:
        k, v, coding = keys_and_values(k, given.dv)
    with torch.no_grad(), _refusals.renamed(k="kv", cache_seqlens="seqlens"):
        _, lse = rapt.attention(
            *(q, k, v),
            causal=given.causal,
            align=given_alignment(given.align, given.offset),
            scale=given.scale,
            sinks=sinks,
            block_table=block_table,
            cache_seqlens=seqlens,
            indices=indices,
            counts=counts,
            out=out,
            return_lse=True,
            **coding,
        )
    return out, lse


@torch.library.custom_op(
    "rapt::latent_attention", mutates_args=(), device_types=("cpu", "cuda"), schema=f"({_TENSORS}, {_OPTIONS}) -> (Tensor, Tensor)"
)
def _operator(*given: Any) -> tuple[Tensor, Tensor]:
    return _run(*given)


@_operator.register_fake
def _(*given: Any) -> tuple[Tensor, Tensor]:
    return _memory(given[0], Options(*given[8:]).dv)


def _gradient(like: Tensor | None, wanted: bool, dtype: torch.dtype | None = None) -> Tensor | None:
    if like is None or not wanted:
        return None
    return torch.empty_like(like, dtype=dtype, memory_format=torch.contiguous_format)


@torch.library.custom_op(
    "rapt::latent_attention_backward",
    mutates_args=(),
    device_types="cpu",
    schema="(Tensor? dout, Tensor? dlse, Tensor q, Tensor k, Tensor? v, Tensor? sinks, Tensor? seqlens, Tensor? indices, "
    f"Tensor? counts, Tensor out, Tensor lse, {_OPTIONS}, bool[] wanted) -> Tensor[]",
)
def _backward_operator(
    dout: Tensor | None,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    sinks: Tensor | None,
    seqlens: Tensor | None,
    indices: Tensor | None,
    counts: Tensor | None,
    out: Tensor,
    lse: Tensor,
    *rest: Any,
) -> list[Tensor]:
    """Those of the gradients of q, k, v and sinks that are wanted."""
    *options, wanted = rest
    given, columns = Options(*options), v is None
    v = k[..., : given.dv] if v is None else v
    # What k has as values too is added before it is rounded.
    sums = torch.float32 if columns else None
    dq, dk = _gradient(q, wanted[0]), _gradient(k, wanted[1], sums)
    dv, dsinks = _gradient(v, wanted[1] if columns else wanted[2], sums), _gradient(sinks, wanted[3])
    with torch.no_grad():
        _core.attention_backward(
            forward_arguments(
                *(q, k, v),
                causal=given.causal,
                align=given_alignment(given.align, given.offset),
                scale=given.scale,
                sinks=sinks,
                cache_seqlens=seqlens,
                indices=indices,
                counts=counts,
                out=out.detach(),
            ),
            (torch.zeros_like(out) if dout is None else dout, lse, dlse, dq, dk, dv, None, dsinks, None),
        )
        if columns and dk is not None and dv is not None:
            dk[..., : given.dv] += dv
            dk, dv = dk.to(k.dtype), None
    return [x for x in (dq, dk, dv, dsinks) if x is not None]


@_backward_operator.register_fake
def _(_dout: Any, _dlse: Any, *given: Any) -> list[Tensor]:
    made = [_gradient(x, want) for x, want in zip(given[:_LEARNT], given[-1])]
    return [x for x in made if x is not None]


_backward_operator.register_autograd(no_second_derivatives("latent attention"))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:5], *inputs[6:8], *output)  # all but block_table
    ctx.options = inputs[8:]
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    wanted = list(ctx.needs_input_grad[:_LEARNT])
    some = iter(_backward_operator(dout, dlse, *ctx.saved_tensors, *ctx.options, wanted))
    made = [next(some) if want else None for want in wanted]
    return (*made, *[None] * (4 + len(ctx.options)))


_operator.register_autograd(_backward, setup_context=_setup_context)


@_flops.counted("latent_attention")
def _flops_of(*given: Any, out_val: Any) -> Any:
    q, k, _, _, seqlens, block_table, indices, counts, dv = given[:9]
    return _flops.forward(_flops.pairs_of(q, k, seqlens, block_table, indices, counts), q.shape[-1], dv)


@_flops.counted("latent_attention_backward")
def _flops_of_backward(*given: Any, out_val: Any) -> Any:
    _, _, q, k, _, _, seqlens, indices, counts, _, _, dv = given[:12]
    return _flops.backward(_flops.pairs_of(q, k, seqlens, None, indices, counts), q.shape[-1], dv)


def attend(tensors: tuple[Any, ...], given: Options) -> tuple[Tensor, Tensor]:
    """out [b, h, sq, dv] and lse [b, h, sq] of q, k, v (None: the first dv columns of k), sinks, seqlens, block_table, indices
    and counts, the last five or None."""
    direct = _refusals.is_eager(*tensors) and not _refusals.needs_grad(*tensors)
    out, lse = (_run if direct else _operator)(*tensors, *given)
    return out, lse


class Sizes(NamedTuple):
    """Of one call: sequences, query tokens, keys at most, head dimensions of both parts of queries, latent columns, head dimension of
    values."""

    b: int
    sq: int
    sk: int
    nope: int
    rope: int
    rank: int
    v: int


def seen_keys(sizes: Sizes, given: Options) -> int:
    """How many keys queries see at most, whatever the lengths."""
    if not given.causal or given.align not in ("top_left", "offset"):
        return sizes.sk
    return max(min(given.offset + sizes.sq, sizes.sk), 0)


def cheaper_form(sizes: Sizes, given: Options, listed: int | None = None) -> str:
    """The form with fewer multiply-adds for each head, over a cache that is full. `listed`: keys that each query reads in the latent
    space; the expanded form hides the others by a mask. Pairs of a query and a key cost 2 rank + rope in the
    latent space, and nope + rope + v outside. Into the latent space and out of it go queries; out of it, for all of them, go keys.

    In DeepSeek-V3's sizes these are even at 170 queries over many keys. Timed, on one thread, both forms are even at 175 in float32
    and 240 in bfloat16 (AMX). A prompt of fewer queries in a cache with room for many more would be less work in the expanded form, by
    1.4 times at most where it is causal. To see that takes lengths, of which the choice would then depend: a graph has none, and a
    sequence's result would change with its neighbours in the batch. How many sequences there are does not matter, either.
    """
    offset = {"bottom_right": sizes.sk - sizes.sq, "offset": given.offset}.get(given.align or "", 0)
    first, last = (min(max(offset + i, 0), sizes.sk) if given.causal else sizes.sk for i in (1, sizes.sq))
    pairs, projected = sizes.sq * (first + last) / 2, sizes.rank * (sizes.nope + sizes.v)
    read = pairs if listed is None else min(pairs, sizes.sq * listed)
    absorbed = (2 * sizes.rank + sizes.rope) * read + projected * sizes.sq
    expanded = (sizes.nope + sizes.rope + sizes.v) * pairs + projected * seen_keys(sizes, given)
    return "absorbed" if absorbed <= expanded else "expanded"


class _Product(torch.autograd.Function):
    """product() where gradients are recorded."""

    @staticmethod
    def forward(ctx: Any, equation: str, x: Tensor, w: Tensor, idle: str) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.equation, ctx.idle = equation, idle
        return torch.einsum(equation, x, w)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        # Switched off whether it is on or not: torch.compile traces this where it is off, and AOTAutograd where it is on.
        with torch.autocast("cpu", enabled=False):
            x, w = ctx.saved_tensors
            of_x, of_w, of_y = _indices_of(ctx.equation)
            dx = product(f"{of_y},{of_w}->{of_x}", dy, w) if ctx.needs_input_grad[1] else None
            if not ctx.needs_input_grad[2]:
                return None, dx, None, None
            if ctx.idle == "y":
                x = x.masked_fill(~dy.any(-1, keepdim=True), 0.0)
            if ctx.idle == "x":
                dy = dy.masked_fill(~x.transpose(1, 2).any(-1, keepdim=True), 0.0)
            return None, dx, product(f"{of_x},{of_y}->{of_w}", x, dy), None


def _indices_of(equation: str) -> tuple[str, str, str]:
    of_x, rest = equation.split(",")
    of_w, of_y = rest.split("->")
    return of_x, of_w, of_y


def product(equation: str, x: Tensor, w: Tensor, idle: str = "") -> Tensor:
    """torch.einsum of rows with the heads' matrices.

    A row without keys gives no gradient, whatever it and its gradient hold: NaN in the padding of a batch must not reach the matrices,
    by 0 times NaN. With idle="y" it is the one whose result has a gradient of 0 (of queries), with "x" the one that is 0 itself (of what
    attention gives; heads come second in x and third in the result).
    """
    if not _refusals.needs_grad(x, w):
        return torch.einsum(equation, x, w)
    made: Tensor = _Product.apply(equation, x, w, idle)  # type: ignore[no-untyped-call]
    return made
