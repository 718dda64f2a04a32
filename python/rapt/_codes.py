"""Quantised keys or values, where transformers has a tensor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NoReturn, TypeAlias, get_args

import torch
from torch import Tensor

from rapt._attention import KvDtype
from rapt._cache import append_kv

KV_DTYPES: tuple[KvDtype, ...] = get_args(KvDtype)
_GROUP = 32  # elements of i4x2 that share a scale: kernels with products of bf16 take such groups, and whole rows


class OnlyForRapt:
    """Has the shape of a tensor, and is a ValueError for whatever computes with it but rapt's attention."""

    __slots__ = ()

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):  # asked for by copy, pickle and others, which do without
            raise AttributeError(name)
        raise refusal(name)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        raise refusal(getattr(func, "__name__", "a function"))


def refusal(what: str) -> ValueError:
    return ValueError(
        f"past_key_values: got a rapt.transformers.Cache with kv_dtype, or a fork of one, and {what} of its rows, which rapt's "
        'attention alone reads; wanted model.set_attn_implementation("rapt"), or where layers themselves compute with cached rows '
        "a Cache without either"
    )


@dataclass(slots=True, eq=False)
class Codes(OnlyForRapt):
    """Rows [b, hk, n, d] as rapt.attention reads them. Layers of a cache may index it and select from it as from a tensor, in all
    dimensions but the last; whatever else is done to it, by another attention implementation say, is a ValueError."""

    kv_dtype: KvDtype
    codes: Tensor
    """Bytes [b, hk, n, d], of i4x2 [b, hk, n, d / 2]."""
    scale: Tensor
    """float32 [b, hk, n, groups]."""
    dtype: torch.dtype
    """Of the rows that were quantised."""
    tail: Tensor | None = None
    """The last columns of keys, as they are."""

    @classmethod
    def empty(cls, kv_dtype: KvDtype, like: Tensor, rows: int) -> Codes:
        """Memory for so many rows like those of a tensor [b, hk, any, d]. Raises ValueError for an odd d of i4x2."""
        *batch, _, d = like.shape
        packed = kv_dtype == "i4x2"
        if packed and d % 2:
            raise ValueError(f'kv_dtype: got "i4x2" for heads of {d} columns; wanted an even number, or "i8"')
        groups = d // _GROUP if packed and d % _GROUP == 0 else 1
        codes = like.new_empty((*batch, rows, d // 2 if packed else d), dtype=torch.uint8)
        return cls(kv_dtype, codes, like.new_empty((*batch, rows, groups), dtype=torch.float32), like.dtype)

    @property
    def shape(self) -> torch.Size:
        *rest, d = self.codes.shape
        return torch.Size((*rest, 2 * d if self.kv_dtype == "i4x2" else d))

    @property
    def device(self) -> torch.device:
        return self.codes.device

    @property
    def is_cpu(self) -> bool:
        return self.codes.is_cpu

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scale.nbytes

    def dim(self) -> int:
        return self.codes.dim()

    def numel(self) -> int:
        return self.shape.numel()

    def of(self, codes: Tensor, scale: Tensor) -> Codes:
        return Codes(self.kv_dtype, codes, scale, self.dtype)

    def with_tail(self, tail: Tensor) -> Codes:
        return Codes(self.kv_dtype, self.codes, self.scale, self.dtype, tail)

    def narrow(self, dim: int, start: int, length: int) -> Codes:
        return self.of(self.codes.narrow(dim, start, length), self.scale.narrow(dim, start, length))

    def index_select(self, dim: int, index: Tensor) -> Codes:
        return self.of(self.codes.index_select(dim, index), self.scale.index_select(dim, index))

    def repeat_interleave(self, repeats: int, dim: int) -> Codes:
        return self.of(self.codes.repeat_interleave(repeats, dim), self.scale.repeat_interleave(repeats, dim))

    def clone(self, memory_format: torch.memory_format = torch.preserve_format) -> Codes:
        return self.of(self.codes.clone(memory_format=memory_format), self.scale.clone(memory_format=memory_format))

    def __getitem__(self, index: Any) -> Codes:
        parts = index if isinstance(index, tuple) else (index,)
        last = parts[-1]
        rows_only = (Ellipsis not in [p for p in parts if not isinstance(p, Tensor)] and len(parts) < 4) or last is Ellipsis
        if any(p is None for p in parts) or not (rows_only or (isinstance(last, slice) and last == slice(None))):
            raise refusal("indexing")
        return self.of(self.codes[index], self.scale[index])


Rows: TypeAlias = Tensor | Codes


def parts_of(rows: Rows) -> tuple[Tensor, ...]:
    return (rows.codes, rows.scale) if isinstance(rows, Codes) else (rows,)


def arrays_of(key: Rows, value: Rows) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """k and v of rapt.attention, and what it is given beside codes."""
    if isinstance(key, Codes) and isinstance(value, Codes):
        coding = {"k_scale": key.scale, "v_scale": value.scale, "k_tail": key.tail, "kv_dtype": key.kv_dtype}
        return key.codes, value.codes, coding
    assert isinstance(key, Tensor) and isinstance(value, Tensor)
    return key, value, {}


def write(k_new: Tensor, v_new: Tensor, keys: Rows, values: Rows, before: Any) -> None:
    """Writes new rows into memory, behind those that each sequence has; quantises them where it is of codes. Latents in codes have
    their rotary parts beside them as they are."""
    if isinstance(keys, Codes) and isinstance(values, Tensor):
        rows = torch.cat((k_new, v_new), -1)
        k_new, v_new = rows, rows[..., : k_new.shape[-1]]
        keys, values = keys.with_tail(values), keys
    k, v, coding = arrays_of(keys, values)
    append_kv(k_new, v_new, k, v, before, **coding)
