"""States of the delta rule over ranks: what a part of a sequence does to the state that arrives from the part before.

A part is linear in that state: state_out = M state_in + U, and out = own + Q state_in. Rules without a delta have a
diagonal M, the product of their decays. The other rules get M and Q in the same pass as U and own, from K more columns
of values that are 0 and of a state that is the identity; if the kernel does not take V + K columns, in a second pass
over these alone. Once all decays of a head have made M too small to matter, the pass goes on without these columns.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

import rapt

_BLOCK = 256  # tokens between two looks at the decays
_LARGEST = 88.02  # of the logarithm of a decay, as in the kernel: no Inf, which 0 would make NaN
_MOST_COLUMNS = 256  # of v, that rapt.delta_rule takes
_NEGLIGIBLE = -64 * math.log(2)  # a state that decays below 2^-64 is 2^-40 units in the last place of what it was


class Inputs(NamedTuple):
    """The tensors and options of a call on one rank. States have shape [b, h, K, V]."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor | None
    beta: Tensor | None
    a_log: Tensor | None
    dt_bias: Tensor | None
    options: dict[str, Any]  # of rapt.delta_rule, the same on every rank

    @property
    def state_shape(self) -> tuple[int, int, int, int]:
        return self.q.shape[0], self.heads, self.q.shape[-1], self.v.shape[-1]

    @property
    def heads(self) -> int:
        return max(self.k.shape[2], self.v.shape[2])

    @property
    def readers(self) -> int:
        """Query heads that read one state."""
        return max(self.q.shape[2] // self.heads, 1)

    @property
    def has_delta(self) -> bool:
        return str(self.options["rule"]).endswith("delta")

    @property
    def has_decay(self) -> bool:
        return str(self.options["rule"]).startswith("gated") and (self.g is not None)

    def tokens(self, begin: int, end: int) -> Inputs:
        def some(x: Tensor | None) -> Tensor | None:
            return x if x is None or x.dim() == 1 else x[:, begin:end]

        q, k, v = (x[:, begin:end] for x in (self.q, self.k, self.v))
        return Inputs(q, k, v, some(self.g), some(self.beta), self.a_log, self.dt_bias, self.options)

    def of_heads(self, states: Tensor) -> Inputs:
        """The inputs of some states, by their numbers: equally many key, value and state heads."""
        h = self.heads
        q = self.reading(states) if self.q.shape[2] >= h else states // (h // self.q.shape[2])
        k, v = (states // (h // x.shape[2]) for x in (self.k, self.v))
        g, beta = (x if x is None else x.index_select(0 if x.dim() == 1 else 2, states) for x in (self.g, self.beta))
        a_log, dt_bias = (x if x is None else x[states] for x in (self.a_log, self.dt_bias))
        some = (self.q.index_select(2, q), self.k.index_select(2, k), self.v.index_select(2, v))
        return Inputs(*some, g, beta, a_log, dt_bias, self.options)

    def reading(self, states: Tensor) -> Tensor:
        """The heads of out that read these states."""
        return (states[:, None] * self.readers + torch.arange(self.readers)).flatten()

    def run(self, out: Tensor, state: Tensor | None = None, **more: Any) -> Tensor:
        """rapt.delta_rule from `state` into `out`. Returns the final state."""
        final: Tensor = rapt.delta_rule(**self.arguments(), initial_state=state, out=out, return_state=True, **more)[1]
        return final

    def arguments(self) -> dict[str, Any]:
        return {name: x for name, x in self._asdict().items() if name != "options"} | self.options


class Reads(NamedTuple):
    """Rows of tokens [begin, end) that read the state that arrives: own + queries state_in, for these states, or all of
    them if None."""

    begin: int
    end: int
    states: Tensor | None
    readers: int
    queries: Tensor  # [b, end - begin, states * readers, K]
    own: Tensor | None = None  # the same with V

    def write(self, out: Tensor, state: Tensor) -> None:
        assert self.own is not None
        some = state if self.states is None else state[:, self.states]
        of_heads = some if self.readers == 1 else some.repeat_interleave(self.readers, 1)
        for i, rows, of_out in self._blocks(out):
            own, queries = (x[i, rows].transpose(0, 1) for x in (self.own, self.queries))
            made = torch.baddbmm(own, queries, of_heads[i]).transpose(0, 1)
            if self.states is None:
                of_out.copy_(made)
            else:
                by_state = (of_out.shape[0], -1, self.readers, of_out.shape[-1])
                of_out.view(by_state)[:, self.states] = made.view(by_state).to(out.dtype)

    def gradient(self, dout: Tensor) -> Tensor:
        """The gradient of the states that are read, float32 [b, states, K, V]."""
        b, _, heads, size = self.queries.shape
        found = torch.zeros((b, heads, size, dout.shape[-1]), dtype=torch.float32)
        for i, rows, of_out in self._blocks(dout):
            of_rows = of_out.reshape(of_out.shape[0], -1, self.readers, of_out.shape[-1])
            of_rows = of_rows if self.states is None else of_rows[:, self.states]
            queries = self.queries[i, rows].float().permute(1, 2, 0)
            found[i].baddbmm_(queries, of_rows.flatten(1, 2).transpose(0, 1).float())
        return found.view(b, -1, self.readers, *found.shape[2:]).sum(2)

    def _blocks(self, out: Tensor) -> Iterator[tuple[int, slice, Tensor]]:
        """Yields blocks of rows that fit a CPU cache: sequence index, slice within the part, rows of `out`."""
        for i in range(out.shape[0]):
            for first in range(self.begin, self.end, _BLOCK):
                last = min(first + _BLOCK, self.end)
                yield i, slice(first - self.begin, last - self.begin), out[i, first:last]


@dataclass
class Part:
    """What a pass over a rank's tokens has made without the state that arrives."""

    state: Tensor  # U: [b, h, K, V]
    transition: Tensor  # M: [b, h, K, K], or the diagonal [b, h, K, 1]
    reads: list[Reads] = field(default_factory=list)


def moved(transition: Tensor, state: Tensor) -> Tensor:
    """M state."""
    return _where_moved(transition, transition * state if transition.shape[-1] == 1 else transition @ state)


def moved_back(transition: Tensor, gradient: Tensor) -> Tensor:
    """M^T gradient."""
    return _where_moved(transition, transition * gradient if transition.shape[-1] == 1 else transition.mT @ gradient)


def _where_moved(transition: Tensor, made: Tensor) -> Tensor:
    """0 where a transition is 0, so that an Inf or NaN does not pass from one sequence to the next."""
    return made.where(transition.ne(0).flatten(2).any(2)[:, :, None, None], 0.0)


def no_transition(x: Inputs) -> Tensor:
    b, h, size, _ = x.state_shape
    return torch.zeros((b, h, size, size if x.has_delta else 1), dtype=torch.float32)


def pass_without_state(x: Inputs, out: Tensor) -> Part:
    """A pass over all tokens of x from no state. Writes to out what does not depend on the state that arrives."""
    if x.has_delta:
        return _delta_pass(x, out)
    b, t, hq, size = x.q.shape
    own = out.new_empty(out.shape, dtype=torch.float32)
    state = x.run(own)
    logs = _decays(x).clamp(max=_LARGEST) if x.has_decay else torch.zeros((1, 1, 1, 1))
    sums = logs.expand(b, t, x.heads, logs.shape[-1]).cumsum(1).clamp(max=_LARGEST)  # PyTorch adds in double
    q = x.q.float() if hq >= x.heads else x.q.float().repeat_interleave(x.heads // hq, 2)
    if x.options["l2norm_qk"]:
        q = q * (q.square().sum(-1, keepdim=True) + 1e-6).rsqrt()
    scale = size**-0.5 if x.options["scale"] is None else x.options["scale"]
    queries = q.view(b, t, x.heads, x.readers, size) * (sums.exp() * scale)[:, :, :, None]
    transition = sums[:, -1].exp().expand(b, x.heads, size)[..., None].contiguous()
    return Part(state, transition, [Reads(0, t, None, x.readers, queries.flatten(2, 3), own)])


def _delta_pass(x: Inputs, out: Tensor) -> Part:
    b, h, size, value_size = x.state_shape
    part = Part(torch.zeros(x.state_shape), torch.eye(size).repeat(b, h, 1, 1))
    for begin, end, live in _segments(x):
        some, rows = x.tokens(begin, end), out[:, begin:end]
        dead = torch.tensor(sorted(set(range(h)) - set(live)), dtype=torch.int64)
        part.transition[:, dead] = 0
        states = None
        if not live:
            part.state = some.run(rows, part.state)
            continue
        if len(live) < h:
            few = some.of_heads(dead)
            made = rows.new_empty((b, end - begin, len(dead) * x.readers, value_size))
            part.state[:, dead] = few.run(made, part.state[:, dead])
            rows[:, :, x.reading(dead)] = made
            states = torch.tensor(live, dtype=torch.int64)
            some = some.of_heads(states)
        kept = slice(None) if states is None else states
        own, queries, part.state[:, kept], part.transition[:, kept] = _columns(
            some, part.state[:, kept], part.transition[:, kept]
        )
        part.reads.append(Reads(begin, end, states, x.readers, queries, own))
    return part


def _columns(x: Inputs, state: Tensor, transition: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """own, Q, and the state and the transition after x's tokens, of those before."""
    size, value_size = transition.shape[-1], state.shape[-1]
    rows = (*x.q.shape[:2], x.heads * x.readers)
    if value_size + size > _MOST_COLUMNS:
        own, queries = (torch.empty((*rows, columns), dtype=torch.float32) for columns in (value_size, size))
        of_transition = x._replace(v=x.v.new_zeros((*x.v.shape[:3], size)))
        return own, queries, x.run(own, state), of_transition.run(queries, transition)
    wide = torch.empty((*rows, value_size + size), dtype=torch.float32)
    after = x._replace(v=functional.pad(x.v, (0, size))).run(wide, torch.cat((state, transition), -1))
    own, queries = wide.tensor_split([value_size], -1)
    state, transition = after.tensor_split([value_size], -1)
    return own, queries, state, transition


def _segments(x: Inputs) -> list[tuple[int, int, list[int]]]:
    """Runs of tokens, each with the states that still depend on what they were before the first token."""
    t, h = x.q.shape[1], x.heads
    if not x.has_decay:
        return [(0, t, list(range(h)))]
    logs = _decays(x).amax(-1).expand(x.q.shape[0], t, h)
    if not bool((logs.sum(1).amax(0) < _NEGLIGIBLE).any()):
        return [(0, t, list(range(h)))]
    beta = torch.ones(()) if x.beta is None else x.beta.float()
    beta = beta.sigmoid() if x.options["beta_sigmoid"] else beta
    beta = 2 * beta if x.options["beta_double"] else beta
    if not x.options["l2norm_qk"]:
        beta = beta * x.k.float().square().sum(-1).repeat_interleave(h // x.k.shape[2], 2)
    # |I - beta k k^T| is at most the larger of 1 and |1 - beta |k|^2|. A norm of k is at most 1.
    bound = (logs + (1 - beta).abs().clamp(min=1).log()).cumsum(1).amax(0)  # [t, h]
    largest = bound.flip(0).cummax(0).values.flip(0)  # of this token and all later ones
    found: list[tuple[int, int, list[int]]] = []
    for begin in range(0, t, _BLOCK):
        live = list(range(h))
        if begin > 0:  # "not below", so that a bound that is not a number keeps the columns
            some = torch.nonzero(~(largest[begin - 1] < _NEGLIGIBLE)).flatten().tolist()
            live = some if 2 * len(some) < h else live  # two calls share no work on keys: of half the heads, no gain
        end = min(begin + _BLOCK, t)
        if found and found[-1][2] == live:
            found[-1] = found[-1][0], end, live
        else:
            found.append((begin, end, live))
    return found


def _decays(x: Inputs) -> Tensor:
    """The logarithm of the decay, float32 [b or 1, t or 1, h, K or 1]."""
    assert x.g is not None
    g = x.g.float()
    g = g.view(1, 1, -1, 1) if g.dim() == 1 else g if g.dim() == 4 else g[..., None]
    if not x.options["gate"]:
        return g
    rate = torch.ones((1, 1)) if x.a_log is None else x.a_log.exp()[:, None]
    z = g if x.dt_bias is None else g + x.dt_bias.view(x.heads, -1)
    lower = x.options["gate_lower_bound"]
    return -rate * functional.softplus(z, threshold=80) if lower is None else lower * (rate * z).sigmoid()
