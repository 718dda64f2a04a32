"""docs/performance.md, its charts in docs/images, and README.md's figures."""

from . import performance_charts as charts
from .charts import COLORS
from .data import LONG_NAME, XEON, geomean, table

BEGIN, END = "<!-- measured: written by bench/report.py -->", "<!-- /measured -->"
CHARTS = {
    "models": ("models", charts.models_chart),
    "generation": ("generation", charts.generation_chart),
    "shapes": ("shapes", charts.shapes_chart),
    "lengths": ("lengths", charts.lengths_chart),
    "threads": ("lengths", charts.threads_chart),
    "decode": ("decode", charts.decode_chart),
    "gpu": ("gpu", charts.gpu_chart),
}


def steady(rows, ratio):
    return [row for row in rows if ratio not in row["noisy"]]


def training(data):
    return [row for name in ("training_bf16", "training_f32") for row in data[name]["rows"]]


def models_table(runs):
    """Of one run for each number of threads."""
    ratio, threads = {}, [str(run["rows"][0]["threads"]) for run in runs]
    for run in runs:
        for row in run["rows"]:
            scatters = " (samples scatter)" if "vs_sdpa" in row["noisy"] else ""
            ratio.setdefault((row["name"], row["dtype"]), {})[str(row["threads"])] = f"{row['vs_sdpa']:.2f}{scatters}"
    return table(["model", "type", *(f"{n} thread{'s' * (n != '1')}" for n in threads)],
                 [[*case, *(of.get(n, "") for n in threads)] for case, of in ratio.items()])


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
        whole.append(f"{min(ratios):.2f}x to {max(ratios):.2f}x as fast in {dtype}")
    for dtype in COLORS:
        ratios = [row["vs_torch_back_to_back"] for row in steady(shapes["rows"], "vs_torch_back_to_back") if row["dtype"] == dtype]
        alone.append(f"{geomean(ratios):.1f}x in {dtype}")
    steps = []
    for dtype in ("fp32", "bf16"):
        ratios = [row["vs_sdpa"] for row in steady(trained, "vs_sdpa") if row["dtype"] == dtype]
        steps.append(f"{min(ratios):.2f}x to {max(ratios):.2f}x as fast in {dtype}")
    count = len({row["name"] for row in shapes["rows"]})
    slower = {}
    for row in steady(shapes["rows"], "vs_torch_back_to_back"):
        if row["vs_torch_back_to_back"] < 1:
            slower.setdefault(row["name"], []).append(f"{row['vs_torch_back_to_back']:.2f}x in {row['dtype']}")
    slower_in = ", ".join(f'"{name}" ({", ".join(figures)})' for name, figures in slower.items())
    if slower:
        slower_in = f" {'The one slower shape is' if len(slower) == 1 else 'Slower shapes are'} {slower_in}."
    return f"""rapt's speed relative to PyTorch {release(models)} (above 1, rapt is faster), on a {XEON}, 16 threads:

- **Whole transformers models**, forward, relative to PyTorch's attention: {" and ".join(whole)}.
- **Training** the same models, whole steps: {" and ".join(steps)}.
- **Attention alone**: {alone[0]}, {alone[1]} and {alone[2]} (geometric means over {count} shapes of real models).{slower_in}"""


def generation_line(data):
    """rapt's attention and cache, not quantised, relative to transformers' default cache at both ends of the lengths, and to `StaticCache` at the longest."""
    of = {(row["side"], row["length"], row["dtype"]): row["speedup"] for row in data["generation"]["rows"]}
    dtypes, lengths = (list(dict.fromkeys(key[i] for key in of)) for i in (2, 1))
    texts = []
    for length in (lengths[0], lengths[-1]):
        ratios = " and ".join(f"{of['rapt, Cache', length, dtype]:.2f}x in {dtype}" for dtype in dtypes)
        texts.append(f"{ratios} after {length:,} tokens")
    static = " and ".join(f"{of['rapt, Cache', lengths[-1], dtype] / of['sdpa, StaticCache', lengths[-1], dtype]:.2f}x in {dtype}" for dtype in dtypes)
    return (f"- **Generation** with a Llama-like model of 8 layers and rapt's cache, relative to transformers' default cache: {', '.join(texts)}. "
            f"Compared with transformers' `StaticCache` after {lengths[-1]:,} tokens: {static}.")


def generation_table(rows):
    sides = list(dict.fromkeys(row["side"] for row in rows))
    lines = {}
    for row in rows:
        scatters = ", samples scatter" * bool(row["noisy"])
        cell = f"{row['step']['median_ms']:.1f}" if row["side"] == sides[0] else f"{row['step']['median_ms']:.1f} ({row['speedup']:.2f}{scatters})"
        lines.setdefault((row["dtype"], f"{row['length']:,}"), []).append(cell)
    return table(["type", "tokens before", *sides], [[*case, *cells] for case, cells in lines.items()])


def release(results):
    return ".".join(results["context"]["torch"].split(".")[:2])


def halves_table(data):
    """Of the two machines of the CSV files, and of every other that bench/measure.py has measured."""
    sources = [("Xeon, AMX", data["halves"]), ("Zen 4, AVX512-BF16", data["zen4"])]
    sources += [(machine, rows) for machine, rows in data.other_halves.items()]
    lines = []
    for machine, rows in sources:
        for dtype in dict.fromkeys(row["dtype"] for row in rows if row["dtype"] != "f32"):
            for threads in dict.fromkeys(row["threads"] for row in rows):
                cells = []
                for d in ("64", "128"):
                    measured = [r for r in rows if (r["dtype"], r["threads"], r["d"]) == (dtype, threads, d)]
                    of = [float(r["ratio"]) for r in measured if not r.get("noisy")]
                    cells.append(f"{geomean(of):.2f} ({min(of):.2f} to {max(of):.2f})" if of else "samples scatter" * bool(measured))
                lines.append([machine, LONG_NAME[dtype], threads, *cells])
    return table(["CPU", "type", "threads", "d = 64", "d = 128"], lines)


def decode_table(rows):
    lines = []
    for row in rows:
        if row["threads"] == "16" and row.get("h", "32") == "32" and row["folded_ratio"]:
            lines.append([LONG_NAME[row["dtype"]], row["b"], row["keys"], row["rapt_ms"], row["gbs"], row["gqa_ratio"], row["folded_ratio"]])
    return table(["type", "batch", "keys", "rapt ms", "GB/s", "PyTorch / rapt", "PyTorch, folded by hand / rapt"], lines)


def page(data):
    models, shapes = data["models"], data["shapes"]
    lead = headline(models, shapes, training(data))
    gpu16 = [float(r["ratio"]) for r in data["gpu"] if (r["kernel"], r["dtype"]) == ("wgmma", "bf16")]
    gpu32 = [float(r["ratio"]) for r in data["gpu"] if (r["kernel"], r["dtype"]) == ("wgmma", "f32")]
    errors = [(float(r["rapt_error"]), float(r["torch_error"])) for r in data["lengths"]]
    context = models["context"]
    busy = context["load_average"] > context["cpus"] / 4
    return f"""<!-- Written by bench/report.py from bench/results. Do not edit. -->
# Performance

{lead}
{generation_line(data)}
- **One H200**, prompts of 1024 tokens and more: {min(gpu16):.2f} to {max(gpu16):.2f} relative to cuDNN in bf16, {min(gpu32):.1f} to {max(gpu32):.1f} relative to PyTorch's fastest kernel in fp32, with the accuracy of fp32.

Ratios on this page are PyTorch's time divided by rapt's, unless a table says otherwise. Means and ranges leave out samples that scatter by more than 20 %. To compare
the two on your machine in a minute:

```sh
python -m rapt.bench --set quick
```

## Whole models

![Time of whole models](images/models.svg)

The models have their usual sizes and random weights. Two copies share the weights: one uses `sdpa`, the other `rapt`, and they alternate
in one process. Small models gain little, because attention is a small part of them. The Qwen3-Next-like model also has linear-attention
layers: PyTorch loops over chunks, rapt runs its delta rule. Measured {data.day['models']} with PyTorch {release(models)} and transformers
{context['transformers']}.

PyTorch's time over rapt's, whole model:

{models_table([data["models_1"], data["models_2"], models])}

```sh
python -m rapt.bench --models --threads 1
```

### Training

A step is the forward, the backward and AdamW, without dropout. Measured {data.day['training_bf16']}.

{training_table(training(data))}

```sh
python -m rapt.bench --models --train
```

## Generation

![Tokens per second by context length](images/generation.svg)

A Llama-like model of 8 layers (32 query heads, 8 KV heads, head dimension 64) generates tokens one by one after a given number of cached
tokens. All variants share the weights and alternate token by token in one process. transformers copies its `DynamicCache` for every token.
Its `StaticCache` and rapt's `Cache` are written in place. `i8` and `i4x2` are rapt's quantised caches. Up to a few thousand tokens, the
model's matrix products take nearly all of the time. Measured {data.day['generation']}.

Milliseconds per token, and in brackets the median speed, token by token, relative to the first column:

{generation_table(data['generation']['rows'])}

```sh
python -m rapt.bench --generate --fill --cache i8,i4x2
```

## Attention alone

![Speed-up of attention by shape](images/shapes.svg)

Calls to rapt and PyTorch alternate without a pause, as in a model whose other layers are PyTorch's. Measured {data.day['shapes']}.

```sh
python -m rapt.bench --set models --dtype f32,bf16,f16
```

### By length, fp32

![Speed-up by sequence length](images/lengths.svg)

The relative error against float64 is {min(e[0] for e in errors):.1e} to {max(e[0] for e in errors):.1e}; PyTorch's is {min(e[1] for e in errors):.1e} to {max(e[1] for e in errors):.1e}. Measured
{data.day['lengths']}.{" Later versions of rapt sum more exactly and are 2 to 6 % slower." * (data.day['lengths'] < "2026-11-22")}

```sh
python -m rapt.bench --set paper --threads 1,16
```

### 16-bit types

PyTorch's time over rapt's: geometric mean and range over S = 512, 1024 and 4096, full and causal ({data.day['halves']}):

{halves_table(data)}

```sh
python -m rapt.bench --set halves --threads 1,16
```

## Decode

![Decode against the memory's bandwidth](images/decode.svg)

A decode call reads all keys and values and computes little, so the memory's read bandwidth limits it. `rapt bench` measures that bandwidth
with every sample, by reading a large buffer. Bars above 100 % had part of their keys in the last-level cache. Quantised caches, large groups
and several tokens at once are limited by arithmetic instead. Measured {data.day['decode']}.

```sh
rapt bench --set decode --threads 16
```

PyTorch has two ways to decode with grouped heads: `enable_gqa=True`, and query heads folded into rows by hand. Compared with both, on 16
threads, with 32 query heads, 8 KV heads and d = 128:

{decode_table(data['decode_torch'])}

```sh
python -m rapt.bench --set decode --threads 16
```

## Threads

![From 1 thread to 16](images/threads.svg)

The 16 CPUs of this virtual machine share fewer cores: pure arithmetic is 10 to 12x faster on 16 threads than on one. A larger gain means
that the single thread shared its core with a busy neighbour. Data and command are those of "By length".

## GPU

![TFLOP/s on an H200](images/gpu.svg)

The factor next to a bar is rapt's speed over PyTorch's. fp32 runs on tensor cores too: three products of fp16 components replace one of
fp32, with the accuracy of fp32. Measured {data.day['gpu']}: [data](../bench/results/{data.day['gpu']}/{data.path['gpu'].name}).

```sh
python -m rapt.bench --set cuda --dtype f32,bf16,f16 --device cuda
```

## Hardware

| | hardware | used for |
|---|---|---|
| Xeon | {XEON} (Sapphire or Emerald Rapids), 16 virtual CPUs | all charts but the last |
| Zen 4 | AMD EPYC with AVX512-BF16, 2 virtual CPUs | 16-bit types |
| H200 | NVIDIA H200, driver 580.159 | GPU |

rapt was built with g++ 12.2. [bench.md](bench.md) describes how samples, ratios and errors are measured. [The data](../bench/results/README.md)
have every row with its version of rapt, and more: AVX2, shares of the FMA peak, costs of a call, other thread counts.

## Limits

- Both CPUs are virtual machines on shared hosts. Ratios vary by 5 to 10 % from run to run.
- A pale bar in "Attention alone" scatters: the quartiles of one side are more than 20 % of the median apart. No mean includes it.
- The data come from several versions and days{"; other work on the machine was still ending when whole models were timed" * busy}. Measure on your own machine before you decide.
- Not measured: Arm; Zen 5; whole models on CPUs that have only AVX2; GPUs other than H100 and H200.
"""


def readme(text, data):
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    return f"{before}{BEGIN}\n{headline(data['models'], data['shapes'], training(data))}\n{generation_line(data)}\n{END}{after}"


def files(data, readme_text):
    """{path below the repository's root: text}."""
    made = {f"docs/images/{name}.svg": draw(data[kind]) for name, (kind, draw) in CHARTS.items()}
    return {**made, "docs/performance.md": page(data), "README.md": readme(readme_text, data)}
