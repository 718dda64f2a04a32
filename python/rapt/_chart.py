"""A chart of rapt.bench as an SVG file that needs nothing else."""

from __future__ import annotations

import math
from collections.abc import Callable
from html import escape
from typing import Any

LABELS, BARS, VALUES, ROW, HEAD = 270, 520, 290, 40, 84
# Ratio: text, color, distance from the top of its row, thickness.
SERIES = {
    "vs_torch": ("than scaled_dot_product_attention, paused", "#0b6bcb", 3, 13),
    "vs_torch_back_to_back": ("than it, back to back", "#6fb1f0", 17, 10),
    "vs_math": ("than its math backend, paused", "#b9c4d0", 28, 6),
}
COLORS = ("#b9c4d0", "#8896a5", "#56636f", "#0b6bcb", "#3d92e6", "#6fb1f0", "#a3cff7")  # of generation's sides
BAR, GAP = 18, 8
STEPS = (0.1, 0.2, 0.25, 0.5, 1, 2, 5, 10, 20, 50, 100)


def title_of(dtype: str, threads: int | None) -> str:
    """Of rows of this type on so many threads, or on the GPU (None)."""
    return f"{dtype}, {threads} thread{'s' * (threads > 1)}" if threads else f"{dtype}, GPU"


def svg(context: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    """Bars of how many times faster rapt is than PyTorch, and than its math backend, problem by problem. Noisy bars are
    left out, and rows that have no other."""
    shown = [row for row in rows if any(_has(row, name) for name in ("vs_torch", "vs_torch_back_to_back"))]
    ratios = [row[name] for row in shown for name in SERIES if _has(row, name) and name != "vs_math"]
    maths = [row["vs_math"] for row in shown if _has(row, "vs_math")]
    # Math may be so slow that the other bars would vanish: it is cut off, with its number written out.
    scale_end = min(max(ratios + maths, default=1.0), 2 * max(ratios, default=1.0)) * 1.02
    step = next((s for s in STEPS if scale_end / s <= 8), STEPS[-1])
    groups: dict[tuple[str, int | None], list[dict[str, Any]]] = {}
    for row in shown:
        groups.setdefault((row["dtype"], row["threads"]), []).append(row)
    height = HEAD + 50 + sum(30 + ROW * len(group) for group in groups.values())

    def x(ratio: float) -> float:
        return float(LABELS + BARS * min(ratio, scale_end) / scale_end)

    parts = _head("Attention: how many times faster than PyTorch", context, height)
    drawn = [series for name, series in SERIES.items() if any(_has(row, name) for row in shown)]
    for i, (text, color, _, _) in enumerate(drawn):
        parts.append(f'<rect x="{16 + 310 * i}" y="60" width="14" height="12" fill="{color}"/>')
        parts.append(f'<text x="{36 + 310 * i}" y="71">{text}</text>')
    for i in range(1, math.floor(scale_end / step) + 1):
        at = x(i * step)
        parts.append(f'<line x1="{at:.1f}" x2="{at:.1f}" y1="{HEAD}" y2="{height - 26}" stroke="#e3e8ed"/>')
        parts.append(f'<text x="{at:.1f}" y="{height - 10}" text-anchor="middle" fill="#56636f">{i * step:g}×</text>')
    y = HEAD
    for (dtype, threads), group in groups.items():
        parts.append(f'<text x="16" y="{y + 20}" font-weight="600">{title_of(dtype, threads)}</text>')
        y += 30
        for row in group:
            parts += _row(row, y, x)
            y += ROW
    if len(shown) < len(rows):
        text = f"left out as noisy: {len(rows) - len(shown)} of {len(rows)} rows"
        parts.append(f'<text x="16" y="{y + 18}" fill="#56636f">{text}</text>')
    one = x(1)
    parts.append(f'<line x1="{one:.1f}" x2="{one:.1f}" y1="{HEAD}" y2="{height - 26}" stroke="#1c2733" stroke-dasharray="4 3"/>')
    return "\n".join([*parts, "</svg>", ""])


def generation_svg(context: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    """Tokens per second by context length: a bar for each attention and cache, drawn to the longest of its type and threads."""
    title = "Generation: tokens per second by context length"
    return _rates(title, context, rows, "tokens_per_s", lambda row: f"{row['model']}, batch {row['batch']}", lambda row: f"{row['length']} tokens")


def engines_svg(context: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    """Requests or texts per second: a bar for each attention, drawn to the longest of its engine, type and threads."""
    title = "Engines: requests or texts per second"
    return _rates(title, context, rows, "per_s", lambda row: f"{row['engine']}, {row['unit']}/s", lambda row: row["load"])


def _rates(
    title: str, context: dict[str, Any], rows: list[dict[str, Any]], value: str, group_of: Callable[[Any], str], part_of: Callable[[Any], str]
) -> str:
    """A bar of row[value] for each row's side. Rows of a group have one scale, those of a part of it lie together."""
    sides = list(dict.fromkeys(row["side"] for row in rows))
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((group_of(row), row["dtype"], row["threads"]), []).append(row)
    height = HEAD + 20 + sum(30 + BAR * len(group) + GAP * len({part_of(row) for row in group}) for group in groups.values())
    parts = _head(title, context, height)
    y = HEAD - 16
    for (name, dtype, threads), group in groups.items():
        parts.append(f'<text x="16" y="{y + 20}" font-weight="600">{escape(name)}, {title_of(dtype, threads)}</text>')
        y += 30
        max_value, part = max(row[value] for row in group), ""
        for row in group:
            if part_of(row) != part:
                y += GAP
                part = part_of(row)
                parts.append(f'<text x="16" y="{y + 13}">{escape(part)}</text>')
            wide, color = BARS * row[value] / max_value, COLORS[sides.index(row["side"]) % len(COLORS)]
            parts.append(f'<text x="{LABELS - 10}" y="{y + 13}" text-anchor="end">{escape(row["side"])}</text>')
            parts.append(f'<rect x="{LABELS}" y="{y + 2}" width="{wide:.1f}" height="{BAR - 4}" fill="{color}"/>')
            text = f"{row[value]:.4g}" + (f" ({row['speedup_best']:.2f}×)" if "speedup_best" in row else "")
            parts.append(f'<text x="{LABELS + wide + 8:.1f}" y="{y + 13}">{text}</text>')
            y += BAR
    return "\n".join([*parts, "</svg>", ""])


def _head(title: str, context: dict[str, Any], height: int) -> list[str]:
    width = LABELS + BARS + VALUES
    return [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
        ' font-family="system-ui, sans-serif" font-size="13" fill="#1c2733" role="img">',
        f"<title>{title}</title>",
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        f'<text x="16" y="28" font-size="18" font-weight="600">{title}</text>',
        f'<text x="16" y="48" fill="#56636f">{escape(_subtitle(context))}</text>',
    ]


def _has(row: dict[str, Any], name: str) -> bool:
    return name in row and name not in row["noisy"]


def _row(row: dict[str, Any], y: int, x: Any) -> list[str]:
    parts = [f'<text x="{LABELS - 10}" y="{y + 22}" text-anchor="end">{escape(row["name"])}</text>']
    for name, (_, color, top, thick) in SERIES.items():
        if _has(row, name):
            length = x(row[name]) - LABELS
            parts.append(f'<rect x="{LABELS}" y="{y + top}" width="{length:.1f}" height="{thick}" fill="{color}"/>')
    numbers = {name: f"{row[name]:.2f}×" if _has(row, name) else "noisy" for name in SERIES if name in row}
    text = numbers["vs_torch"] + (f", back to back {back}" if (back := numbers.get("vs_torch_back_to_back")) else "")
    text += f"  ({row['rapt']['median_ms']:.3g} ms"
    text += f"; math {numbers['vs_math']})" if "vs_math" in row else ")"
    parts.append(f'<text x="{LABELS + BARS + 8}" y="{y + 22}">{text}</text>')
    return parts


def _subtitle(context: dict[str, Any]) -> str:
    capability = context["torch_cpu_capability"]
    return f"{context['cpu']} · rapt {context['rapt']}, PyTorch {context['torch']} ({capability}) · {context['date'][:10]}"
