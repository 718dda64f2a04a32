"""Rows of latent caches, as keys and values: tensors of numbers, and FlashMLA's rows of 656 bytes to a token (DeepSeek-V3.2)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# A row: 512 latent columns of float8_e4m3fn; their scales, float32, one for 128 columns; 64 rotary columns of bfloat16.
LATENT, ROTARY = 512, 64
_SCALES, _TAIL, ROW_BYTES = 512, 528, 656
_BYTES = (torch.uint8, torch.float8_e4m3fn)


def is_fp8(rows: Tensor) -> bool:
    """Whether it has such rows, by its type: no other cache of latents has bytes."""
    return rows.dtype in _BYTES


def check_fp8(name: str, rows: Tensor) -> None:
    if not is_fp8(rows):
        raise TypeError(f"{name}: got {rows.dtype}; wanted torch.uint8 or torch.float8_e4m3fn")
    if rows.shape[-1] != ROW_BYTES:
        raise ValueError(f"{name}: got shape {list(rows.shape)}; wanted rows of {ROW_BYTES} bytes")


def columns_of(rows: Tensor) -> int:
    """How many numbers a row has, of numbers or checked bytes."""
    return LATENT + ROTARY if is_fp8(rows) else rows.shape[-1]


def keys_and_values(rows: Tensor, dv: int, name: str = "kv") -> tuple[Tensor, Tensor, dict[str, Any]]:
    """k, v and what else rapt.attention and rapt.append_kv take of rows [.., d], or checked ones [.., 656]: views, nothing is copied.
    Values are the first dv columns; of bytes, all latent ones. `name` is what the caller calls the rows."""
    if not is_fp8(rows):
        return rows, rows[..., :dv], {}
    try:
        codes = rows[..., :LATENT].view(torch.float8_e4m3fn)
        scale, tail = rows[..., _SCALES:_TAIL].view(torch.float32), rows[..., _TAIL:].view(torch.bfloat16)
    except RuntimeError:
        wanted = "rows without gaps that begin at multiples of 4 bytes, for the float32 scales in them"
        raise ValueError(f"{name}: got strides {rows.stride()} from byte {rows.storage_offset()} on; wanted {wanted}") from None
    return codes, codes, {"k_scale": scale, "v_scale": scale, "k_tail": tail}
