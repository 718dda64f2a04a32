"""Compares rapt with PyTorch's scaled_dot_product_attention: speed, errors against float64, memory, and whole models.

Attention alone (--set, --problem): all sides run on the same tensors in one process with the same number of threads,
called with the same arguments. The sides are rapt, PyTorch's own choice ("torch"), its three plain steps ("math"), in
decoding with grouped heads the heads of a group as rows of one head ("folded"), and on CUDA every backend that takes
the problem. "fastest" is the best of PyTorch's sides. Problems that scaled_dot_product_attention cannot compute are
left out, and named.

On the CPU, threads of each library spin for a while after their work and disturb the other library. So there are two
measurements. "paused": a sample is calls of one side, after a pause and an uncounted call. "back to back", without
math: the sides alternate from call to call without a pause, so each call begins while threads of the other library may
still spin, as in a model whose other layers are PyTorch's. Samples also alternate between seeds. A sample is the mean
over enough calls to last --sample-ms. A time is the median of the samples, ± half their interquartile range. A ratio is
the median over pairs of neighbouring samples, so that a slowdown of both sides cancels; the ratio of the two best
samples follows it. On CUDA the samples of the sides alternate, timed between two events.

A ratio is marked as noisy, and left out of means and charts, if the interquartile range of either side's samples
exceeds 20 % of their median.

GFLOP/s count the attended (row, key) pairs, without the softmax. GB/s count q, out, and the keys and values that some
row sees, each once.

A fallback of rapt to PyTorch is an error. Errors are those of up to 256 query rows of every head, for the worst seed:
max_err is the largest |out - exact|, rel_err is |out - exact| / |exact| in the Frobenius norm. Memory is the growth of
the resident peak during one call in a process of its own, result included, to within about 0.3 MB per thread.

Whole models (--models): transformers models with random weights. A model with "sdpa" and one with "rapt" share the
weights and alternate, back to back. "attention" is the share of a forward's time inside transformers' attention
function, measured around each call of it. "difference" is the largest difference of their outputs, next to the largest
output. With --train a step is a forward, a loss of the output, a backward and AdamW, without dropout and decode.
"difference" is then that of the gradients, and there are no shares.

Text generation (--generate): a transformers model with random weights (--model) reads a prompt and generates greedily,
token by token. Sides are "sdpa" ("eager" if the model has no other) with transformers' DynamicCache and StaticCache,
and "rapt" with its Cache, with --cache also with quantised ones; with --compiled also both with StaticCache and steps
under torch.compile. All share the weights. First, all sides without quantisation have to generate the same tokens in
fp32. Then all alternate, token by token. "tokens/s" is the speed of the best step, "times as fast" the first side's
time over this side's, "cache MB" the size of keys and values, "peak MB" the growth of the resident peak while the
prompt was read and a token made. A noisy ratio is marked. With --fill, caches are filled with random rows in place of a
prompt's, and there is no time to the first token. On CUDA a time runs until the GPU has finished, and "peak MB" is the
growth of the GPU memory that PyTorch allocated (torch.cuda.max_memory_allocated). A side that runs out of GPU memory is
left out of that length, and named. Without the first side there are no ratios.

Engines (--engines): transformers' continuous batching, with --batch requests of --lengths tokens each and --tokens
generated tokens, and sentence-transformers, with --texts texts of mixed lengths, on models with random weights. "sdpa"
and "rapt_flash" alternate run by run on the same model, after both gave the same tokens, or embeddings, in fp32.
"tokens/s" counts generated tokens; for sentence-transformers, tokens that are read. Rates are those of the median run.
An engine that is not installed is left out, and named.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

try:
    import torch
except ImportError as error:
    raise ImportError("rapt.bench compares with PyTorch, which is not installed: pip install torch. 'rapt bench' does without") from error

import rapt.torch
from rapt import _chart
from rapt._codes import KV_DTYPES
from rapt.bench import ops, report, sets
from rapt.bench.timing import mean_of, mean_text

GENERATED = ("llama", "qwen3-next", "deepseek", "deepseek-sparse", "gpt-oss")
EXAMPLES = """examples:
  python -m rapt.bench --set quick
  python -m rapt.bench --set paper --dtype f32,bf16,f16 --threads 1,2 --json paper.json --svg paper.svg
  python -m rapt.bench --models --json models.json
  python -m rapt.bench --generate --lengths 1k,8k --cache i8 --json generation.json --svg generation.svg
  python -m rapt.bench --engines --threads 1,2 --json engines.json --svg engines.svg"""


def parse_arguments(words: list[str] | None) -> argparse.Namespace:
    def dtypes(text: str) -> list[str]:
        for word in text.split(","):
            if word not in sets.DTYPES:
                raise argparse.ArgumentTypeError(f"{word}; wanted some of {','.join(sets.DTYPES)}")
        return text.split(",")

    def counts(text: str) -> list[int]:
        if not all(word.isdigit() and int(word) > 0 for word in text.split(",")):
            raise argparse.ArgumentTypeError(f"{text}; wanted numbers from 1, for example 1,2")
        return [int(word) for word in text.split(",")]

    def count(text: str) -> int:
        return counts(text)[0]

    def lengths(text: str) -> list[int]:
        if not all(re.fullmatch(r"[1-9]\d*k?", word) for word in text.split(",")) or "1" in text.split(","):
            raise argparse.ArgumentTypeError(f"{text}; wanted numbers of tokens from 2, for example 1k,8k")
        return [int(word.removesuffix("k")) * (1024 if word.endswith("k") else 1) for word in text.split(",")]

    def caches(text: str) -> list[str]:
        for word in text.split(","):
            if word not in KV_DTYPES:
                raise argparse.ArgumentTypeError(f"{word}; wanted some of {','.join(KV_DTYPES)}")
        return text.split(",")

    def output(text: str) -> Path:
        path = Path(text)
        if path.is_dir() or not path.resolve().parent.is_dir():
            raise argparse.ArgumentTypeError(f"{text}: cannot be written")
        return path

    parser = argparse.ArgumentParser(
        "python -m rapt.bench", description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawTextHelpFormatter
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--set", default="quick", help=f"attention alone: {', '.join(sets.NAMES)}, or a file with one problem per line")
    what.add_argument("--problem", action="append", help='attention alone: "b=1 hq=8 sq=512 d=64 causal"; repeatable')
    what.add_argument("--models", action="store_true", help="whole models (needs transformers)")
    what.add_argument("--generate", action="store_true", help="generation of text (needs transformers)")
    what.add_argument("--engines", action="store_true", help="serving engines (needs transformers)")
    parser.add_argument("--train", action="store_true", help="with --models: training steps in place of forwards")
    parser.add_argument("--quick", action="store_true", help="with --models, --generate and --engines: small models")
    own = parser.add_argument_group("options of --generate; the first four also of --engines")
    own.add_argument("--lengths", type=lengths, help="lengths of prompts in tokens: 1k,8k (default: 1k,8k,32k; --engines: 500)")
    own.add_argument("--batch", type=counts, help="number of sequences or requests: 1,8,32 (default: 1; --engines: 16)")
    own.add_argument("--tokens", type=count, help="tokens to generate after each prompt, 4 or more (default: 16; --engines: 33)")
    own.add_argument("--texts", type=count, help="--engines only: number of texts for sentence-transformers (default: 400)")
    own.add_argument("--model", choices=GENERATED, help=f"kind of model (default: {GENERATED[0]})")
    own.add_argument("--cache", type=caches, help=f"types of quantised caches, one or several: {','.join(KV_DTYPES)}")
    own.add_argument("--chunk", type=count, help="tokens of a prompt per forward (default: all, with eager attention 512)")
    own.add_argument("--fill", action="store_true", help="fill caches with random rows in place of a prompt's")
    own.add_argument("--compiled", action="store_true", help="also measure the static cache under torch.compile (takes minutes)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="device of the tensors, not with --engines (default: %(default)s)")
    parser.add_argument("--dtype", type=dtypes, help="one or several of f32,bf16,f16 (default: each problem's own; models: f32,bf16)")
    parser.add_argument("--threads", type=counts, help="numbers of CPU threads: 1,2 (default: PyTorch's number; --models: 1, 2 and PyTorch's number)")
    parser.add_argument("--seeds", type=count, default=3, help="number of random inputs per shape (default: %(default)s)")
    parser.add_argument("--seconds", type=float, help="seconds of samples per row, paused or not (default: 0.9; --models: 2, --generate: 10, --engines: 60)")
    parser.add_argument("--samples", type=count, default=5, help="smallest number of samples per side (default: %(default)s)")
    parser.add_argument("--sample-ms", type=float, default=4.0, help="shortest duration of a sample (default: %(default)s)")
    parser.add_argument("--no-math", action="store_true", help="omit PyTorch's math backend")
    parser.add_argument("--no-memory", action="store_true", help="omit the measurement of memory")
    parser.add_argument("--json", type=output, help="also write all results to this file")
    parser.add_argument("--svg", type=output, help="also draw a chart into this file; not with --models")
    options = parser.parse_args(words)
    if options.quick and not (options.models or options.generate or options.engines):
        parser.error("--quick: wanted --models, --generate or --engines with it; of attention alone there is --set quick")
    if options.train and not options.models:
        parser.error("--train: wanted --models with it")
    if options.svg and options.models:
        parser.error("--svg: there is no chart of --models; wanted --json")
    defaults: dict[str, Any] = {"model": GENERATED[0], "lengths": [1 << 10, 1 << 13, 1 << 15], "batch": [1], "tokens": 16}
    defaults |= {"cache": [], "chunk": None, "fill": False, "compiled": False}
    engines: dict[str, Any] = {"lengths": [500], "batch": [16], "tokens": 33, "texts": 400}
    word = "--generate" if options.generate else "--engines"
    chosen = defaults if options.generate else engines if options.engines else {}
    for name in defaults | engines:
        if name in chosen:
            setattr(options, name, chosen[name] if getattr(options, name) is None else getattr(options, name))
        elif getattr(options, name):
            wanted = " or ".join(way for way, names in (("--generate", defaults), ("--engines", engines)) if name in names)
            parser.error(f"--{name}: wanted {wanted} with it")
    alone = ("seeds", "sample_ms", "no_math", "no_memory")
    for name in alone if chosen else ():
        if getattr(options, name) != parser.get_default(name):
            parser.error(f"--{name.replace('_', '-')}: has no meaning with {word}; wanted it without")
    if options.generate and options.tokens < 4:
        parser.error(f"--tokens: {options.tokens}; wanted 4 or more")
    if options.fill and options.model == "deepseek-sparse":
        parser.error("--fill: its layers choose keys by what they hold; wanted a prompt, or another --model")
    if options.engines and options.device == "cuda":
        parser.error("--device: cuda; wanted cpu with --engines")
    if options.device == "cuda":
        if options.threads:
            parser.error("--threads: of the CPU; wanted without --device cuda")
        reasons = [entry["unusable"] for entry in rapt.info()["entries"] if entry["backend"] == "cuda"]
        if not torch.cuda.is_available() or all(reasons):
            reason = rapt.info()["backends"][1]["missing"] if not reasons else reasons[0] or "PyTorch finds no GPU"
            parser.error(f"--device: cuda, but {reason}; wanted cpu")
    max_threads = torch.get_num_threads()
    default = sorted({1, min(2, max_threads), max_threads}) if options.models else [max_threads]
    options.threads = [None] if options.device == "cuda" else options.threads or default
    options.cases, options.left_out = [], []
    if options.models or chosen:
        options.dtype = options.dtype or ["f32", "bf16"]
    else:
        try:
            options.cases, options.left_out = sets.parse_all(options.problem) if options.problem else sets.read(options.set)
        except ValueError as error:
            parser.error(str(error))
        if options.dtype:
            cases = [replace(case, dtype=dtype) for dtype in options.dtype for case in options.cases]
            options.cases = list(dict.fromkeys(cases))
        if not options.cases:
            parser.error(f"{options.left_out[0]}: scaled_dot_product_attention has no counterpart; wanted some problem that has")
    if options.seconds is None:
        options.seconds = 2.0 if options.models else 10.0 if options.generate else 60.0 if options.engines else 0.9
    return options


def main(words: list[str] | None = None) -> None:
    options = parse_arguments(words)
    what = "training of whole models" if options.train else "whole models" if options.models else "" if options.problem else options.set
    what = "generation" if options.generate else "engines" if options.engines else what
    context = report.context_of(options.device) | {"seeds": options.seeds, "set": what, "left_out": options.left_out}
    part: Any = ops
    if options.models or options.generate or options.engines:
        try:
            import transformers
        except ImportError:
            option = next(f"--{name}" for name in ("models", "generate", "engines") if getattr(options, name))
            sys.exit(f"rapt.bench {option} runs models of transformers, which is not installed: pip install 'transformers>=5.23'")
        if options.models:
            from rapt.bench import models as part
        elif options.engines:
            from rapt.bench import engines as part
        else:
            from rapt.bench import generate as part

        context["transformers"] = transformers.__version__
    device = f", {context['device']}" * (options.device == "cuda")
    print(f"rapt {context['rapt']} and torch {context['torch']} ({context['torch_cpu_capability']}) on {context['cpu']}{device}")
    if context["load_average"] > 0.5:
        print(f"The machine is at work already (load average {context['load_average']}): times will scatter.")
    for problem in options.left_out:
        print(f"Left out, as PyTorch has no counterpart: {problem}")
    before = torch.get_num_threads()
    try:
        with warnings.catch_warnings():
            # Training in fp32 on a GPU is PyTorch's attention: say so, and measure it.
            kind: Any = "default" if options.train and options.device == "cuda" else "error"
            warnings.simplefilter(kind, rapt.torch.FallbackWarning)
            rows = part.measure(options)
    finally:
        torch.set_num_threads(before)
    groups = report.groups_of(rows)
    summary: list[dict[str, Any]] = [
        {"dtype": dtype, "threads": threads}
        | {way: mean_of(group, ratio) for way, ratio in part.RATIOS.items() if ratio in group[0]}
        for (dtype, threads), group in groups.items()
    ]
    if options.json:
        document = {"context": context, "rows": rows, "summary": summary}
        options.json.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    if options.svg:
        draw = _chart.generation_svg if options.generate else _chart.engines_svg if options.engines else _chart.svg
        options.svg.write_text(draw(context, rows), encoding="utf-8")
    for line, group in zip(summary, groups.values()):
        print(f"\n{_chart.title_of(line['dtype'], line['threads'])}:\n")
        report.print_table(part.HEAD, [part.cells_of(row) for row in group])
        print()
        for way in (way for way in part.RATIOS if way in line):
            print(f"{part.PEER} / rapt, {way.replace('_', ' ')}: {mean_text(line[way])}")
