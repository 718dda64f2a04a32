"""rapt beside PyTorch's scaled_dot_product_attention: speed, errors against float64, memory, and whole models.

    python -m rapt.bench --set quick
    python -m rapt.bench --set full --dtype fp32,bf16 --threads 1,2 --json bench.json --svg bench.svg
    python -m rapt.bench --models --json models.json

Attention alone (--set): both sides, and PyTorch's plain three steps ("math"), are called by the same function signature on
the same tensors in one process with the same number of threads. Threads of either library spin for a while after their work
and disturb the other, so there are two ways of taking turns. "paused": a sample is calls of one side, after a pause and a
call that is not counted. "back to back", without math: the sides alternate from call to call with nothing in between, so
that each call begins while threads of the other library may still spin, as in a model whose other layers are PyTorch's.
Samples also alternate between seeds. A sample is the mean over enough calls to last --sample-ms. A time is the median of the samples,
± half the distance between their quartiles; a ratio the median over pairs of neighbours, which what slows both down leaves
alone, and after it that of the two best samples.

A ratio is marked as noisy, and left out of means and charts, where the spread of either side's samples, the distance between
the quartiles over the median, passes 20 %.

A fallback of rapt to PyTorch is an error here. Errors are those of up to 256 query rows of every head, the worst seed's;
max_err is the largest |out - exact|, rel_err |out - exact| / |exact| in the Frobenius norm. Memory is the growth of the
process's resident peak during one call in a process of its own, result included, to within some 0.3 MB a thread.

Whole models (--models): models of transformers with random weights, one that attends by "sdpa" and one by "rapt" that
share the weights, run in turn, back to back. "attention" is the share of a forward's time spent inside transformers'
attention function, by a clock around each call of it. "difference" is the largest one between their outputs, beside the
largest output.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from pathlib import Path
from typing import Any

try:
    import torch
except ImportError:
    sys.exit("rapt.bench compares with PyTorch, which is not installed: pip install torch")

import rapt.torch
from rapt import _chart
from rapt.bench import ops, report
from rapt.bench.timing import mean_of, mean_text


def parse_arguments(words: list[str] | None) -> argparse.Namespace:
    def dtypes(text: str) -> list[str]:
        for word in text.split(","):
            if word not in report.DTYPES:
                raise argparse.ArgumentTypeError(f"{word}: wanted some of {','.join(report.DTYPES)}")
        return text.split(",")

    def counts(text: str) -> list[int]:
        if not all(word.isdigit() and int(word) > 0 for word in text.split(",")):
            raise argparse.ArgumentTypeError(f"{text}: wanted numbers from 1, for example 1,2")
        return [int(word) for word in text.split(",")]

    def count(text: str) -> int:
        return counts(text)[0]

    def output(text: str) -> Path:
        path = Path(text)
        if path.is_dir() or not path.resolve().parent.is_dir():
            raise argparse.ArgumentTypeError(f"{text}: cannot be written")
        return path

    parser = argparse.ArgumentParser("python -m rapt.bench", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--set", choices=ops.SETS, default="quick", help="attention alone: a few shapes, the lengths, real models'")
    what.add_argument("--models", action="store_true", help="whole models (needs transformers)")
    parser.add_argument("--quick", action="store_true", help="with --models: one layer and an eighth of the sizes")
    parser.add_argument("--dtype", type=dtypes, help="fp32, bf16, fp16, or several (default: fp32; of --models: fp32,bf16)")
    parser.add_argument("--threads", type=counts, help="for example 1,2 (default: PyTorch's number; of --models: 1, 2 and that)")
    parser.add_argument("--seeds", type=count, default=3, help="different inputs of each shape (default: %(default)s)")
    parser.add_argument("--seconds", type=float, help="time for a row's samples, paused or not (default: 0.9; of --models: 2)")
    parser.add_argument("--samples", type=count, default=5, help="least number of samples of a side (default: %(default)s)")
    parser.add_argument("--sample-ms", type=float, default=4.0, help="least time of a sample (default: %(default)s)")
    parser.add_argument("--no-math", action="store_true", help="leave out PyTorch's math backend")
    parser.add_argument("--no-memory", action="store_true", help="leave out the measurement of memory")
    parser.add_argument("--json", type=output, help="also write everything to this file")
    parser.add_argument("--svg", type=output, help="also draw a chart of attention alone into this file")
    options = parser.parse_args(words)
    if options.quick and not options.models:
        parser.error("--quick: wanted --models with it; of attention alone there is --set quick")
    if options.svg and options.models:
        parser.error("--svg: there is no chart of --models; wanted --json")
    most = torch.get_num_threads()
    options.dtype = options.dtype or (["fp32", "bf16"] if options.models else ["fp32"])
    options.threads = options.threads or (sorted({1, min(2, most), most}) if options.models else [most])
    if options.seconds is None:
        options.seconds = 2.0 if options.models else 0.9
    return options


def main(words: list[str] | None = None) -> None:
    options = parse_arguments(words)
    context = report.context_of() | {"seeds": options.seeds, "set": "whole models" if options.models else options.set}
    part: Any = ops
    if options.models:
        try:
            import transformers
        except ImportError:
            sys.exit("rapt.bench --models runs models of transformers, which is not installed: pip install 'transformers>=5.23'")
        from rapt.bench import models as part

        context["transformers"] = transformers.__version__
    print(f"rapt {context['rapt']} and torch {context['torch']} ({context['torch_cpu_capability']}) on {context['cpu']}")
    if context["load_average"] > 0.5:
        print(f"The machine is at work already (load average {context['load_average']}): times will scatter.")
    before = torch.get_num_threads()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", rapt.torch.FallbackWarning)
            rows = part.measure(options)
    finally:
        torch.set_num_threads(before)
    groups = report.groups_of(rows)
    summary: list[dict[str, Any]] = [
        {"dtype": dtype, "threads": threads} | {way: mean_of(group, ratio) for way, ratio in part.RATIOS.items()}
        for (dtype, threads), group in groups.items()
    ]
    if options.json:
        document = {"context": context, "rows": rows, "summary": summary}
        options.json.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    if options.svg:
        options.svg.write_text(_chart.svg(context, rows), encoding="utf-8")
    for line, group in zip(summary, groups.values()):
        print(f"\n{line['dtype']}, {line['threads']} thread{'s' * (line['threads'] > 1)}:\n")
        report.print_table(part.HEAD, [part.cells_of(row) for row in group])
        print()
        for way in part.RATIOS:
            print(f"{part.PEER} / rapt, {way.replace('_', ' ')}: {mean_text(line[way])}")
