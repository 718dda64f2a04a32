"""Tables, progress, and the surroundings of a measurement."""

from __future__ import annotations

import datetime
import math
import os
import platform
import shutil
import sys
import time
from typing import Any

import torch

import rapt

BAR = 20


def context_of(device: str) -> dict[str, Any]:
    info = rapt.info()
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "cpu": info["cpu"],
        "cpus": os.cpu_count(),
        "system": platform.platform(),
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
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


def groups_of(rows: list[dict[str, Any]]) -> dict[tuple[str, int | None], list[dict[str, Any]]]:
    groups: dict[tuple[str, int | None], list[dict[str, Any]]] = {}
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
    """A bar on standard error that is rewritten in place, with the time that is left; nothing where that is no terminal."""

    def __init__(self, total: int) -> None:
        self.total, self.begun, self.start = total, 0, time.monotonic()
        self.shown = sys.stderr.isatty()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self.shown:
            sys.stderr.write("\r\x1b[K")

    def begin(self, text: str) -> None:
        """The next of `total` begins; the one before it is done."""
        done, left = self.begun, ""
        self.begun += 1
        if done:
            seconds = math.ceil((time.monotonic() - self.start) / done * (self.total - done))
            left = f"  {seconds // 60}:{seconds % 60:02} left"
        if self.shown:
            bar = ("#" * (BAR * done // self.total)).ljust(BAR, ".")
            line = f"[{bar}] {self.begun}/{self.total}{left}  {text}"
            sys.stderr.write("\r\x1b[K" + line[: shutil.get_terminal_size().columns - 1])
            sys.stderr.flush()
