"""Problem sets: files with the text of a problem a line, the same that `rapt bench` reads."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rapt import _core

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
LAYOUTS = ("bhsd", "bshd", "bhds")
SIZES = ("b", "hq", "hk", "sq", "sk", "d", "dv")
_FOLDER = Path(__file__).parent / "sets"
NAMES = sorted(file.stem for file in _FOLDER.glob("*.txt"))


@functools.cache
def other_operations() -> frozenset[str]:
    return frozenset(entry["operation"] for entry in _core.entries()) - {"attention"}


def is_attention_word(word: str) -> bool:
    try:
        _core.parse_problem("attention " + word)
    except ValueError:
        return False
    return True


@dataclass(frozen=True)
class Case:
    """One problem. Causal rows see the keys up to their own number, as PyTorch's is_causal has it."""

    name: str
    b: int
    hq: int
    hk: int
    sq: int
    sk: int
    d: int
    dv: int
    causal: bool = False
    dtype: str = "f32"
    layout: str = "bhsd"

    def tensors(self, seed: int, device: str = "cpu") -> list[Tensor]:
        """q, k and v as [b, h, s, d], in memory as `layout` has it."""
        generator = torch.Generator().manual_seed(seed)
        order = ["bhsd".index(letter) for letter in self.layout]
        back = [self.layout.index(letter) for letter in "bhsd"]
        shapes = ((self.hq, self.sq, self.d), (self.hk, self.sk, self.d), (self.hk, self.sk, self.dv))
        made = (torch.randn(self.b, *shape, generator=generator).to(device, DTYPES[self.dtype]) for shape in shapes)
        return [t.permute(order).contiguous().permute(back) for t in made]

    @property
    def score_bytes(self) -> int:
        return self.b * self.hq * self.sq * self.sk * 4

    @property
    def flops(self) -> int:
        """Multiply and add of q.k and p.v over the (row, key) pairs that attend; the softmax is not counted."""
        square = min(self.sq, self.sk)
        causal = square * (square + 1) // 2 + (self.sq - square) * self.sk
        return 2 * self.b * self.hq * (causal if self.causal else self.sq * self.sk) * (self.d + self.dv)

    @property
    def bytes(self) -> int:
        """q, out, and the keys and values that some row sees, each once."""
        keys = min(self.sq, self.sk) if self.causal else self.sk
        return self.b * (self.hq * self.sq + self.hk * keys) * (self.d + self.dv) * DTYPES[self.dtype].itemsize


def parse(text: str, name: str = "") -> Case | None:
    """The problem of this text, None if it has no counterpart in PyTorch. Raises ValueError: "got; wanted"."""
    words = text.split()
    if words and words[0] in other_operations():  # whose words `rapt bench` reads
        return None
    words = words[words[:1] == ["attention"] :]
    found: dict[str, Any] = {}
    other = False
    for word in words:
        key, _, value = word.partition("=")
        if key in found:
            raise ValueError(f'"{word}"; wanted each word once')
        wanted = ""
        if key in SIZES:
            wanted = "" if value.isdigit() and int(value) else "a number from 1 after ="
            found[key] = wanted or int(value)
        elif key == "dtype":
            wanted = "" if value in DTYPES else ", ".join(DTYPES)
            found[key] = value
        elif key == "layout":
            wanted = "" if value in (*LAYOUTS, "other") else ", ".join((*LAYOUTS, "other"))
            found[key] = value
            other |= value == "other"
        elif word == "causal":
            found[key] = True
        elif is_attention_word(word):
            # scaled_dot_product_attention has no counterpart of it, or has it by a mask of its own making.
            other, found[key] = True, None
        else:
            wanted = "a word of a problem (docs/bench.md)"
        if wanted:
            raise ValueError(f'"{word}"; wanted {wanted}')
    if missing := [key for key in ("sq", "d") if key not in found]:
        raise ValueError(f'"{text}"; wanted {missing[0]}=')
    hq, d = found.get("hq", 1), found["d"]
    sizes = {"b": 1, "hq": hq, "hk": hq, "sk": found["sq"], "dv": d} | found
    if sizes["hq"] % sizes["hk"]:
        raise ValueError(f'"hk={sizes["hk"]}"; wanted a divisor of hq={hq}')
    # Tables have the type elsewhere, and it may be replaced.
    own = " ".join(word for word in words if not word.startswith("dtype="))
    return None if other else Case(name or own, **sizes)


def parse_all(problems: Iterable[str]) -> tuple[list[Case], list[str]]:
    """Cases, and the texts that PyTorch has no counterpart of. Raises ValueError."""
    cases = {}
    for text in problems:
        try:
            cases[text] = parse(text)
        except ValueError as error:
            raise ValueError(f"--problem: {error}") from None
    return [case for case in cases.values() if case], [text for text, case in cases.items() if not case]


def read(name: str) -> tuple[list[Case], list[str]]:
    """The same of the set of this name, else of the file. A comment behind a problem is its name in tables. Raises
    ValueError: "file:line: got; wanted"."""
    file = _FOLDER / f"{name}.txt" if name in NAMES else Path(name)
    if not file.is_file():
        names = ", ".join(NAMES) or f"the sets in {_FOLDER}, which is not there"
        raise ValueError(f'--set: "{name}"; wanted a file, or one of {names}')
    shown = os.path.join("bench", "sets", file.name) if name in NAMES else name
    cases: list[Case] = []
    others: list[str] = []
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        text, _, comment = (part.strip() for part in line.partition("#"))
        if not text:
            continue
        try:
            case = parse(text, comment)
        except ValueError as error:
            raise ValueError(f"{shown}:{number}: {error}") from None
        if case:
            cases.append(case)
        else:
            others.append(text)
    if not cases and not others:
        raise ValueError(f"{shown}: no problems; wanted the text of one a line")
    return cases, others
