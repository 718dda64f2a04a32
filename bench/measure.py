#!/usr/bin/env python3
"""Measures what the pages of bench/report.py show, on this machine, into bench/results/<date>/<machine>-*.json.

    bench/measure.py --rapt build/release/rapt --python build/venv/bin/python
    bench/measure.py --rapt ./rapt --python python3 --out /tmp/results --only roofline,attention

Needs Python 3.8 and nothing else, so it can be carried to another machine with a build of the rapt command. Comparisons with
PyTorch are made where the Python that is given can import rapt and PyTorch. A file appears when its figures are complete and
replaces one of that name; an interrupted run leaves the others as they were. Nothing else should run on the machine meanwhile.
"""

import argparse
import datetime
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

BRANDS = ("xeon", "epyc", "ryzen", "threadripper", "core", "neoverse", "graviton", "altra")
PRIVATE = ("host_name",)  # fields that files leave out
OVERRIDES = ("RAPT_GUARDS", "RAPT_ISA", "RAPT_KERNEL")  # environment variables that change what rapt does by default
BF16_UNITS = {"amx_bf16", "avx512_bf16", "bf16"}


class Step:
    """One command, its arguments, and the file that it fills. `program`: "rapt", "torch" or "transformers", which it needs."""

    def __init__(self, name, program, file, arguments, default=True, quick=True):
        self.name, self.program, self.file, self.arguments = name, program, file, arguments
        self.default, self.quick = default, quick


def steps(threads, quick, bf16):
    """In the order in which they run: what docs/report needs first. `bf16`: the CPU has products of bf16, without which PyTorch
    takes minutes for a forward in it."""
    counts = ",".join(str(count) for count in sorted({1, threads}))
    types = "f32,bf16,f16" if bf16 else "f32"
    seeds, seconds = ("2", "0.05") if quick else ("5", "0.3")
    sampling = "--no-math --no-memory --seeds 2 --samples 3".split()
    duration = ["--seconds", "0.1" if quick else "0.3"]
    model = f"--models --threads {threads} --samples 3 --seconds {0.3 if quick else 0.7}".split()
    result = []
    for count in sorted({1, threads}, reverse=True):
        result.append(Step("roofline", "rapt", f"roofline-{count}-threads",
                           ["roofline", "--set", "fusion", "--threads", str(count), "--seeds", seeds, "--min-time", seconds]))
    result.append(Step("decode", "rapt", f"decode-{threads}-threads",
                       ["bench", "--set", "decode", "--threads", str(threads), "--min-time", "0.1" if quick else "0.5"]))
    result.append(Step("attention", "torch", f"attention-{threads}-threads",
                       ["--set", "models", "--dtype", types, "--threads", str(threads), *sampling, *duration]))
    result.append(Step("models", "transformers", f"models-{threads}-threads",
                       [*model, "--dtype", "f32,bf16" if bf16 else "f32"], quick=False))
    result.append(Step("lengths", "torch", "lengths", ["--set", "paper", "--dtype", "f32", "--threads", counts, *sampling, *duration], quick=False))
    if bf16:
        result.append(Step("halves", "torch", "halves", ["--set", "halves", "--threads", counts, *sampling, *duration], quick=False))
    result.append(Step("decode-torch", "torch", "decode-torch",
                       ["--set", "decode", "--dtype", types, "--threads", str(threads), *sampling, *duration], quick=False))
    for dtype in ["f32", "bf16"] if bf16 else ["f32"]:
        result.append(Step("training", "transformers", f"training-{dtype}-{threads}-threads", [*model, "--train", "--dtype", dtype],
                           default=False, quick=False))
    return result


def machine_name(cpu, cpus):
    """"AMD EPYC" with 2 CPUs is epyc2."""
    words = re.findall(r"[a-z]+", re.sub(r"\((r|tm)\)", " ", cpu.lower()))
    known = [word for word in words if word in BRANDS]
    others = [word for word in words if word not in ("intel", "amd", "arm", "cpu", "processor")]
    return f"{(known or others or ['cpu'])[0]}{cpus}"


def run(command, **options):
    return subprocess.run([str(word) for word in command], check=False, **options)


def fields_of(rapt):
    """What the rapt command says of the machine and of its own build."""
    described = run([rapt, "info", "--json"], capture_output=True, text=True)
    if described.returncode != 0:
        raise OSError(described.returncode, described.stderr.strip())
    return json.loads(described.stdout)["context"]


def can_import(python, module):
    return python is not None and run([python, "-c", f"import {module}"], capture_output=True).returncode == 0


def write(path, document):
    """Puts the document in place when it is complete, with a line for each row of its lists."""
    def text_of(value):
        return "[\n " + ",\n ".join(map(json.dumps, value)) + "\n]" if isinstance(value, list) and value else json.dumps(value)

    partial = path.with_name(f".{path.name}.partial")
    try:
        members = ",\n".join(f"{json.dumps(key)}: {text_of(value)}" for key, value in document.items())
        partial.write_text(f"{{\n{members}\n}}\n", encoding="utf-8")
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def run_into(command, path, build):
    """Runs a command that writes JSON; if it succeeds, its document is what the path has."""
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder, path.name)
        code = run([*command, "--json", made]).returncode
        if code != 0:
            return f"exit code {code}"
        document = json.loads(made.read_text(encoding="utf-8"))
    context = {key: value for key, value in {**build, **document["context"]}.items() if key not in PRIVATE}
    write(path, {**document, "context": {**context, "command": " ".join([Path(command[0]).name, *command[1:]])}})
    return ""


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    root = Path(__file__).resolve().parents[1]
    parser.add_argument("--rapt", type=Path, default=root / "build/release/rapt", help="the rapt command (default: %(default)s)")
    parser.add_argument("--python", help="a Python that has rapt, of the same build, and PyTorch (default: no comparisons with PyTorch)")
    parser.add_argument("--out", type=Path, default=root / "bench/results", help="folder of the days' folders (default: %(default)s)")
    parser.add_argument("--machine", help="how the files' names begin (default: of CPU and number of CPUs, such as epyc2)")
    parser.add_argument("--threads", type=int, help="the larger number of threads (default: all)")
    parser.add_argument("--only", help="some of roofline,decode,attention,models,lengths,halves,decode-torch,training "
                        "(default: all but training)")
    parser.add_argument("--minutes", type=float, help="begin nothing new after so long")
    parser.add_argument("--quick", action="store_true", help="a few minutes: less of it, shorter and with more scatter")
    options = parser.parse_args()
    if options.machine is not None and not re.fullmatch(r"[a-z0-9_.]+", options.machine):
        parser.error(f"--machine: {options.machine!r}; wanted small letters, digits, _ and .")
    if options.threads is not None and options.threads < 1:
        parser.error(f"--threads: {options.threads}; wanted 1 or more")
    for name in OVERRIDES:
        if os.environ.get(name):
            parser.error(f"{name}: {os.environ[name]!r}; wanted an environment without it")
    return parser, options


def main():
    parser, options = parse_arguments()
    start = time.monotonic()
    try:
        fields = fields_of(options.rapt)
    except OSError as error:
        parser.error(f"--rapt: {options.rapt}: {error.strerror}; wanted the rapt command")
    build = {key: fields[key] for key in ("commit", "compiler", "features", "caches")}
    threads = options.threads or len(os.sched_getaffinity(0))
    everything = steps(threads, options.quick, bool(BF16_UNITS & set(build["features"])))
    wanted = options.only.split(",") if options.only else None
    names = {step.name for step in everything}
    for name in wanted or []:
        if name not in names:  # halves among them, where the CPU has no products of bf16
            parser.error(f"--only: {name}; wanted some of {','.join(dict.fromkeys(step.name for step in everything))}")
    chosen = [step for step in everything
              if (step.name in wanted if wanted else step.default and (step.quick or not options.quick))]
    available = {"rapt": True, "torch": can_import(options.python, "rapt.bench")}
    available["transformers"] = available["torch"] and can_import(options.python, "transformers")
    name = options.machine or machine_name(fields["cpu"], fields["num_cpus"])
    folder = options.out / datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    folder.mkdir(parents=True, exist_ok=True)
    failed = []
    for number, step in enumerate(chosen, 1):
        path = folder / f"{name}-{step.file}.json"
        title = f"[{number}/{len(chosen)}, {time.monotonic() - start:.0f} s] {path.name}"
        if not available[step.program]:
            print(f"{title}: left out, {'no --python with ' + ('rapt and PyTorch' if step.program == 'torch' else 'transformers')}")
            continue
        if options.minutes is not None and time.monotonic() - start > 60 * options.minutes:
            print(f"{title}: left out, the {options.minutes:g} minutes are over")
            continue
        print(title, flush=True)
        command = [str(options.rapt)] if step.program == "rapt" else [options.python, "-m", "rapt.bench"]
        problem = run_into([*command, *step.arguments], path, build)
        if problem:
            print(f"{path.name}: {problem}; not written", file=sys.stderr)
            failed.append(path.name)
    print(f"{time.monotonic() - start:.0f} s; {folder}")
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


def interrupt(*_):
    raise KeyboardInterrupt


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, interrupt)  # as by Ctrl-C: the command that runs ends, too
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("interrupted; what was complete is in place")
