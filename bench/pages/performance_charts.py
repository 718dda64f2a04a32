"""The charts of docs/performance.md."""

from .charts import COLORS, GREY, PALE, SLATE, bar_chart, line_chart
from .data import LONG_NAME, XEON


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


def generation_chart(data):
    """Tokens per second; those of rapt's caches in a color."""
    sides = list(dict.fromkeys(row["side"] for row in data["rows"]))
    colors = dict(zip(sides, (GREY, SLATE, *COLORS.values())))
    groups = []
    for dtype in dict.fromkeys(row["dtype"] for row in data["rows"]):
        lengths = {}
        for row in (row for row in data["rows"] if row["dtype"] == dtype):
            pale, rate = PALE if row["noisy"] else 1, 1000 / row["step"]["median_ms"]
            lengths.setdefault(f"{row['length']:,} tokens before", []).append(
                (rate, colors[row["side"]], pale, f"{rate:.1f} · {row['speedup']:.2f}×"))
        groups.append((dtype, list(lengths.items())))
    return bar_chart("Generation: tokens per second by context length", f"Llama-like model of 8 layers in transformers · {XEON}, 16 threads",
                     "", groups, [(side, colors[side], 1) for side in sides])


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
