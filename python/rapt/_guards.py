"""Guards: checks of what calls read and compute, for those who ask for them."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from rapt import _core
from rapt._scalars import integer, real, truth

__all__ = ["GuardReport", "GuardWarning", "NotWatchedWarning", "guards"]

Place = tuple[str, tuple[int, ...]]
"""An element: its argument or result, or "scores", and its index there."""


@dataclass(frozen=True)
class GuardReport:
    """What a guard has to say of a call."""

    guard: str
    """ "nan", "shadow" or "determinism"."""
    finding: bool
    """False: the guard does not look at calls like this one, which is said once of each operation and reason in each
    block; of the environment's guards once in a process."""
    text: str
    """All of it on one line."""
    problem: str
    entry: str
    place: Place | None
    """Of `value`."""
    seen: Place | None
    """nan: the first result that is not finite, if that is not `place` itself."""
    value: float
    """What is there."""
    wanted: float
    """shadow: what the reference has; determinism: what the second run gave; nan: 0."""
    bound: float
    """shadow: how far `value` may be from `wanted`; else 0."""


class GuardWarning(UserWarning):
    """A finding that no handler gets. Its only argument is the GuardReport's text."""


class NotWatchedWarning(UserWarning):
    """A guard does not look at calls like this one, and no handler gets to know. It is no GuardWarning, so that a filter that
    makes those exceptions lets every right call pass. Its only argument is the GuardReport's text."""


Handler = Callable[[GuardReport], object]


class _Block:
    """One that is open."""

    def __init__(self, words: str, handler: Handler | None) -> None:
        self.words, self.handler = words, handler
        self.not_watched: dict[tuple[str, str, str], GuardReport] = {}
        """What it was told: by guard, operation and reason."""


_blocks: list[_Block] = []  # of all threads; the one that began last is in force
_lock = threading.Lock()
_environment = _Block("", None)  # outside of all


def _place(tensor: str, index: tuple[int, ...]) -> Place | None:
    return (tensor.removeprefix("kv.").removeprefix("score.").removeprefix("cache."), index) if tensor else None


def deliver(guard: str, finding: bool, text: str, problem: str, entry: str, place: str, index: tuple[int, ...], seen: str,
            seen_index: tuple[int, ...], value: float, wanted: float, bound: float, reason: str) -> None:
    """A report of the extension's; what this raises, the call raises."""
    report = GuardReport(guard, finding, text, problem, entry, _place(place, index), _place(seen, seen_index), value, wanted, bound)
    block = [_environment, *_blocks][-1]  # at once: other threads' blocks come and go
    if not finding and block.not_watched.setdefault((guard, problem.partition(" ")[0], reason), report) is not report:
        return
    if block.handler is not None:
        block.handler(report)
    else:
        warnings.warn(text, GuardWarning if finding else NotWatchedWarning, stacklevel=3)


@contextmanager
def guards(*, nan: bool = False, shadow: int = 0, tolerance: float = 1.0, determinism: bool = False,
           handler: Handler | None = None) -> Iterator[None]:
    """Has these guards watch every call of the process on the CPU, of all threads, until the block ends:

        with rapt.guards(nan=True, shadow=16):
            loss = model(batch)

    nan: a result that is not finite, and what of the inputs made it so. shadow: so many rows of every attention are
    computed again in float64 and compared with what the contract allows, times `tolerance`. determinism: every call runs
    twice, on other numbers of threads, and all bits have to be the same. docs/guide/guards.md of the source has what each
    costs. Without arguments none watches, whatever the environment's RAPT_GUARDS says. Of blocks that overlap, nested or on several
    threads, the one that began last holds for all, until it ends.

    `handler` gets a GuardReport when a call is done; what it raises, the call raises, with its results written. By default
    findings are GuardWarnings, which `warnings.simplefilter("error", rapt.GuardWarning)` makes exceptions, and calls that are
    not watched are NotWatchedWarnings. Raises, as the block begins, TypeError that names an argument of another type, and
    ValueError for a negative `shadow` and for a `tolerance` that is not above 0, or without `shadow`."""
    factor = real("tolerance", tolerance)
    if factor is None:
        raise TypeError("tolerance: got None; wanted a number")
    if handler is not None and not callable(handler):
        raise TypeError(f"handler: got {handler!r}; wanted a function of a GuardReport, or None")
    words = [f"shadow={integer('shadow', shadow)}", f"tolerance={factor!r}"]
    words += [name for name, on in (("nan", nan), ("determinism", determinism)) if truth(name, on)]
    block = _Block(",".join(words), handler)
    with _lock:
        _core.set_guards(block.words)
        _blocks.append(block)
    try:
        yield
    finally:
        with _lock:
            _blocks.remove(block)
            _core.set_guards(_blocks[-1].words if _blocks else None)
