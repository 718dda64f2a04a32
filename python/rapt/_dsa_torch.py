"""rapt.torch.index_scores, index_topk and select_topk: rapt.dsa as PyTorch's operators, the scores with gradients."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

import rapt
from rapt import _flops, _refusals
from rapt._autocast import without_autocast
from rapt._autograd import no_second_derivatives
from rapt._dsa import count_of, queries_shape, scores_shape
from rapt._scalars import Alignment, alignment, boolean, given_alignment, real

# What every operator is given, in this order: these and Options.
_TENSORS = ("q", "k", "w", "k_scale", "seqlens", "block_table", "key_begin", "key_end")
_LEARNT = _TENSORS[:3]
_INPUTS = """Tensor q, Tensor k, Tensor w, Tensor? k_scale, Tensor? seqlens, Tensor? block_table, Tensor? key_begin,
    Tensor? key_end"""
_OPTIONS = """str? align, SymInt offset, bool relu, bool causal, float? scale"""
_CHUNK = 1 << 21  # products of queries and keys that the backward has at a time, at least those of one query


class Options(NamedTuple):
    """What is no tensor. An alignment is None, "top_left", "bottom_right" or, with an offset, "offset"."""

    align: str | None
    offset: int
    relu: bool
    causal: bool
    scale: float | None


def _run(function: Callable[..., Any], tensors: Any, options: Any, **more: Any) -> Tensor:
    """A function of rapt.dsa."""
    given = Options(*options)
    align = given_alignment(given.align, given.offset)
    arguments = dict(zip(_TENSORS, tensors)) | {"align": align, "relu": given.relu, "causal": given.causal, "scale": given.scale}
    with torch.no_grad():
        result: Tensor = function(**arguments, **more)
    return result


@torch.library.custom_op(
    "rapt::index_scores", mutates_args=(), device_types=("cpu", "cuda"), schema=f"({_INPUTS}, {_OPTIONS}) -> Tensor"
)
def _scores_operator(*given: Any) -> Tensor:
    return _run(rapt.dsa.index_scores, given[:8], given[8:])


@_scores_operator.register_fake
def _(*given: Any) -> Tensor:
    q, k, _, _, _, block_table, _, _ = given[:8]
    made: Tensor = q.new_empty(scores_shape(q, k, block_table), dtype=torch.float32)
    return made


@torch.library.custom_op(
    "rapt::index_topk", mutates_args=(), device_types=("cpu", "cuda"), schema=f"({_INPUTS}, {_OPTIONS}, SymInt n) -> Tensor"
)
def _topk_operator(*given: Any) -> Tensor:
    return _run(rapt.dsa.index_topk, given[:8], given[8:-1], n=given[-1])


@_topk_operator.register_fake
def _(*given: Any) -> Tensor:
    made: Tensor = given[0].new_empty((*queries_shape(given[0]), given[-1]), dtype=torch.int32)
    return made


@torch.library.custom_op(
    "rapt::select_topk", mutates_args=(), device_types=("cpu", "cuda"), schema="(Tensor scores, SymInt n) -> Tensor"
)
def _select_operator(scores: Tensor, n: int) -> Tensor:
    with torch.no_grad():
        result: Tensor = rapt.dsa.select_topk(scores, n)
    return result


@_select_operator.register_fake
def _(scores: Tensor, n: int) -> Tensor:
    return scores.new_empty((*scores.shape[:-1], n), dtype=torch.int32)


@torch.library.custom_op(
    "rapt::index_scores_backward",
    mutates_args=(),
    device_types="cpu",
    schema=f"(Tensor dscores, {_INPUTS}, {_OPTIONS}, bool[] wanted) -> Tensor[]",
)
@without_autocast
def _backward_operator(dscores: Tensor, *given: Any) -> list[Tensor]:
    """Those of the gradients of q, k and w that are wanted."""
    q, k, w, k_scale, seqlens, block_table, key_begin, key_end, *options, wanted = given
    assert block_table is None
    with torch.no_grad():
        made = [torch.zeros(x.shape, dtype=torch.float32, device="cpu") if want else None for x, want in zip((q, k, w), wanted)]
        for i in range(q.shape[0]):
            of = [None if x is None else x[i] for x in (k_scale, seqlens, key_begin, key_end)]
            to = [None if x is None else x[i] for x in made]
            _add_gradients(_Sequence(dscores[i], q[i], k[i], w[i], *of), Options(*options), to)
        return [x.to(like.dtype) for x, like in zip(made, (q, k, w)) if x is not None]


@_backward_operator.register_fake
def _(_: Any, *given: Any) -> list[Tensor]:
    return [torch.empty_like(x, memory_format=torch.contiguous_format) for x, want in zip(given[:3], given[-1]) if want]


class _Sequence(NamedTuple):
    """Tensors of one sequence, without their first dimension."""

    dscores: Tensor
    q: Tensor
    k: Tensor
    w: Tensor
    k_scale: Tensor | None
    seqlens: Tensor | None
    key_begin: Tensor | None
    key_end: Tensor | None


def _add_gradients(given: _Sequence, options: Options, to: list[Tensor | None]) -> None:
    """To float32 zeros like q, k and w. The products of as many queries as _CHUNK says are computed again at a time, with the
    keys that these queries may see."""
    (sq, h, d), length = given.q.shape, given.k.shape[0] if given.seqlens is None else int(given.seqlens)
    start = {"bottom_right": length - sq, "offset": options.offset}.get(options.align or "", 0)
    factor = torch.full((length,), d**-0.5 if options.scale is None else options.scale, dtype=torch.float32, device="cpu")
    if given.k_scale is not None:
        factor = factor * given.k_scale[:length]
    k = given.k[:length].float()
    keys, k_is_finite = torch.arange(length, device="cpu"), bool(torch.isfinite(k).all())
    step = max(_CHUNK // max(h * length, 1), 1)
    for first in range(0, sq, step):
        rows = slice(first, min(first + step, sq))
        last = min(max(start + rows.stop, 0), length) if options.causal else length
        seen = torch.ones(rows.stop - first, last, dtype=torch.bool, device="cpu")
        if options.causal:
            seen &= keys[:last] <= torch.arange(first, rows.stop, device="cpu")[:, None] + start
        if given.key_begin is not None:
            seen &= keys[:last] >= given.key_begin[rows, None]
        if given.key_end is not None:
            seen &= keys[:last] < given.key_end[rows, None]
        # 0 times what is not finite would not be 0: where there is such a number, each query has the keys that it sees only.
        whole = k_is_finite and bool(torch.isfinite(given.q[rows]).all())
        pieces: list[tuple[slice, Any]] = [(rows, slice(last))]
        if not whole:
            pieces = [(slice(first + i, first + i + 1), its.nonzero()[:, 0]) for i, its in enumerate(seen)]
        for tokens, some in pieces:
            q, w, dscores = given.q[tokens].float(), given.w[tokens], given.dscores[tokens][:, some]
            hidden = ~seen[tokens.start - first : tokens.stop - first][:, some]
            g = (dscores * factor[some]).masked_fill_(hidden, 0.0)  # [tokens, keys]
            products = (q.flatten(0, 1) @ k[some].T).view(len(q), h, -1 if g.numel() else 0)
            off = hidden[:, None]
            if options.relu:
                off = off | (products <= 0)
            if to[2] is not None:
                to[2][tokens] = (products.masked_fill(off, 0.0) @ g[:, :, None]).squeeze(-1)
            if to[0] is None and to[1] is None:
                continue
            dproducts = (w[:, :, None] * g[:, None]).masked_fill_(off, 0.0).flatten(0, 1)
            if to[0] is not None:
                to[0][tokens] = (dproducts @ k[some]).view(len(q), h, d)
            if to[1] is not None:
                to[1][some] += dproducts.T @ q.flatten(0, 1)


_backward_operator.register_autograd(no_second_derivatives("index_scores"))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs[:8])
    ctx.options = inputs[8:]


def _backward(ctx: Any, dscores: Tensor) -> tuple[Tensor | None, ...]:
    wanted = list(ctx.needs_input_grad[:3])
    some = iter(_backward_operator(dscores, *ctx.saved_tensors, *ctx.options, wanted))
    made = [next(some) if want else None for want in wanted]
    return (*made, *[None] * (5 + len(ctx.options)))


_scores_operator.register_autograd(_backward, setup_context=_setup_context)


@_flops.counted("index_scores", "index_topk")
def _flops_of(q: Tensor, k: Tensor, *given: Any, out_val: Any) -> Any:
    """Of q [b, sq, h, d] and k [b, sk, d], or pages."""
    _, _, seqlens, block_table = given[:4]
    b, sq, h, d = q.shape
    keys = _flops.total(seqlens, b, k.shape[-2] * (1 if block_table is None else block_table.shape[1]))
    return 2 * sq * h * keys * d


@_flops.counted("index_scores_backward")
def _flops_of_backward(_: Tensor, *given: Any, out_val: Any) -> Any:
    """Products again, and gradients of queries and keys."""
    return 3 * _flops_of(*given, out_val=None)


def _options(align: Any, relu: Any, causal: Any, scale: Any) -> Options:
    return Options(*alignment(align), boolean("relu", relu), boolean("causal", causal), real("scale", scale))


def _check(name: str, tensors: dict[str, Tensor | None], out: Tensor | None, missing: str = "") -> None:
    _refusals.check_tensors(tensors | {"out": out}, f"rapt.dsa.{name}", missing)


def _refuse_with_operators(**given: Any) -> None:
    for name, x in given.items():
        if x is not None:
            got = "a tensor" if isinstance(x, Tensor) else repr(x)
            raise ValueError(f"{name}: got {got} with gradients or under torch.compile; wanted None")


def index_scores(
    q: Tensor,
    k: Tensor,
    w: Tensor,
    *,
    align: Alignment = None,
    relu: bool = True,
    causal: bool = True,
    scale: float | None = None,
    k_scale: Tensor | None = None,
    seqlens: Tensor | None = None,
    block_table: Tensor | None = None,
    key_begin: Tensor | None = None,
    key_end: Tensor | None = None,
    out: Tensor | None = None,
    threads: int | None = None,
    isa: str | None = None,
) -> Tensor:
    """rapt.dsa.index_scores for PyTorch tensors, with gradients on the CPU and as an operator under torch.compile.

    Takes and returns what rapt.dsa.index_scores does. `out`, `threads` and `isa` are for eager calls without gradients.
    Those of q, k and w that require grad get gradients; k_scale and keys in pages have none. A key that a query does
    not see contributes nothing, whatever its score's gradient.

    The backward uses PyTorch's matrix products in float32. It recomputes the products of the heads for a few queries at
    a time, in memory for a few times 2**21 of them, or for those of one query, never for all [b, sq, h, sk]. There are
    no second derivatives. Raises TypeError or ValueError, which names the argument.
    """
    tensors = (q, k, w, k_scale, seqlens, block_table, key_begin, key_end)
    named = dict(zip(_TENSORS, tensors))
    grad = _refusals.needs_grad(*tensors)
    _check("index_scores", named, out, "gradients of the indexer have no GPU kernels yet" if grad else "")
    options = _options(align, relu, causal, scale)
    if not grad and _refusals.is_eager(*tensors, out):
        return _run(rapt.dsa.index_scores, tensors, options, out=out, threads=threads, isa=isa)
    _refuse_with_operators(out=out, threads=threads, isa=isa)
    if grad:
        for name, x in named.items():
            if name not in _LEARNT and x is not None and x.requires_grad:
                raise ValueError(f"{name}: got a tensor that requires grad; wanted one that does not")
        if k.requires_grad and k.itemsize == 1:
            raise ValueError(f"k: got a tensor of {k.dtype} that requires grad; wanted one that does not, as it is quantised")
        if block_table is not None:
            raise ValueError("block_table: got pages with inputs that require grad; wanted k [b, sk, d], or torch.no_grad()")
    result: Tensor = _scores_operator(*tensors, *options)
    return result


def index_topk(
    q: Tensor,
    k: Tensor,
    w: Tensor,
    n: int,
    *,
    align: Alignment = None,
    relu: bool = True,
    causal: bool = True,
    scale: float | None = None,
    k_scale: Tensor | None = None,
    seqlens: Tensor | None = None,
    block_table: Tensor | None = None,
    key_begin: Tensor | None = None,
    key_end: Tensor | None = None,
    out: Tensor | None = None,
    threads: int | None = None,
    isa: str | None = None,
) -> Tensor:
    """rapt.dsa.index_topk for PyTorch tensors, also as an operator under torch.compile.

    Takes and returns what rapt.dsa.index_topk does. `out`, `threads` and `isa` are for eager calls. A selection has no
    gradient: inputs that require grad are accepted, and no gradient is recorded. Raises TypeError or ValueError, which
    names the argument.
    """
    tensors = (q, k, w, k_scale, seqlens, block_table, key_begin, key_end)
    _check("index_topk", dict(zip(_TENSORS, tensors)), out)
    options = _options(align, relu, causal, scale)
    if _refusals.is_eager(*tensors, out):
        return _run(rapt.dsa.index_topk, tensors, options, n=n, out=out, threads=threads, isa=isa)
    _refuse_with_operators(out=out, threads=threads, isa=isa)
    with torch.no_grad():
        result: Tensor = _topk_operator(*tensors, *options, n if torch.compiler.is_compiling() else count_of(n))
    return result


def select_topk(
    scores: Tensor, n: int, *, out: Tensor | None = None, threads: int | None = None, isa: str | None = None
) -> Tensor:
    """rapt.dsa.select_topk for PyTorch tensors, also as an operator under torch.compile.

    Takes and returns what rapt.dsa.select_topk does. `out`, `threads` and `isa` are for eager calls. A selection has no
    gradient: scores that require grad are accepted, and no gradient is recorded. Gathering values with the indices has
    gradients. Raises TypeError or ValueError, which names the argument.
    """
    _refusals.check_tensors({"scores": scores, "out": out}, "rapt.dsa.select_topk")
    with torch.no_grad():
        if _refusals.is_eager(scores, out):
            result: Tensor = rapt.dsa.select_topk(scores, n, out=out, threads=threads, isa=isa)
            return result
        _refuse_with_operators(out=out, threads=threads, isa=isa)
        result = _select_operator(scores, n if torch.compiler.is_compiling() else count_of(n))
    return result


for _function in (index_scores, index_topk, select_topk):
    _of_arrays = getattr(rapt.dsa, _function.__name__)
    assert list(inspect.signature(_function).parameters) == list(inspect.signature(_of_arrays).parameters)
