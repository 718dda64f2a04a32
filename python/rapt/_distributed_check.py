"""Checks that all ranks make the same call before they exchange tensors.

A rank with another shape, or with an error, would leave the others waiting. So all ranks first exchange sizes and
options, and all of them raise if one differs. Every call does this: a rank cannot know that another has other sizes.
"""

from __future__ import annotations

import hashlib
import math
import struct
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

import rapt
from rapt import _refusals
from rapt._distributed_kernel import keywords
from rapt._distributed_parts import Options, Span, spans
from rapt._scalars import Alignment, alignment, boolean, finite, integer

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
METHODS = (
    "all_gather_attention",
    "ring_attention",
    "ulysses_attention",
    "unshard_sequence",
    "delta_rule",
    "decode_attention",
)
_RULES = ("linear", "gated", "delta", "gated_delta")
Group = Any  # a ProcessGroup, None for all processes, of some functions a DeviceMesh
Call = dict[str, Any]  # what must be the same on every rank, by the argument's name
_PAD = ": pad the sequence to a multiple of the ranks, twice that if balanced"
_LENGTH = 32  # entries, padded: ranks that call different methods can compare


class LostRank(RuntimeError):
    """Another rank has ended, or does not call."""


class Ranks(NamedTuple):
    held: weakref.ref[Any]  # autograd keeps this: a group with threads must not outlive destroy_process_group()
    rank: int
    size: int
    method: str  # the function of rapt.distributed that exchanges messages

    @property
    def group(self) -> Any:
        group = self.held()
        if group is None:
            raise ValueError("group: got one that is destroyed; wanted backward() before destroy_process_group()")
        return group

    @property
    def numbers(self) -> list[int]:
        """The global numbers of all ranks of the group, for messages to people."""
        return dist.get_process_group_ranks(self.group)

    def peer(self, step: int) -> int:
        """The global number of the rank `step` after this one, in a ring."""
        return dist.get_global_rank(self.group, (self.rank + step) % self.size)

    def sends(self, device: str) -> bool:
        """Whether the group has a backend for tensors on such devices: "cpu:gloo,cuda:nccl" has for two."""
        return self.size == 1 or f"{device}:" in dist.get_backend_config(self.group)

    def check_device(self, name: str, x: Tensor) -> None:
        """Raises for a tensor that the group cannot send."""
        if not self.sends(x.device.type):
            got = f"a tensor on {x.device}, with a group of the backend {dist.get_backend_config(self.group)}"
            raise ValueError(f"{name}: got {got}; wanted a device that the backend has")

    def gather(self, part: Tensor) -> Tensor:
        """The parts of all ranks, one after another along the first dimension."""
        if self.size == 1:
            return part
        parts, part = part.new_empty((part.shape[0] * self.size, *part.shape[1:])), part.contiguous()
        with self.messages():
            gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # of older PyTorch
            gather(parts, part, group=self.group)
        return parts

    def exchange(self, parts: Tensor) -> Tensor:
        """Sends parts[i] to rank i, of equal parts along the first dimension. Returns the parts received, by rank."""
        if self.size == 1:
            return parts
        received, parts = parts.new_empty(parts.shape), parts.contiguous()
        with self.messages():
            dist.all_to_all_single(received, parts, group=self.group)
        return received

    def sum_of_parts(self, parts: Tensor) -> Tensor:
        """Sends parts[i] to rank i. Returns the sum of the parts received, added in the order of ranks: as many bytes
        as a reduce_scatter, and the same bits in every run."""
        total, *others = self.exchange(parts).chunk(self.size)
        for other in others:
            total = total.add_(other)
        return total

    @contextmanager
    def messages(self) -> Iterator[None]:
        """For a block that exchanges messages: says which group has failed, and where."""
        try:
            yield
        except RuntimeError as error:
            ranks = self.numbers
            named = ", ".join(map(str, ranks)) if self.size <= 16 else f"{ranks[0]} to {ranks[-1]}, {self.size} in all"
            raise LostRank(
                f"rapt.distributed.{self.method}: rank {ranks[self.rank]} lost another rank of its group (ranks "
                f"{named}). That rank has ended, raised an error or not called within the group's timeout. "
                f"End all ranks. {error}"
            ) from error


def ranks_of(group: Group, method: str) -> Ranks:
    if not (dist.is_available() and dist.is_initialized()):
        raise ValueError("group: got no process group; wanted torch.distributed.init_process_group() before this call")
    if group is not None and not isinstance(group, dist.ProcessGroup):
        if group is dist.GroupMember.NON_GROUP_MEMBER:
            raise ValueError("group: got a group without this process; wanted one that it is a member of")
        raise TypeError(f"group: got {type(group).__name__}; wanted a ProcessGroup, or None for all processes")
    group = dist.group.WORLD if group is None else group
    rank = dist.get_rank(group)
    if rank < 0:
        raise ValueError("group: got a group without this process; wanted one that it is a member of")
    return Ranks(weakref.ref(group), rank, dist.get_world_size(group), method)


def dimensions_of(group: Group, method: str) -> tuple[Ranks, ...]:
    """The ranks of a process group; of a DeviceMesh, those along each of its one or two dimensions."""
    if group is None or isinstance(group, dist.ProcessGroup) or not dist.is_initialized():
        return (ranks_of(group, method),)
    from torch.distributed.device_mesh import DeviceMesh

    if not isinstance(group, DeviceMesh):
        return (ranks_of(group, method),)  # which refuses it
    if group.ndim > 2:
        raise ValueError(f"group: got a mesh of {group.ndim} dimensions; wanted one or two of them: mesh[names]")
    place = group.get_coordinate()
    if place is None:
        raise ValueError("group: got a mesh without this process; wanted one that it is a member of")
    dimensions = tuple(ranks_of(group.get_group(i), method) for i in range(group.ndim))
    if [ranks.rank for ranks in dimensions] != list(place):
        raise ValueError("group: got a mesh whose ranks do not ascend; wanted them in order along each dimension")
    return dimensions


def flattened(dimensions: tuple[Ranks, ...]) -> Ranks:
    """This rank's place among all of a mesh, for no messages."""
    first, *others = dimensions
    for ranks in others:
        first = first._replace(rank=first.rank * ranks.size + ranks.rank, size=first.size * ranks.size)
    return first


class Numbers(int):
    """A hash of a small tensor's numbers, 0 for None: all ranks must give the same."""

    @staticmethod
    def of(x: Tensor | None) -> Numbers:
        if x is None:
            return Numbers(0)
        held = x.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        named = f"{x.dtype}{tuple(x.shape)}".encode()
        return Numbers(int.from_bytes(hashlib.blake2b(named + held, digest_size=7).digest(), "little") or 1)

    def __str__(self) -> str:
        return f"a tensor with hash {int(self):014x}" if self else "None"


def agree(ranks: Ranks, call: Call | None, error: Exception | None, own_size: int = 0) -> list[int]:
    """Raises on every rank unless all of them make the same call. `error` is why this rank has none. Returns every
    rank's own_size, which may differ."""
    if ranks.size == 1:
        if error is not None:
            raise error
        return [own_size]
    # Begins with 0 if this rank has an error, with -1 if it lost another.
    sent = torch.full((_LENGTH + 1,), -isinstance(error, LostRank), dtype=torch.int64, device="cpu")
    if error is None:
        try:
            own = [1, *map(_number, (call or {}).values())]
            own += [0] * (_LENGTH - len(own)) + [own_size]
            sent = torch.tensor(own, dtype=torch.int64, device="cpu")
        except Exception as refused:  # a number that int64 does not hold
            error = refused
    if ranks.sends("cpu"):
        rows = ranks.gather(sent).view(ranks.size, -1).tolist()
    else:  # on a stream of its own: not to wait for the kernels of earlier calls
        with torch.cuda.stream(_stream(torch.cuda.current_device())):
            rows = ranks.gather(sent.cuda()).view(ranks.size, -1).tolist()
    if error is not None:
        raise error
    assert call is not None
    if all(row[:-1] == own[:-1] for row in rows):
        return [row[-1] for row in rows]
    for rank, row in zip(ranks.numbers, rows):
        if row[0] < 0:
            raise LostRank(f"rapt.distributed.{ranks.method}: rank {rank} lost another rank, and says why. End all ranks")
        if row[0] == 0:
            raise ValueError(f"group: rank {rank} refuses its arguments, and says why; wanted valid ones on every rank")
    for i, (name, mine) in enumerate(call.items(), 1):
        for rank, row in zip(ranks.numbers, rows):
            if row[i] != rows[0][i]:
                a, b = (_value(x, mine) for x in (rows[0][i], row[i]))
                hint = _PAD if name in ("sq", "sk") else ""
                got = f"{a} on rank {ranks.numbers[0]} and {b} on rank {rank}"
                raise ValueError(f"{name}: got {got}; wanted the same on every rank{hint}")
    raise AssertionError("unreachable: rows differ")


def agree_along(dimensions: tuple[Ranks, ...], call: Call | None, error: Exception | None) -> None:
    """agree() of all ranks of a mesh: what one dimension finds is an error to the next."""
    for ranks in reversed(dimensions):
        try:
            agree(ranks, call, error)
        except Exception as refused:
            error = refused
    if error is not None:
        raise error


@cache
def _stream(device: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


class Request(NamedTuple):
    """What the attention functions are given besides q, k and v."""

    ranks: Ranks
    options: Options
    balanced: bool
    alibi: Tensor | None
    sinks: Tensor | None
    with_lse: bool
    offsets: list[int] | None = None  # of packed sequences in the tokens of all ranks, which are a batch of one

    def spans(self, x: Tensor, rank: int | None = None) -> list[Span]:
        """Where a rank's rows of x, [b, h, s, d], lie in the sequence. Default: this rank's."""
        return spans(self.ranks.rank if rank is None else rank, self.ranks.size, x.shape[2], self.balanced)

    @property
    def has_positions(self) -> bool:
        """Whether it matters where a row lies among the keys."""
        return self.options.positional or self.alibi is not None

    def keywords(self, align: Alignment) -> dict[str, Any]:
        """Arguments of rapt.attention for a block of rows and keys."""
        return keywords(self.options, align, self.alibi)


def attention_call(ranks: Ranks, given: dict[str, Any]) -> tuple[Call, Request]:
    """The call, and what is computed, of a function's arguments. Raises TypeError or ValueError, naming the argument,
    also for what kernels refuse: ranks must not raise between two messages."""
    q, k, v, alibi, sinks = (given[name] for name in ("q", "k", "v", "alibi", "sinks"))
    _refusals.check_tensors({"q": q, "k": k, "v": v, "alibi": alibi, "sinks": sinks}, "parts of a sequence as tensors")
    for name, x in {"q": q, "k": k, "v": v}.items():
        if x is None or x.dim() != 4:
            raise ValueError(f"{name}: got {'None' if x is None else f'shape {list(x.shape)}'}; wanted [b, h, s, d]")
        if x.dtype not in DTYPES or x.dtype is not q.dtype:
            raise TypeError(f"{name}: got {x.dtype}; wanted one of float32, bfloat16 and float16 for q, k and v")
    (b, hq, sq, d), (_, hk, sk, _), dv = q.shape, k.shape, v.shape[3]
    if tuple(k.shape) != (b, hk, sk, d):
        raise ValueError(f"k: got shape {list(k.shape)}; wanted {b} sequences of heads of {d}, as q has")
    if tuple(v.shape) != (b, hk, sk, dv):
        raise ValueError(f"v: got shape {list(v.shape)}; wanted [{b}, {hk}, {sk}, dv], as k has")
    call: Call = {"method": ranks.method, "device": q.device.type, "dtype": str(q.dtype), "b": b, "hq": hq, "hk": hk}
    call |= {"sq": sq, "sk": sk, "d": d, "dv": dv}
    for name, size in list(call.items())[3:]:
        if size == 0:
            raise ValueError(f"{name}: got 0; wanted 1 or more on every rank")
    if hq % hk != 0:
        raise ValueError(f"k: got {hk} heads; wanted a divisor of q's {hq}")
    balanced, with_lse = (boolean(name, given[name]) for name in ("balanced", "return_lse"))
    for name, rows in (("q", q.shape[2]), ("k", sk)):
        if balanced and rows % 2 != 0:
            raise ValueError(f"{name}: got {rows} rows in a balanced part; wanted an even number, for two chunks")
    for name, numbers in (("alibi", alibi), ("sinks", sinks)):
        if numbers is not None and tuple(numbers.shape) != (hq,):
            raise ValueError(f"{name}: got shape {list(numbers.shape)}; wanted [{hq}], one for each query head")
        if _refusals.needs_grad(numbers):
            raise ValueError(f"{name}: got a tensor that requires grad; wanted {name}.detach(): it has no gradients")
    ranks.check_device("q", q)
    gradients = _refusals.needs_grad(q, k, v)
    causal = boolean("causal", given["causal"])
    left, right = window_sides(given["window"])
    positional = causal or left >= 0 or right >= 0 or alibi is not None
    kind, offset = alignment(given["align"])
    if kind is None and sq != sk and positional:
        raise ValueError(f'align: got None for {sq} and {sk} rows; wanted "top_left", "bottom_right" or an offset')
    if kind == "bottom_right":
        offset = (sk - sq) * ranks.size
    scale, softcap = (finite(name, given[name]) for name in ("scale", "softcap"))
    options = Options(causal, offset if positional else 0, left, right, scale, softcap)
    with torch.no_grad():
        rapt.explain(q, k, v, sinks=sinks, **keywords(options, options.offset if positional else None, alibi))
    call |= {"causal": causal, "align": options.offset, "window[0]": left, "window[1]": right}
    call |= {"scale": d**-0.5 if scale is None else scale, "softcap": math.inf if softcap is None else softcap}
    call |= {"alibi": Numbers.of(alibi), "sinks": Numbers.of(sinks), "balanced": balanced}
    call |= {"requires_grad": gradients, "return_lse": with_lse}
    return call, Request(ranks, options, balanced, alibi, sinks, with_lse)


def whole_call(ranks: Ranks, x: Tensor, dim: Any, balanced: Any) -> tuple[Call, int]:
    """The call of a function that joins the parts of all ranks along `dim`, and dim counted from 0."""
    _refusals.check_tensors({"x": x}, "a tensor")
    ranks.check_device("x", x)
    dim = dimension(x, dim)
    if boolean("balanced", balanced) and x.shape[dim] % 2 != 0:
        raise ValueError(f"x: got {x.shape[dim]} rows in a balanced part; wanted an even number, for two chunks")
    if _refusals.needs_grad(x):
        raise ValueError("x: got a tensor that requires grad; wanted x.detach(): unshard_sequence has no gradients")
    if x.dim() > 16:
        raise ValueError(f"x: got {x.dim()} dimensions; wanted 16 or fewer")
    call: Call = {"method": "unshard_sequence", "device": x.device.type, "dtype": str(x.dtype), "dimensions": x.dim(), "dim": dim}
    call |= {"balanced": balanced}
    return call | {f"x.shape[{i}]": size for i, size in enumerate(x.shape)}, dim


def dimension(x: Tensor, dim: Any) -> int:
    number = integer("dim", dim)
    if not -x.dim() <= number < x.dim():
        raise ValueError(f"dim: got {number} for shape {list(x.shape)}; wanted one of its dimensions")
    return number % x.dim()


def check_offsets(cu_seqlens: Tensor) -> None:
    if not isinstance(cu_seqlens, Tensor):
        raise TypeError(f"cu_seqlens: got {type(cu_seqlens).__name__}; wanted a tensor")
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 2 or cu_seqlens.dtype not in (torch.int32, torch.int64):
        got = f"{cu_seqlens.dtype} of shape {list(cu_seqlens.shape)}"
        raise ValueError(f"cu_seqlens: got {got}; wanted int32 or int64 [sequences + 1], of all ranks' tokens")
    if int(cu_seqlens[0]) != 0 or bool((cu_seqlens.diff() < 0).any()):
        raise ValueError("cu_seqlens: got offsets that fall or do not begin at 0; wanted 0 to the tokens of all ranks")


def check_total(cu_seqlens: Tensor, total: int) -> None:
    if int(cu_seqlens[-1]) != total:
        got = f"offsets up to {int(cu_seqlens[-1])}"
        raise ValueError(f"cu_seqlens: got {got}; wanted {total}, the tokens of all ranks")


def window_sides(window: Any) -> tuple[int, int]:
    if window is None:
        return -1, -1
    try:
        left, right = (-1 if x is None else integer("window", x) for x in window)
    except (TypeError, ValueError):
        raise ValueError(f"window: got {window!r}; wanted (left, right), ints or None") from None
    if not (-1 <= left < 2**63 and -1 <= right < 2**63):
        raise ValueError(f"window: got {window!r}; wanted numbers of keys, or -1 or None for an open side")
    return left, right


_WORDS = (*METHODS, *_RULES, "cpu", "cuda", *sorted({str(x) for x in vars(torch).values() if isinstance(x, torch.dtype)}))


def _number(x: Any) -> int:
    if isinstance(x, str):
        return _WORDS.index(x)
    if isinstance(x, float):
        return int(struct.unpack("q", struct.pack("d", x))[0])
    return int(x)


def _value(number: int, like: Any) -> Any:
    if isinstance(like, str):
        return _WORDS[number]
    if isinstance(like, float):
        return struct.unpack("d", struct.pack("q", number))[0]
    return type(like)(number)
