"""Guards: optional checks of what calls read and compute."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from rapt import _core
from rapt._scalars import boolean, integer, real

__all__ = ["GuardReport", "GuardWarning", "NotWatchedWarning", "guards"]

Place = tuple[str, tuple[int, ...]]
"""An element: the name of its argument or result, or "scores", and its index."""


@dataclass(frozen=True)
class GuardReport:
    """A guard's report of a call."""

    guard: str
    """ "nan", "shadow" or "determinism"."""
    finding: bool
    """False: the guard does not check calls like this one. Reported once per operation and reason in each block, and for
    the environment's guards once per process."""
    text: str
    """The whole report on one line."""
    problem: str
    """The problem of the call, as text."""
    entry: str
    """The name of the entry that computed the call."""
    place: Place | None
    """The element with `value`; None if not `finding`."""
    seen: Place | None
    """nan: the first result that is not finite, if it is not `place` itself."""
    value: float
    """The element's value."""
    wanted: float
    """shadow: the reference's value; determinism: the second run's value; nan: 0."""
    bound: float
    """shadow: the largest allowed difference of `value` and `wanted`; otherwise 0."""


class GuardWarning(UserWarning):
    """A finding, if there is no handler. Its only argument is the GuardReport's text."""


class NotWatchedWarning(UserWarning):
    """A guard does not check calls like this one, if there is no handler. Its only argument is the GuardReport's text.

    It is no GuardWarning: a filter that makes findings exceptions does not stop correct calls.
    """


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
    """A context manager: guards check every call on the CPU, in all threads of the process, until the block ends.

        with rapt.guards(nan=True, shadow=16):
            loss = model(batch)

    nan             True: report results that are not finite, and the input that caused them.
    shadow          This many rows of every attention call are recomputed in float64 and compared with the contract's
                    bounds.
    tolerance       A factor of these bounds, above 0, default 1.
    determinism     True: every call runs twice, on different numbers of threads, and all bits must be equal.
    handler         A function that receives a GuardReport after a call. If it raises, the call raises the same
                    exception, with its results written. Default: findings are GuardWarnings, which
                    `warnings.simplefilter("error", rapt.GuardWarning)` makes exceptions, and calls that are not checked
                    are NotWatchedWarnings.

    Without arguments no guard checks calls, whatever the environment's RAPT_GUARDS. If several blocks are open, nested
    or in several threads, the one that began last applies to all threads. docs/guide/guards.md in the source states the
    cost of each guard. Raises, as the block begins, TypeError for an argument of a wrong type, and ValueError for a
    negative shadow, and for a tolerance that is not above 0 or has no shadow; each names the argument.
    """
    factor = real("tolerance", tolerance)
    if factor is None:
        raise TypeError("tolerance: got None; wanted a number")
    if handler is not None and not callable(handler):
        raise TypeError(f"handler: got {handler!r}; wanted a function of a GuardReport, or None")
    words = [f"shadow={integer('shadow', shadow)}", f"tolerance={factor!r}"]
    words += [name for name, on in (("nan", nan), ("determinism", determinism)) if boolean(name, on)]
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
