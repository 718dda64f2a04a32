#!/usr/bin/env python3
"""Writes docs/performance.md, its charts in docs/images, and the figures in README.md from the data in bench/results.

    bench/report.py            writes them
    bench/report.py --check    changes nothing; exit code 1 and a diff if one of them is not what the data say

Needs Python 3.8 and nothing else. To show new measurements, put their files into bench/results and name them in SOURCES.
"""

import argparse
import csv
import difflib
import json
import math
import sys
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCES = {
    "models": "2026-11-23/xeon16-models-16-threads.json",
    "training_bf16": "2026-11-23/xeon16-training-bf16-16-threads.json",
    "training_f32": "2026-11-23/xeon16-training-f32-16-threads.json",
    "shapes": "2026-11-22/xeon16-attention-16-threads.json",
    "lengths": "2026-11-21/xeon16-attention-f32.csv",
    "halves": "2026-11-22/xeon16-attention-16bit.csv",
    "zen4": "2026-11-22/epyc2-attention-bf16.csv",
    "decode": "2026-11-21/xeon16-decode.csv",
    "decode_torch": "2026-11-21/xeon16-decode-torch.csv",
    "gpu": "2026-11-22/h200-attention.csv",
}
BEGIN, END = "<!-- measured: written by bench/report.py -->", "<!-- /measured -->"

INK, MUTED, SLATE, GREY, GRID = "#1c2733", "#56636f", "#7d8893", "#a9b4bf", "#e3e8ed"
COLORS = {"fp32": "#0b6bcb", "bf16": "#e07b00", "fp16": "#2a9d5c"}
LONG_NAME = {"f32": "fp32", "f16": "fp16", "bf16": "bf16"}
DATE = {name: path.split("/")[0] for name, path in SOURCES.items()}


def load(name):
    path = ROOT / "bench" / "results" / SOURCES[name]
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".json":
        data = json.loads(text)
        for row in data["rows"]:
            row["dtype"] = LONG_NAME.get(row["dtype"], row["dtype"])
        return data
    return list(csv.DictReader(text.splitlines()))


def geomean(values):
    values = list(values)
    return math.exp(sum(math.log(value) for value in values) / len(values))


def table(head, rows):
    return "\n".join(["| " + " | ".join(head) + " |", "|" + "---|" * len(head)] + ["| " + " | ".join(row) + " |" for row in rows])


# Charts. A bar is (value, color, opacity, text), and may have a fifth: how much of it, from the left, is drawn full.


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
    """groups: [(heading or None, [(label, [(value, color, opacity, text)])])]. `line`: (value, what it is)."""
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


XEON = "16-core Intel Xeon with AVX-512 and AMX"
PALE = 0.4


def types_legend(names, pale=True):
    return [(name, COLORS[name], 1) for name in names] + [("pale: samples scatter by more than 20 %", SLATE, PALE)] * pale


def models_chart(data):
    """A forward on PyTorch is 1; the full part of a bar is attention's share of it."""
    groups = []
    for dtype in dict.fromkeys(row["dtype"] for row in data["rows"]):
        rows = []
        for row in data["rows"]:
            if row["dtype"] == dtype:
                time, shares = 100 / row["vs_sdpa"], [row[side]["attention"] for side in ("sdpa", "rapt")]
                scatters = " (samples scatter)" if row["noisy"] else ""
                rows.append((row["name"], [
                    (100, SLATE, 0.35, f"attention {shares[0]:.0%}", 100 * shares[0]),
                    (time, COLORS[dtype], 0.3, f"{row['vs_sdpa']:.2f}× as fast{scatters}, attention {shares[1]:.0%}", time * shares[1])]))
        groups.append((dtype, rows))
    return bar_chart("Whole models: time of a forward, PyTorch's attention = 100 %",
                     f"transformers models, attention by \"sdpa\" or by \"rapt\" · {XEON}, 16 threads", " %", groups,
                     [("PyTorch", SLATE, 1), ("rapt, fp32", COLORS["fp32"], 1), ("rapt, bf16", COLORS["bf16"], 1),
                      ("full color: attention, pale: all other layers", "#ffffff", 1)], note=260)


def shapes_chart(data):
    rows = []
    for name in dict.fromkeys(row["name"] for row in data["rows"]):
        cells = []
        for dtype in COLORS:
            row = next(row for row in data["rows"] if row["name"] == name and row["dtype"] == dtype)
            pale = "vs_torch_back_to_back" in row["noisy"]
            cells.append((row["vs_torch_back_to_back"], COLORS[dtype], PALE if pale else 1,
                          f"{row['vs_torch_back_to_back']:.2f}× · {row['rapt']['back_to_back']['median_ms']:.3g} ms"))
        rows.append((name, cells))
    return bar_chart("Attention alone: speed-up over scaled_dot_product_attention",
                     f"shapes of real models, calls of both in turn · {XEON}, 16 threads", "×", [(None, rows)],
                     types_legend(list(COLORS)), (1, "PyTorch"), labels=260, note=120)


def lengths_chart(rows):
    def points(threads, d, mask):
        return [(int(r["s"]), float(r["ratio"])) for r in rows
                if (r["threads"], r["d"], r["mask"]) == (str(threads), str(d), mask)]

    styles = {(64, "full"): ("#0b6bcb", ""), (64, "causal"): ("#0b6bcb", "6 4"), (128, "full"): ("#e07b00", ""),
              (128, "causal"): ("#e07b00", "6 4")}
    panels = [(f"{threads} thread{'s' * (threads > 1)}",
               [(color, dash, points(threads, d, mask)) for (d, mask), (color, dash) in styles.items()]) for threads in (1, 16)]
    return line_chart("fp32 by sequence length: speed-up over PyTorch", f"8 heads, batch 1 · {XEON}, AVX-512 kernels", "×", panels,
                      [("d = 64", "#0b6bcb", 1), ("d = 128", "#e07b00", 1), ("dashed: causal · black: PyTorch", "#ffffff", 1)], 1)


def decode_chart(rows):
    def bars(row):
        dtype = LONG_NAME[row["case"].replace(",", " ").split()[0]]
        return [(float(row["percent_of_read"]), COLORS[dtype], 1, f"{float(row['percent_of_read']):g} % · {row['ms']} ms, {row['gbs']} GB/s")]

    shown = [(row["case"].replace("f32", "fp32").replace("f16", "fp16").replace("bfp16", "bf16"), bars(row)) for row in rows if row["percent_of_read"]]
    return bar_chart("Decode: share of the memory's read bandwidth",
                     f"one token, 32 query heads on 8, 32768 keys, d = 128 unless named · {XEON}, 16 threads", "%", [(None, shown)],
                     types_legend(list(COLORS), pale=False), (100, "a plain read"), labels=300, note=150)


def threads_chart(rows):
    groups = []
    for mask in ("full", "causal"):
        lines = []
        for s in dict.fromkeys(row["s"] for row in rows):
            one, many = (next(r for r in rows if (r["s"], r["d"], r["mask"], r["threads"]) == (s, "64", mask, t)) for t in ("1", "16"))
            cells = []
            for side, color in (("rapt", COLORS["fp32"]), ("torch", GREY)):
                gain = float(one[f"{side}_ms"]) / float(many[f"{side}_ms"])
                cells.append((gain, color, 1, f"{gain:.1f}× · {one[f'{side}_ms']} → {many[f'{side}_ms']} ms"))
            lines.append((f"S = {s}", cells))
        groups.append((mask, lines))
    return bar_chart("From 1 thread to 16: how many times faster", f"fp32, 8 heads, d = 64 · {XEON}", "×", groups,
                     [("rapt", COLORS["fp32"], 1), ("PyTorch", GREY, 1)], labels=120, note=150)


def gpu_chart(rows):
    groups = []
    for dtype, peer in (("bf16", "cuDNN"), ("f32", "PyTorch's fastest")):
        lines = []
        for row in rows:
            if row["dtype"] == dtype and row["kernel"] == "wgmma" and row["torch_tflops"]:
                cells = [(float(row["rapt_tflops"]), COLORS[LONG_NAME[dtype]], 1, f"{row['rapt_tflops']} · {row['ratio']}×"),
                         (float(row["torch_tflops"]), GREY, 1, row["torch_tflops"])]
                lines.append((f"S = {row['s']}, d = {row['d']}, {row['mask']}", cells))
        groups.append((f"{LONG_NAME[dtype]} beside {peer}", lines))
    return bar_chart("One NVIDIA H200: TFLOP/s", "rapt beside PyTorch 2.11 in one process", "", groups,
                     [("rapt, fp32", COLORS["fp32"], 1), ("rapt, bf16", COLORS["bf16"], 1), ("PyTorch", GREY, 1)], labels=220, note=110)


def steady(rows, ratio):
    return [row for row in rows if ratio not in row["noisy"]]


def training(data):
    return [row for name in ("training_bf16", "training_f32") for row in data[name]["rows"]]


def training_table(rows):
    lines = []
    for row in rows:
        scatters = " (samples scatter)" if row["noisy"] else ""
        lines.append([row["name"], row["dtype"], f"{row['sdpa']['median_ms']:.0f}", f"{row['rapt']['median_ms']:.0f}",
                      f"{row['vs_sdpa']:.2f}{scatters}"])
    return table(["model", "type", "PyTorch ms", "rapt ms", "PyTorch / rapt"], lines)


def headline(models, shapes, trained):
    """The opening of the page and README.md's figures, from the 16-thread runs; rows that scatter are left out."""
    whole, alone = [], []
    for dtype in ("fp32", "bf16"):
        ratios = [row["vs_sdpa"] for row in steady(models["rows"], "vs_sdpa") if row["dtype"] == dtype]
        whole.append(f"{min(ratios):.2f} to {max(ratios):.2f} in {dtype}")
    for dtype in COLORS:
        ratios = [row["vs_torch_back_to_back"] for row in steady(shapes["rows"], "vs_torch_back_to_back") if row["dtype"] == dtype]
        alone.append(f"{geomean(ratios):.1f} in {dtype}")
    steps = []
    for dtype in ("fp32", "bf16"):
        ratios = [row["vs_sdpa"] for row in steady(trained, "vs_sdpa") if row["dtype"] == dtype]
        steps.append(f"{min(ratios):.2f} to {max(ratios):.2f} in {dtype}")
    count = len({row["name"] for row in shapes["rows"]})
    slower = [row for row in shapes["rows"] if row["vs_torch_back_to_back"] < 1]
    names = " and ".join(f'"{name}"' for name in dict.fromkeys(row["name"] for row in slower))
    figures = ", ".join(f"{row['vs_torch_back_to_back']:.2f} in {row['dtype']}" for row in slower)
    return f"""Times as fast as PyTorch {release(models)}, on a {XEON}, 16 threads:

- **Whole transformers models**: {" and ".join(whole)}.
- **Training them**, a whole step: {" and ".join(steps)}.
- **Attention alone**: {alone[0]}, {alone[1]} and {alone[2]}, geometric means over {count} shapes of real models.{f" Slower in {names}: {figures}." * bool(slower)}"""


def release(results):
    return ".".join(results["context"]["torch"].split(".")[:2])


def halves_table(halves, zen4):
    lines = []
    for machine, rows in (("Xeon, AMX", halves), ("Zen 4, AVX512-BF16", zen4)):
        for dtype in dict.fromkeys(row["dtype"] for row in rows):
            if machine == "Xeon, AMX" and dtype == "f32":
                continue
            for threads in dict.fromkeys(row["threads"] for row in rows):
                cells = []
                for d in ("64", "128"):
                    of = [float(r["ratio"]) for r in rows if (r["dtype"], r["threads"], r["d"]) == (dtype, threads, d)]
                    cells.append(f"{geomean(of):.2f} ({min(of):.2f} to {max(of):.2f})")
                lines.append([machine, LONG_NAME[dtype], threads, *cells])
    return table(["CPU", "type", "threads", "d = 64", "d = 128"], lines)


def decode_table(rows):
    lines = []
    for row in rows:
        if row["threads"] == "16":
            lines.append([LONG_NAME[row["dtype"]], row["b"], row["keys"], row["rapt_ms"], row["gbs"], row["gqa_ratio"], row["folded_ratio"]])
    return table(["type", "batch", "keys", "rapt ms", "GB/s", "PyTorch / rapt", "PyTorch, folded by hand / rapt"], lines)


def page(data):
    models, shapes = data["models"], data["shapes"]
    lead = headline(models, shapes, training(data))
    gpu16 = [float(r["ratio"]) for r in data["gpu"] if (r["kernel"], r["dtype"]) == ("wgmma", "bf16")]
    gpu32 = [float(r["ratio"]) for r in data["gpu"] if (r["kernel"], r["dtype"]) == ("wgmma", "f32")]
    errors = [(float(r["rapt_error"]), float(r["torch_error"])) for r in data["lengths"]]
    context = models["context"]
    return f"""<!-- Written by bench/report.py from bench/results. Do not edit. -->
# Performance

{lead}
- **One H200**: {min(gpu16):.2f} to {max(gpu16):.2f} times cuDNN in bf16, {min(gpu32):.1f} to {max(gpu32):.1f} times PyTorch's fastest in fp32, as exact.

A ratio is PyTorch's time over rapt's. Above 1, rapt is faster. Samples that scatter by more than 20 % are in no mean and no range
here. This compares the two on your machine, in a minute:

```sh
python -m rapt.bench --set quick
```

## Whole models

![Time of whole models](images/models.svg)

The models have random weights and their usual sizes. Two copies share the weights. One attends by `sdpa`, one by `rapt`, and
they take turns in one process. Attention is a small part of a small model, so the whole gains little there. In the
Qwen3-Next-like model the layers of linear attention differ too: PyTorch loops over chunks, rapt runs its delta rule. Measured {DATE['models']}
with PyTorch {release(models)} and transformers {context['transformers']}.

```sh
python -m rapt.bench --models
```

### Training

A step is forward, backward and AdamW, without dropout. Measured {DATE['training_bf16']}.

{training_table(training(data))}

```sh
python -m rapt.bench --models --train
```

## Attention alone

![Speed-up of attention by shape](images/shapes.svg)

Calls of rapt and PyTorch alternate with no pause between them, as in a model whose other layers are PyTorch's. Measured
{DATE['shapes']}.

```sh
python -m rapt.bench --set models --dtype f32,bf16,f16
```

### By length, fp32

![Speed-up by sequence length](images/lengths.svg)

The relative error against float64 is {min(e[0] for e in errors):.1e} to {max(e[0] for e in errors):.1e}; PyTorch's is {min(e[1] for e in errors):.1e} to {max(e[1] for e in errors):.1e}. Measured
{DATE['lengths']}. Sums have since become shorter and more exact, which costs 2 to 6 % of the time.

```sh
python -m rapt.bench --set paper --threads 1,16
```

### 16-bit types

Geometric mean of PyTorch's time over rapt's, and the range, over S = 512, 1024 and 4096, full and causal ({DATE['halves']}):

{halves_table(data['halves'], data['zen4'])}

```sh
python -m rapt.bench --set halves --threads 1,16
```

## Decode

![Decode against the memory's bandwidth](images/decode.svg)

A call with few query rows reads all keys and values and computes little, so the memory's read bandwidth is its limit. `rapt
bench` reads a large buffer beside every sample. A bar above 100 % had part of its keys in the last-level cache. Arithmetic, not
reading, bounds quantised caches, large groups and several tokens at once. Measured {DATE['decode']}.

```sh
rapt bench --set decode --threads 16
```

Beside PyTorch, which has two ways to do this: `enable_gqa=True`, and query heads folded into rows by hand. 16 threads, 32
query heads on 8, d = 128:

{decode_table(data['decode_torch'])}

```sh
python -m rapt.bench --set decode --threads 16
```

## Threads

![From 1 thread to 16](images/threads.svg)

The 16 CPUs of this virtual machine share fewer cores: pure arithmetic becomes 10 to 12 times as fast. A gain above that means
that the single thread had a busy neighbour on its core. Data and command are those of "By length".

## GPU

![TFLOP/s on an H200](images/gpu.svg)

The factor beside a bar is rapt's speed over PyTorch's. fp32 runs on tensor cores, too: three products of fp16 components stand for
one of fp32, as exactly. Measured {DATE['gpu']}; other head sizes are in [the data](../bench/results/{SOURCES['gpu']}).

```sh
python -m rapt.bench --set cuda --dtype f32,bf16,f16 --device cuda
```

## Hardware

| | CPU | what it measured |
|---|---|---|
| Xeon | {XEON} (Sapphire or Emerald Rapids), 16 virtual CPUs | all charts but the last |
| Zen 4 | AMD EPYC with AVX512-BF16, 2 virtual CPUs | 16-bit types |
| H200 | NVIDIA H200, driver 580.159 | GPU |

rapt was built by g++ 12.2. [bench.md](bench.md) says how samples, ratios and errors are taken; [the data](../bench/results/README.md)
has every row, its version of rapt, and more (AVX2, shares of the FMA peak, costs of a call, other thread counts).

## Limits

- Both CPUs are virtual machines on shared hosts. Ratios move by 5 to 10 % from run to run.
- A pale bar of "Attention alone" has samples of one side whose quartiles are more than 20 % of the median apart. No mean includes it.
- The data are of several versions and days; whole models were timed while the machine still settled from other work. Measure on your own machine before you decide.
- NEON, AVX2-only CPUs beside PyTorch, Zen 5 and GPUs other than the H200 have not been measured.
"""


def readme(text, data):
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    return f"{before}{BEGIN}\n{headline(data['models'], data['shapes'], training(data))}\n{END}{after}"


def outputs():
    data = {name: load(name) for name in SOURCES}
    charts = {"models": models_chart, "shapes": shapes_chart, "lengths": lengths_chart, "decode": decode_chart, "gpu": gpu_chart}
    files = {f"docs/images/{name}.svg": draw(data[name]) for name, draw in charts.items()}
    files["docs/images/threads.svg"] = threads_chart(data["lengths"])
    files["docs/performance.md"] = page(data)
    files["README.md"] = readme((ROOT / "README.md").read_text(encoding="utf-8"), data)
    return {ROOT / name: text for name, text in files.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only compare")
    options = parser.parse_args()
    stale = False
    for path, text in outputs().items():
        old = path.read_text(encoding="utf-8") if path.exists() else ""
        if old == text:
            continue
        stale = True
        if options.check:
            name = str(path.relative_to(ROOT))
            sys.stdout.writelines(list(difflib.unified_diff(old.splitlines(True), text.splitlines(True), name, "bench/report.py"))[:40])
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    if options.check and stale:
        sys.exit("these are not what bench/report.py makes of bench/results: run bench/report.py")


main()
