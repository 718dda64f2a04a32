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


def line_chart(title, subtitle, unit, panels, legend, line=None, log=False):
    """panels: [(heading, [(color, dash, [(x, y)])])], side by side, x by its logarithm and y too if `log`, in powers of ten."""
    width, height, top, left, gap = 400, 240, 126, 64, 76
    points = [point for _, lines in panels for _, _, line_points in lines for point in line_points]
    xs = sorted({x for x, _ in points})
    if log:
        low, high = math.floor(math.log10(min(y for _, y in points))), math.ceil(math.log10(max(y for _, y in points)))
        marks = [10.0 ** exponent for exponent in range(low, high + 1)]
    else:
        end = max([y for _, y in points] + [line or 0]) * 1.08
        step = next(s for s in (0.25, 0.5, *(m * 10 ** n for n in range(12) for m in (1, 2, 5))) if end / s <= 7)
        marks = [i * step for i in range(int(end / step) + 1)]
    body = []

    def height_of(y):
        share = (math.log10(y) - low) / (high - low) if log else y / end
        return top + height * (1 - share)

    for number, (heading, lines) in enumerate(panels):
        x0 = left + number * (width + gap)

        def at(x, x0=x0):
            return x0 + math.log2(x / xs[0]) / math.log2(xs[-1] / xs[0]) * width

        body.append(f'<text x="{x0}" y="{top - 14}" font-weight="600">{escape(heading)}</text>')
        for mark in marks:
            y = height_of(mark)
            body.append(f'<line x1="{x0}" x2="{x0 + width}" y1="{y:.1f}" y2="{y:.1f}" stroke="{GRID}"/>')
            body.append(f'<text x="{x0 - 8}" y="{y + 4:.1f}" text-anchor="end" fill="{MUTED}">{mark:g}{unit}</text>')
        for x in xs:
            body.append(f'<text x="{at(x):.1f}" y="{top + height + 20}" text-anchor="middle" fill="{MUTED}">{x}</text>')
        if line is not None:
            y = height_of(line)
            body.append(f'<line x1="{x0}" x2="{x0 + width}" y1="{y:.1f}" y2="{y:.1f}" stroke="{INK}" stroke-dasharray="4 3"/>')
        for color, dash, line_points in lines:
            places = [(f"{at(x):.1f}", f"{height_of(y):.1f}") for x, y in line_points]
            dashes = f' stroke-dasharray="{dash}"' if dash else ""
            body.append(f'<polyline points="{" ".join(map(",".join, places))}" fill="none" stroke="{color}" stroke-width="2.5"{dashes}/>')
            body += [f'<circle cx="{cx}" cy="{cy}" r="3.5" fill="{color}"/>' for cx, cy in places]
        body.append(f'<text x="{x0 + width / 2:g}" y="{top + height + 40}" text-anchor="middle" fill="{MUTED}">sequence length</text>')
    return svg(title, subtitle, left + len(panels) * (width + gap) - 20, top + height + 56, legend, body)


def roofline_chart(title, subtitle, roofs, pairs, legend):
    """GFLOP/s by FLOPs per byte, both by their logarithm. roofs: ([(name, GFLOP/s)] of units, [(name, GB/s)] of reads).
    pairs: [(label, color, (FLOPs per byte, GFLOP/s) from, the same to)], joined by an arrow."""
    width, height, top, left = 760, 420, 110, 70
    units, reads = roofs
    peak, rates = max(rate for _, rate in units), [rate for _, rate in reads]
    points = [point for _, _, *ends in pairs for point in ends]
    xs = [x for x, _ in points] + [1, *(peak / rate for rate in rates)]
    ys = [y for _, y in points] + [peak]
    x0, x1 = math.floor(math.log2(min(xs))) - 1, math.ceil(math.log2(max(xs))) + 1
    y0, y1 = math.floor(math.log2(min(ys))) - 1, math.ceil(math.log2(max(ys))) + 1

    def at(x, y):
        return left + width * (math.log2(x) - x0) / (x1 - x0), top + height * (1 - (math.log2(y) - y0) / (y1 - y0))

    def power(exponent):
        return f"1/{2 ** -exponent}" if exponent < 0 else f"{2 ** exponent}"

    def line(start, end, style):
        return f'<line x1="{start[0]:.1f}" y1="{start[1]:.1f}" x2="{end[0]:.1f}" y2="{end[1]:.1f}" {style}/>'

    body = ['<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
            f'<path d="M0,0 L8,4 L0,8 z" fill="{MUTED}"/></marker></defs>']
    for exponent in range(x0, x1 + 1):
        x = at(2.0 ** exponent, 1)[0]
        body.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{top + height}" stroke="{GRID}"/>')
        body.append(f'<text x="{x:.1f}" y="{top + height + 18}" text-anchor="middle" fill="{MUTED}">{power(exponent)}</text>')
    for exponent in range(y0, y1 + 1):
        y = at(1, 2.0 ** exponent)[1]
        body.append(f'<line x1="{left}" x2="{left + width}" y1="{y:.1f}" y2="{y:.1f}" stroke="{GRID}"/>')
        body.append(f'<text x="{left - 8}" y="{y + 4:.1f}" text-anchor="end" fill="{MUTED}">{power(exponent)}</text>')
    body.append(f'<text x="{left + width / 2:g}" y="{top + height + 40}" text-anchor="middle" fill="{MUTED}">FLOPs per byte, by formula</text>')
    body.append(f'<text x="{left - 8}" y="{top - 10}" fill="{MUTED}">GFLOP/s</text>')
    for name, rate in reads:
        begin = max(2.0 ** x0, 2.0 ** y0 / rate)
        start, end = at(begin, begin * rate), at(peak / rate, peak)
        body.append(line(start, end, f'stroke="{INK}" stroke-width="1.5"'))
        x, y = (start[0] + 0.1 * (end[0] - start[0]), start[1] + 0.1 * (end[1] - start[1]) - 6)
        angle = math.degrees(math.atan2(end[1] - start[1], end[0] - start[0]))
        body.append(f'<text x="{x:.1f}" y="{y:.1f}" font-size="11" transform="rotate({angle:.1f} {x:.1f} {y:.1f})">'
                    f'{escape(name)} {rate:.0f} GB/s</text>')
    for name, rate in units:
        if rate > 2.0 ** y0:
            style = 'stroke-width="1.5"' if rate == peak else 'stroke-dasharray="5 4"'
            begin = max(2.0 ** x0, rate / max(rates)) if rates else 2.0 ** x0
            body.append(line(at(begin, rate), at(2.0 ** x1, rate), f'stroke="{INK}" {style}'))
            body.append(f'<text x="{left + width - 4}" y="{at(1, rate)[1] - 5:.1f}" font-size="11" text-anchor="end">'
                        f'{escape(name)} {rate:.0f} GFLOP/s</text>')
    for label, color, start, end in pairs:
        (sx, sy), (ex, ey) = at(*start), at(*end)
        body.append(line((sx, sy), (ex, ey), f'stroke="{MUTED}" stroke-dasharray="2 3" marker-end="url(#tip)"'))
        body.append(f'<circle cx="{sx:.1f}" cy="{sy:.1f}" r="4.5" fill="#ffffff" stroke="{color}" stroke-width="2"/>')
        body.append(f'<circle cx="{ex:.1f}" cy="{ey:.1f}" r="4.5" fill="{color}"/>')
        body.append(f'<text x="{ex + 8:.1f}" y="{ey + 4:.1f}" font-size="10" fill="{color}">{escape(label)}</text>')
    return svg(title, subtitle, left + width + 40, top + height + 56, legend, body)
