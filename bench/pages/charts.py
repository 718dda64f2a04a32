"""SVG charts of the pages: bars, and lines by sequence length."""

import math
from html import escape

INK, MUTED, SLATE, GREY, GRID = "#1c2733", "#56636f", "#7d8893", "#a9b4bf", "#e3e8ed"
COLORS = {"fp32": "#0b6bcb", "bf16": "#e07b00", "fp16": "#2a9d5c"}
PALE = 0.4


def svg(title, subtitle, width, height, legend, body):
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
        ' font-family="system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif" font-size="13"'
        f' fill="{INK}" role="img">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{width}" height="{height}" rx="8" fill="#ffffff"/>',
        f'<text x="24" y="32" font-size="18" font-weight="600">{escape(title)}</text>',
        f'<text x="24" y="52" fill="{MUTED}">{escape(subtitle)}</text>',
    ]
    x = 24
    for name, color, opacity in legend:
        parts.append(f'<rect x="{x}" y="65" width="12" height="12" rx="2" fill="{color}" opacity="{opacity}"/>')
        parts.append(f'<text x="{x + 18}" y="76">{escape(name)}</text>')
        x += 18 + 7 * len(name) + 24
    return "\n".join([*parts, *body, "</svg>", ""])


def bar_chart(title, subtitle, unit, groups, legend, line=None, labels=240, note=90):
    """groups: [(heading or None, [(label, [bar])])]; a bar is (value, color, opacity, text), and may have a fifth: how much of
    it, from the left, is drawn full. `line`: (value, what it is)."""
    bars, top = 560, 92
    values = [bar[0] for _, rows in groups for _, cells in rows for bar in cells]
    end = max(values + [line[0] if line else 0]) * 1.04
    step = next(s for s in (0.25, 0.5, 1, 2, 5, 10, 25, 50, 100, 200) if end / s <= 8)
    body, y, scale = [], top, bars / end

    def at(value):
        return labels + value * scale

    for heading, rows in groups:
        if heading:
            body.append(f'<text x="24" y="{y + 22}" font-weight="600">{escape(heading)}</text>')
            y += 32
        for label, cells in rows:
            height = 14 * len(cells)
            body.append(f'<text x="{labels - 10}" y="{y + height / 2 + 5:g}" text-anchor="end">{escape(label)}</text>')
            for i, (value, color, opacity, text, *full) in enumerate(cells):
                for length, alpha in [(value, opacity), *((part, 1) for part in full)]:
                    body.append(f'<rect x="{labels}" y="{y + 14 * i}" width="{length * scale:.1f}" height="12" rx="2" '
                                f'fill="{color}" opacity="{alpha}"/>')
                body.append(f'<text x="{at(value) + 6:.1f}" y="{y + 14 * i + 10}" font-size="11" fill="{MUTED}">{escape(text)}</text>')
            y += height + 10
    grid = []
    for i in range(int(end / step) + 1):
        grid.append(f'<line x1="{at(i * step):.1f}" x2="{at(i * step):.1f}" y1="{top - 4}" y2="{y}" stroke="{GRID}"/>')
        grid.append(f'<text x="{at(i * step):.1f}" y="{y + 18}" text-anchor="middle" fill="{MUTED}">{i * step:g}{unit}</text>')
    if line:
        body.append(f'<line x1="{at(line[0]):.1f}" x2="{at(line[0]):.1f}" y1="{top - 4}" y2="{y}" stroke="{INK}" stroke-dasharray="4 3"/>')
        body.append(f'<text x="{at(line[0]):.1f}" y="{y + 34}" text-anchor="middle" fill="{INK}">{escape(line[1])}</text>')
    return svg(title, subtitle, labels + bars + note, y + 46, legend, grid + body)


def line_chart(title, subtitle, unit, panels, legend, line=None):
    """panels: [(heading, [(color, dash, [(x, y)])])], side by side, x by its logarithm."""
    width, height, top, left, gap = 400, 240, 126, 64, 76
    points = [point for _, lines in panels for _, _, line_points in lines for point in line_points]
    xs = sorted({x for x, _ in points})
    end = max(y for _, y in points) * 1.08
    step = next(s for s in (0.25, 0.5, 1, 2, 5, 10) if end / s <= 7)
    body = []
    for number, (heading, lines) in enumerate(panels):
        x0 = left + number * (width + gap)

        def at(x, y, x0=x0):
            span = math.log2(xs[-1] / xs[0])
            return f"{x0 + math.log2(x / xs[0]) / span * width:.1f},{top + height * (1 - y / end):.1f}"

        body.append(f'<text x="{x0}" y="{top - 14}" font-weight="600">{escape(heading)}</text>')
        for i in range(int(end / step) + 1):
            y = top + height * (1 - i * step / end)
            body.append(f'<line x1="{x0}" x2="{x0 + width}" y1="{y:.1f}" y2="{y:.1f}" stroke="{GRID}"/>')
            body.append(f'<text x="{x0 - 8}" y="{y + 4:.1f}" text-anchor="end" fill="{MUTED}">{i * step:g}{unit}</text>')
        for x in xs:
            body.append(f'<text x="{at(x, 0).split(",")[0]}" y="{top + height + 20}" text-anchor="middle" fill="{MUTED}">{x}</text>')
        if line is not None:
            y = top + height * (1 - line / end)
            body.append(f'<line x1="{x0}" x2="{x0 + width}" y1="{y:.1f}" y2="{y:.1f}" stroke="{INK}" stroke-dasharray="4 3"/>')
        for color, dash, line_points in lines:
            places = [at(x, y) for x, y in line_points]
            dashes = f' stroke-dasharray="{dash}"' if dash else ""
            body.append(f'<polyline points="{" ".join(places)}" fill="none" stroke="{color}" stroke-width="2.5"{dashes}/>')
            for place in places:
                cx, cy = place.split(",")
                body.append(f'<circle cx="{cx}" cy="{cy}" r="3.5" fill="{color}"/>')
        body.append(f'<text x="{x0 + width / 2:g}" y="{top + height + 40}" text-anchor="middle" fill="{MUTED}">sequence length</text>')
    return svg(title, subtitle, left + len(panels) * (width + gap) - 20, top + height + 56, legend, body)
