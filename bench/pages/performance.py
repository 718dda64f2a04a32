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
        whole.append(f"{min(ratios):.2f} to {max(ratios):.2f} in {dtype}")
    for dtype in COLORS:
        ratios = [row["vs_torch_back_to_back"] for row in steady(shapes["rows"], "vs_torch_back_to_back") if row["dtype"] == dtype]
        alone.append(f"{geomean(ratios):.1f} in {dtype}")
    steps = []
    for dtype in ("fp32", "bf16"):
        ratios = [row["vs_sdpa"] for row in steady(trained, "vs_sdpa") if row["dtype"] == dtype]
        steps.append(f"{min(ratios):.2f} to {max(ratios):.2f} in {dtype}")
    count = len({row["name"] for row in shapes["rows"]})
    slower = {}
    for row in steady(shapes["rows"], "vs_torch_back_to_back"):
        if row["vs_torch_back_to_back"] < 1:
            slower.setdefault(row["name"], []).append(f"{row['vs_torch_back_to_back']:.2f} in {row['dtype']}")
    slower_in = ", ".join(f'"{name}" ({", ".join(figures)})' for name, figures in slower.items())
    return f"""Times as fast as PyTorch {release(models)}, on a {XEON}, 16 threads:

- **Whole transformers models**: {" and ".join(whole)}.
- **Training them**, a whole step: {" and ".join(steps)}.
- **Attention alone**: {alone[0]}, {alone[1]} and {alone[2]}, geometric means over {count} shapes of real models.{f" Slower in {slower_in}." * bool(slower)}"""


def generation_line(data):
    """rapt's cache without quantising over transformers' default one, by length; and at the longest over one that is written in place."""
    of = {(row["side"], row["length"], row["dtype"]): row["speedup"] for row in data["generation"]["rows"]}
    dtypes, lengths = (list(dict.fromkeys(key[i] for key in of)) for i in (2, 1))
    texts = []
    for length in (lengths[0], lengths[-1]):
        ratios = " and ".join(f"{of['rapt, Cache', length, dtype]:.2f} in {dtype}" for dtype in dtypes)
        texts.append(f"{ratios} after {length:,} tokens")
    static = " and ".join(f"{of['rapt, Cache', lengths[-1], dtype] / of['sdpa, StaticCache', lengths[-1], dtype]:.2f}" for dtype in dtypes)
    return (f"- **Generation**, a Llama-like model of 8 layers, over transformers' default cache: {', '.join(texts)}; "
            f"there {static} over its `StaticCache`.")


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
- **One H200**, prompts of 1024 tokens and more: {min(gpu16):.2f} to {max(gpu16):.2f} times cuDNN in bf16, {min(gpu32):.1f} to {max(gpu32):.1f} times PyTorch's fastest in fp32, as exact.

A ratio is PyTorch's time over rapt's. Above 1, rapt is faster. Samples that scatter by more than 20 % are in no mean and no range
here. This compares the two on your machine, in a minute:

```sh
python -m rapt.bench --set quick
```

## Whole models

![Time of whole models](images/models.svg)

The models have random weights and their usual sizes. Two copies share the weights. One attends by `sdpa`, one by `rapt`, and
they take turns in one process. Attention is a small part of a small model, so the whole gains little there. In the
Qwen3-Next-like model the layers of linear attention differ too: PyTorch loops over chunks, rapt runs its delta rule. Measured {data.day['models']}
with PyTorch {release(models)} and transformers {context['transformers']}.

PyTorch's time over rapt's, of the whole model:

{models_table([data["models_1"], data["models_2"], models])}

```sh
python -m rapt.bench --models --threads 1
```

### Training

A step is forward, backward and AdamW, without dropout. Measured {data.day['training_bf16']}.

{training_table(training(data))}

```sh
python -m rapt.bench --models --train
```

## Generation

![Tokens per second by context length](images/generation.svg)

A Llama-like model of 8 layers (32 heads on 8, of 64 columns) makes tokens one by one over a cache that holds so many before. All take
turns, token by token, in one process, and share the weights. transformers' `DynamicCache` is copied for every token, its `StaticCache`
and rapt's `Cache` are written in place; `i8` and `i4x2` are rapt's quantised caches. Up to some thousand tokens the model's matrices take
nearly all of the time. Measured {data.day['generation']}.

Milliseconds a token, and how many times as fast as the first column:

{generation_table(data['generation']['rows'])}

```sh
python -m rapt.bench --generate --fill --cache i8,i4x2
```

## Attention alone

![Speed-up of attention by shape](images/shapes.svg)

Calls of rapt and PyTorch alternate with no pause between them, as in a model whose other layers are PyTorch's. Measured
{data.day['shapes']}.

```sh
python -m rapt.bench --set models --dtype f32,bf16,f16
```

### By length, fp32

![Speed-up by sequence length](images/lengths.svg)

The relative error against float64 is {min(e[0] for e in errors):.1e} to {max(e[0] for e in errors):.1e}; PyTorch's is {min(e[1] for e in errors):.1e} to {max(e[1] for e in errors):.1e}. Measured
{data.day['lengths']}.{" Sums have since become shorter and more exact, which costs 2 to 6 % of the time." * (data.day['lengths'] < "2026-11-22")}

```sh
python -m rapt.bench --set paper --threads 1,16
```

### 16-bit types

Geometric mean of PyTorch's time over rapt's, and the range, over S = 512, 1024 and 4096, full and causal ({data.day['halves']}):

{halves_table(data)}

```sh
python -m rapt.bench --set halves --threads 1,16
```

## Decode

![Decode against the memory's bandwidth](images/decode.svg)

A call with few query rows reads all keys and values and computes little, so the memory's read bandwidth is its limit. `rapt
bench` reads a large buffer beside every sample. A bar above 100 % had part of its keys in the last-level cache. Arithmetic, not
reading, bounds quantised caches, large groups and several tokens at once. Measured {data.day['decode']}.

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
one of fp32, as exactly. Measured {data.day['gpu']}: [data](../bench/results/{data.day['gpu']}/{data.path['gpu'].name}).

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
- The data are of several versions and days{"; whole models were timed while the machine still settled from other work" * busy}. Measure on your own machine before you decide.
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
