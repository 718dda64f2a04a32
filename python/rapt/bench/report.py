"""Tables, progress, and the surroundings of a measurement."""

from __future__ import annotations

import datetime
import os
import platform
import sys
from typing import Any

import torch

import rapt

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def context_of() -> dict[str, Any]:
    info = rapt.info()
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "cpu": info["cpu"],
        "cpus": os.cpu_count(),
        "system": platform.platform(),
        "rapt": info["version"],
        "isas": info["isas"],
        "torch": torch.__version__,
        "torch_cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "python": platform.python_version(),
        "load_average": round(os.getloadavg()[0], 2),
    }


def time_text(times: dict[str, Any]) -> str:
    return f"{times['median_ms']:.3f} ±{times['spread'] * 50:.0f}%"


def ratio_text(row: dict[str, Any], name: str) -> str:
    return f"{row[name]:.2f} / {row[f'{name}_best']:.2f}{' noisy' * (name in row['noisy'])}"


def groups_of(rows: list[dict[str, Any]]) -> dict[tuple[str, int], list[dict[str, Any]]]:
    groups: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["dtype"], row["threads"]), []).append(row)
    return groups


def print_table(head: list[str], cells: list[list[str]]) -> None:
    """As Markdown, without columns that are empty or only have dashes."""
    measured = [i for i in range(len(head)) if any(line[i].strip("-/ ") for line in cells)]
    table = [[line[i] for i in measured] for line in [head, *cells]]
    widths = [max(len(line[i]) for line in table) for i in range(len(measured))]
    lines = ["| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths)) + " |" for line in table]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    print("\n".join(lines))


class Progress:
    """A bar on a terminal (tqdm's where that is installed), nothing elsewhere."""

    def __init__(self, total: int) -> None:
        self.total, self.done, self.bar = total, 0, None
        self.shown = sys.stderr.isatty()
        if self.shown:
            try:
                from tqdm import tqdm

                self.bar = tqdm(total=total, unit="case", leave=False)
            except ImportError:
                pass

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def begin(self, text: str) -> None:
        if self.bar is not None:
            self.bar.set_description(text)
        elif self.shown:
            filled = 30 * self.done // self.total
            sys.stderr.write(f"\r\x1b[K[{'#' * filled}{'.' * (30 - filled)}] {self.done}/{self.total}  {text}")
            sys.stderr.flush()

    def step(self) -> None:
        self.done += 1
        if self.bar is not None:
            self.bar.update()

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()
        elif self.shown:
            sys.stderr.write("\r\x1b[K")
