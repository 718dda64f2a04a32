"""rapt.flash_attn under the name `flash_attn`, for code that imports flash_attn, with flash_attn.bert_padding."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from importlib import metadata
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

_NAME = "flash_attn"


def index_first_axis(input: Tensor, indices: Tensor) -> Tensor:
    """The rows `indices` of input [n, ...]."""
    return input.index_select(0, indices)


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """A tensor [first_axis_dim, ...] of zeros, with `values` in rows `indices`."""
    return values.new_zeros((first_axis_dim, *values.shape[1:])).index_copy(0, indices, values)


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """Removes padding: the rows of hidden_states [b, s, ...] where attention_mask or unused_mask [b, s] (bool or int)
    is true, end to end.

    Returns rows [total, ...], their positions in [b * s], cu_seqlens int32 [b + 1], the longest length, and int32 [b]:
    the number of true elements of attention_mask in each sequence.
    """
    mask = attention_mask if unused_mask is None else attention_mask + unused_mask
    lengths = mask.sum(-1, dtype=torch.int32)
    indices = torch.nonzero(mask.flatten()).flatten()
    borders = functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    longest = int(lengths.max()) if lengths.numel() > 0 else 0
    used = attention_mask.sum(-1, dtype=torch.int32)
    return index_first_axis(hidden_states.flatten(0, 1), indices), indices, borders, longest, used


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """Undoes unpad_input: [batch, seqlen, ...], with zeros for padding."""
    rows = index_put_first_axis(hidden_states, indices, batch * seqlen)
    return rows.view(batch, seqlen, *rows.shape[1:])


class _Distribution(metadata.Distribution):
    """The metadata by which libraries tell whether flash-attn is installed."""

    def __init__(self, version: str) -> None:
        self._files = {
            "METADATA": f"Metadata-Version: 2.1\nName: flash-attn\nVersion: {version}\n",
            "top_level.txt": _NAME + "\n",
        }

    def read_text(self, filename: str) -> str | None:
        return self._files.get(filename)

    def locate_file(self, path: Any) -> Any:
        return Path(__file__).parent / path


class _Finder(metadata.DistributionFinder):
    """Of the distribution alone: the modules are in sys.modules."""

    def __init__(self, version: str) -> None:
        self.version = version

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        return None

    def find_distributions(
        self, context: Any = metadata.DistributionFinder.Context()
    ) -> Iterable[metadata.Distribution]:
        wanted = (context.name or "flash-attn").lower().replace("_", "-")
        return [_Distribution(self.version)] if wanted == "flash-attn" else []


def _made(name: str, contents: dict[str, Any], package: bool = False) -> ModuleType:
    module = ModuleType(name, f"{name} by rapt: see rapt.flash_attn.")
    module.__spec__ = ModuleSpec(name, None, origin="rapt.flash_attn", is_package=package)
    if package:
        module.__path__ = []
    module.__dict__.update(contents)
    return module


def _installed() -> bool:
    return any(isinstance(finder, _Finder) for finder in sys.meta_path)


def install() -> None:
    """Makes `import flash_attn` return rapt's functions in this process, until uninstall().

    This adds the modules flash_attn, flash_attn.flash_attn_interface and flash_attn.bert_padding (pad_input,
    unpad_input, index_first_axis, index_put_first_axis), flash_attn.__version__, and metadata of a distribution
    flash-attn with this version. Call it before you import libraries that look for flash_attn: some look only once.
    Raises ImportError if another flash_attn is installed or imported.
    """
    if _installed():
        return
    try:
        found = find_spec(_NAME)
    except ValueError:  # a module without a spec
        found = ModuleSpec(_NAME, None, origin="a module without a spec")
    if found is not None:
        got = f"{found.origin or found.name}, which is installed or imported"
        raise ImportError(f"flash_attn: got {got}; wanted none, to take its place")
    from rapt import flash_attn

    functions = {name: getattr(flash_attn, name) for name in flash_attn.__all__ if name.startswith(_NAME)}
    padding = (index_first_axis, index_put_first_axis, pad_input, unpad_input)
    parts = {
        "flash_attn_interface": _made(_NAME + ".flash_attn_interface", functions),
        "bert_padding": _made(_NAME + ".bert_padding", {function.__name__: function for function in padding}),
    }
    version = flash_attn.__version__
    sys.modules[_NAME] = _made(_NAME, functions | parts | {"__version__": version}, package=True)
    sys.modules.update({f"{_NAME}.{name}": module for name, module in parts.items()})
    sys.meta_path.append(_Finder(version))


def uninstall() -> None:
    """Undoes install(). Code that has imported the functions keeps them."""
    if not _installed():
        return
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _Finder)]
    for name in [name for name in sys.modules if name == _NAME or name.startswith(_NAME + ".")]:
        del sys.modules[name]
