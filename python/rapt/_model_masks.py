"""transformers' masks as what they say: causality, a window, lengths and borders of sequences."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import masking_utils as masks

from rapt import _refusals
from rapt._model_lazy import LazyTensor


class _Pattern(NamedTuple):
    causal: bool
    window: int | None
    sequences: Tensor | None  # [b, n], of packed sequences: which one a token belongs to


_any = torch.zeros(1, 1)
_and = masks.and_masks(masks.causal_mask_function).__code__
_window = masks.sliding_window_overlay(1).__code__
_window_of_both_sides = masks.sliding_window_bidirectional_overlay(1).__code__
_packed = masks.packed_sequence_mask_function(_any).__code__
_within_packed = masks.remap_positions_for_packed_sequence(masks.causal_mask_function, _any).__code__


def _pattern(function: Any) -> _Pattern | None:
    """What a mask function of transformers' hides, None for functions of other patterns.

    The functions are closures: their code says which one it is, and their cells what it was made of.
    """
    base, windows, sequences, within = [], [], [], 0
    left = [function]
    while left:
        function = left.pop()
        code = getattr(function, "__code__", None)
        closure = getattr(function, "__closure__", None) or ()
        cells = {} if code is None else dict(zip(code.co_freevars, (cell.cell_contents for cell in closure)))
        if function is masks.causal_mask_function or function is masks.bidirectional_mask_function:
            base.append(function)
        elif code is _and:
            left += cells.get("mask_functions", ())
        elif code is _within_packed:
            left.append(cells.get("mask_function"))
            within += 1
        elif code is _packed:
            sequences.append(cells.get("packed_sequence_mask"))
        elif code is _window or code is _window_of_both_sides:
            windows.append((code is _window, cells.get("sliding_window")))
        else:
            return None
    causal = base == [masks.causal_mask_function]
    if len(base) != 1 or len(windows) > 1 or len(sequences) > 1 or within != len(sequences):
        return None
    if windows and windows[0][0] != causal:
        return None
    return _Pattern(causal, windows[0][1] if windows else None, sequences[0] if sequences else None)


def mask(**arguments: Any) -> Any:
    """What rapt_flash gets as its mask: None where causality and the layer's window are all there is to it, [b, m] bool of padding,
    or the borders [sequences + 1] of packed sequences. NotImplemented where only a whole mask will do."""
    found = _pattern_and_mask(**arguments)
    return found if found is NotImplemented else found[1]


def lazy_mask(whole: Callable[..., Tensor | None], arguments: dict[str, Any]) -> LazyTensor | None:
    """The mask [b, 1, n, m] of sequences whose lengths or borders say as much; None of others. It is made by whole(**arguments)
    where a model's code reads it."""
    n, m = arguments.get("q_length"), arguments["kv_length"]
    found = NotImplemented if n is None or n == 1 else _pattern_and_mask(**arguments)
    if found is NotImplemented or found[1] is None:
        return None

    def make() -> Tensor:
        mask = whole(**arguments)
        assert mask is not None
        return mask

    return LazyTensor((arguments["batch_size"], 1, n, m), found[1], torch.bool, found, make)


def _pattern_and_mask(
    mask_function: Any,
    kv_length: int,
    q_length: int | None = None,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    attention_mask: Tensor | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    config: Any = None,
    device: Any = "cpu",
    **_: Any,
) -> Any:
    if _refusals.is_traced() or q_length is None or isinstance(q_offset, Tensor) or torch.device(device).type != "cpu":
        return NotImplemented
    pattern = _pattern(mask_function)
    if pattern is None or getattr(config, "use_bidirectional_attention", None):
        return NotImplemented
    if pattern.window is not None and pattern.window != window_of(config):
        return NotImplemented
    if pattern.sequences is not None:
        whole = attention_mask is None and q_length == kv_length and q_offset == kv_offset
        return (pattern, _borders(pattern.sequences)) if whole else NotImplemented
    if not (allow_is_causal_skip if pattern.causal else allow_is_bidirectional_skip):
        return NotImplemented
    if pattern.causal and q_offset + q_length != kv_offset + kv_length:
        return NotImplemented
    if attention_mask is None:
        return pattern, None
    if attention_mask.shape[-1] < kv_offset + kv_length:
        return NotImplemented
    shown = attention_mask[:, kv_offset : kv_offset + kv_length]
    if shown.all():
        return pattern, None
    if pattern.causal and (q_length == 1 or q_length > kv_length):  # a mask of one row is short
        return NotImplemented
    if not pattern.causal and pattern.window is not None and q_length != kv_length:
        return NotImplemented
    if pattern.window is not None and not is_whole(shown):  # its distances count the tokens that are left out
        return NotImplemented
    return pattern, shown


def window_of(config: Any) -> Any:
    try:
        return getattr(config, "sliding_window", None)
    except RuntimeError:  # it differs from layer to layer
        return None


def is_whole(shown: Tensor) -> bool:
    """Whether the tokens of each sequence are neighbours."""
    begins = shown[:, :1].int().sum(1) + (shown[:, 1:] & ~shown[:, :-1]).sum(1)
    return bool((begins <= 1).all())


def _borders(sequences: Tensor) -> Tensor:
    """int32 [sequences + 1] in all rows of a batch, for the sequence [b, n] that each token belongs to."""
    first = torch.ones_like(sequences, dtype=torch.bool)
    first[:, 1:] = sequences[:, 1:] != sequences[:, :-1]
    begins = first.flatten().nonzero()[:, 0]
    return torch.nn.functional.pad(begins, (0, 1), value=sequences.numel()).int()


def borders_of_positions(positions: Any, n: int, m: int) -> Tensor | None:
    """Borders of packed sequences whose positions [1, n] begin again, None for one sequence."""
    if torch.compiler.is_compiling() or n == 1 or n != m:
        return None
    if not isinstance(positions, Tensor) or positions.shape != (1, n):
        return None
    if int(positions[0, -1]) - int(positions[0, 0]) == n - 1:
        return None
    begins = (positions[0] == positions[0].min()).nonzero()[:, 0]
    if len(begins) == 1 or int(begins[0]) != 0:  # positions of images, or of padding
        return None
    return torch.nn.functional.pad(begins, (0, 1), value=n).int()


def whole_mask(given: Tensor | None, n: int, m: int, causal: bool, window: int | None) -> Tensor | None:
    """[b, 1, n, m] bool of what mask() gives, or None where causality says it all."""
    if given is None and (causal or window is None or window >= m):
        return None
    if given is not None and given.dim() > 2:
        return given
    rows, keys = torch.arange(m - n, m)[:, None], torch.arange(m)
    shown = torch.ones(1, 1, n, m, dtype=torch.bool)
    if given is not None and given.dim() == 2:
        shown = shown & given.bool()[:, None, None]
    elif given is not None:  # a batch of packed sequences lies row by row
        owner = torch.bucketize(torch.arange(int(given[-1])), given[1:-1].long(), right=True).view(-1, n)
        shown = (owner[:, :, None] == owner[:, None])[:, None]
    if causal:
        shown = shown & (keys <= rows)
    return shown if window is None else shown & ((keys - rows).abs() < window)
