#!/usr/bin/env python3
"""rapt's CUDA entries against every backend of torch.nn.functional.scaled_dot_product_attention, in one process.

    bench/compare_torch_cuda.py --library build/release/librapt.so --entry attention_simt.f32.cuda.q64k64 --json table.json

Needs a GPU and PyTorch 2.11 or newer. Prints Markdown. All sides take samples in turn, A B C A B C ...; a sample is 20
calls between two events, after two that are not counted. `ratio` is the time of torch's fastest backend over rapt's:
above 1, rapt is faster. Errors are ||out - exact|| / ||exact|| over some rows, `exact` in float64 on the same inputs.
"""

import argparse
import datetime
import itertools
import json
import math
import statistics
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from rapt_ctypes import Rapt

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
BACKENDS = {"math": SDPBackend.MATH, "efficient": SDPBackend.EFFICIENT_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION,
            "cudnn": SDPBackend.CUDNN_ATTENTION}
BATCH_AND_HEADS = {1024: (8, 16), 4096: (2, 16), 16384: (1, 8)}
MATH_BYTES = 8 << 30  # the largest S x S matrix that torch's math backend is asked for
CHECKED_ROWS = 256
CALLS = 20  # in a sample


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words = lambda kind: lambda text: [kind(word) for word in text.split(",")]
    parser.add_argument("--library", default="build/release/librapt.so", help="default: %(default)s")
    parser.add_argument("--entry", help="the one entry of rapt to use; default: what dispatch chooses")
    parser.add_argument("--dtype", type=words(str), default=list(DTYPES), help="for example f32,bf16,f16")
    parser.add_argument("--lengths", type=words(int), default=list(BATCH_AND_HEADS), help="for example 1024,4096")
    parser.add_argument("--dims", type=words(int), default=[64, 128])
    parser.add_argument("--masks", type=words(str), default=["full", "causal"])
    parser.add_argument("--backends", type=words(str), default=list(BACKENDS))
    parser.add_argument("--samples", type=int, default=11)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    return parser.parse_args()


def exact_rows(q, k, v, causal, rows):
    """Output rows in float64, head by head."""
    result = []
    for head in itertools.product(*map(range, q.shape[:2])):
        scores = q[head][rows].double() @ k[head].double().T / math.sqrt(q.shape[-1])
        if causal:
            scores.masked_fill_(torch.arange(k.shape[2], device=q.device) > rows[:, None], -math.inf)
        result.append(torch.softmax(scores, -1) @ v[head].double())
    return torch.stack(result).view(*q.shape[:2], len(rows), -1)


def milliseconds(call):
    """Of one call, among as many that starting them does not count."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(CALLS):
        call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / CALLS


def run_case(rapt, dtype, s, d, causal, options):
    torch.manual_seed(options.seed)
    b, h = BATCH_AND_HEADS.get(s, (1, 16))
    q, k, v = [torch.randn((b, h, s, d), device="cuda", dtype=DTYPES[dtype]) for _ in range(3)]
    out = torch.full_like(q, math.nan)
    args = rapt.attention_args(q, k, v, out, causal)
    rows = torch.randperm(s, device="cuda")[:CHECKED_ROWS]
    exact = exact_rows(q, k, v, causal, rows)
    error = lambda x: float((x[:, :, rows].double() - exact).norm() / exact.norm())
    sides, errors = {}, {}

    def run_rapt():
        rapt.attention(args)
        return out

    def run_torch(backend):
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

    sides["rapt"] = run_rapt
    for name in options.backends:
        if name == "math" and b * h * s * s * q.element_size() > MATH_BYTES:
            continue
        sides[name] = lambda backend=BACKENDS[name]: run_torch(backend)
    for name, call in list(sides.items()):
        try:
            errors[name] = error(call())
        except RuntimeError:
            if name == "rapt":
                raise
            del sides[name]  # this backend does not take the problem
    first = out.clone()
    samples = {name: [] for name in sides}
    for name, call in itertools.chain.from_iterable(itertools.repeat(list(sides.items()), options.samples + 2)):
        samples[name].append(milliseconds(call))
    flops = 4 * b * h * d * (s * (s + 1) // 2 if causal else s * s)
    ms = {name: statistics.median(own[2:]) for name, own in samples.items()}
    peers = {name: time for name, time in ms.items() if name != "rapt"}
    if not peers:
        raise SystemExit(f"none of torch's {', '.join(options.backends)} takes {dtype}, d={d}")
    best = min(peers, key=peers.get)
    return {"entry": rapt.chosen(args)[0], "dtype": dtype, "b": b, "h": h, "s": s, "d": d, "causal": causal, "ms": ms,
            "tflops": {name: flops / time / 1e9 for name, time in ms.items()}, "errors": errors, "best": best,
            "ratio": ms[best] / ms["rapt"], "repeatable": torch.equal(first, out)}


def main():
    options = parse_arguments()
    if not torch.cuda.is_available():
        raise SystemExit("no CUDA device")
    torch.backends.cuda.matmul.allow_tf32 = False
    rapt = Rapt(str(Path(options.library).resolve()), stream=torch.cuda.current_stream().cuda_stream,
                kernel=options.entry)
    print(f"rapt {rapt.version} and torch {torch.__version__} on {torch.cuda.get_device_name()}, "
          f"{datetime.date.today()}\n")
    titles = ["type", "S", "d", "mask", "entry", "rapt TF/s", *(f"{name} TF/s" for name in options.backends), "ratio",
              "error rapt / best", "same bits"]
    print(f"| {' | '.join(titles)} |\n|{'---|' * len(titles)}", flush=True)
    table = []
    for dtype, d, s, mask in itertools.product(options.dtype, options.dims, options.lengths, options.masks):
        row = run_case(rapt, dtype, s, d, mask == "causal", options)
        table.append(row)
        cells = [dtype, s, d, mask, row["entry"],
                 *(f"{row['tflops'][name]:.1f}" if name in row["tflops"] else "-" for name in ("rapt", *options.backends)),
                 f"**{row['ratio']:.2f}** ({row['best']})", f"{row['errors']['rapt']:.1e} / {row['errors'][row['best']]:.1e}",
                 "yes" if row["repeatable"] else "NO"]
        print(f"| {' | '.join(map(str, cells))} |", flush=True)
    if options.json:
        options.json.write_text(json.dumps({"device": torch.cuda.get_device_name(), "torch": torch.__version__,
                                            "date": str(datetime.date.today()), "rows": table}, indent=2) + "\n")


if __name__ == "__main__":
    main()
