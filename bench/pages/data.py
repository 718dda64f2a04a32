"""The data of the pages: which files of bench/results hold them, and their rows in one form, whoever wrote them."""

import csv
import json
import math
from pathlib import Path

RESULTS = Path(__file__).resolve().parents[1] / "results"
XEON = "16-core Intel Xeon with AVX-512 and AMX"
LONG_NAME = {"f32": "fp32", "f16": "fp16", "bf16": "bf16"}

# The files of a kind of figures in the folder of a day. The newest day that has one counts, and of its files the first named:
# so a new run shows up by itself, and figures that only an older day has stay. JSON is what bench/measure.py writes.
KINDS = {
    "models": ["xeon16-models-16-threads.json"],
    "models_1": ["xeon16-models-1-threads.json"],
    "models_2": ["xeon16-models-2-threads.json"],
    "training_bf16": ["xeon16-training-bf16-16-threads.json"],
    "training_f32": ["xeon16-training-f32-16-threads.json"],
    "generation": ["xeon16-generate-16-threads.json"],
    "shapes": ["xeon16-attention-16-threads.json"],
    "lengths": ["xeon16-lengths.json", "xeon16-attention-f32.csv"],
    "halves": ["xeon16-halves.json", "xeon16-attention-16bit.csv"],
    "zen4": ["epyc2-attention-bf16.csv"],
    "decode": ["xeon16-decode-16-threads.json", "xeon16-decode.csv"],
    "decode_torch": ["xeon16-decode-torch.json", "xeon16-decode-torch.csv"],
    "gpu": ["h200-attention.csv"],
}


def newest(names, results=RESULTS):
    """The file that counts, or None."""
    for day in sorted((folder for folder in results.iterdir() if folder.is_dir()), reverse=True):
        for name in names:
            if (day / name).is_file():
                return day / name
    return None


def newest_of(pattern, results=RESULTS):
    """{name: file} of all whose name matches, each from the newest day that has it."""
    return {path.name: path for path in sorted(results.glob(f"*/{pattern}"), key=lambda path: path.parent.name)}


def read_json(path):
    return json.loads(path.read_text(encoding="utf-8"))


def compared(row):
    """A row of `python -m rapt.bench --set`, as the CSV files have it. The ratio is that of paused samples."""
    return {"dtype": row["dtype"], "threads": str(row["threads"]), "b": str(row["b"]), "h": str(row["hq"]), "s": str(row["sq"]),
            "d": str(row["d"]), "mask": "causal" if row["causal"] else "full", "keys": str(row["sk"]),
            "rapt_ms": f"{row['rapt']['median_ms']:.3g}", "torch_ms": f"{row['torch']['median_ms']:.3g}",
            "ratio": f"{row['vs_torch']:.2f}", "rapt_error": str(row["rapt"]["rel_err"]), "torch_error": str(row["torch"]["rel_err"]),
            "gbs": f"{row['rapt'].get('gbs', math.nan):.3g}", "gqa_ratio": f"{row['vs_torch']:.2f}",
            "folded_ratio": f"{row['vs_folded']:.2f}" if "vs_folded" in row else "", "noisy": "vs_torch" in row["noisy"]}


def timed(row):
    """A row of `rapt bench --set decode`, as the CSV file has it; None for operations other than attention."""
    if row.get("error_occurred") or not row["problem"].startswith("attention "):
        return None
    q, *others = row["dtype"].split("/")
    common = f"b=1 hq=32 hk=8 sq=1 sk=32768 d=128 dtype={q}".split()
    words = [word for word in row["name"].split("/")[-2].split() if word not in common]
    words = [word for word in words if not word.startswith(("q=", "kv=", "out=", "dtype="))]
    types = " / ".join([q] + [other for other in others if other != q])
    share = row["of_bandwidth"]
    return {"case": ", ".join([types, *[" ".join(words)] * bool(words)]), "ms": f"{row['median_ms']:.3g}", "gbs": f"{row['gbs']:.3g}",
            "percent_of_read": "" if share is None else f"{100 * share:.0f}"}


def rows_of(path, kind):
    """Of a CSV file its rows, and of a JSON file that stands for one likewise; else the document, with types by their long names."""
    if path.suffix == ".csv":
        return list(csv.DictReader(path.read_text(encoding="utf-8").splitlines()))
    document = read_json(path)
    if kind == "decode":
        return [row for row in map(timed, document["benchmarks"]) if row]
    if kind in ("lengths", "halves", "decode_torch"):
        return [compared(row) for row in document["rows"]]
    for row in document["rows"]:
        row["dtype"] = LONG_NAME.get(row["dtype"], row["dtype"])
    return document


class Data(dict):
    """The rows of every kind; `path` and `day` say where they come from."""

    def __init__(self, results=RESULTS):
        super().__init__()
        self.path = {kind: newest(names, results) for kind, names in KINDS.items()}
        self.day = {kind: path.parent.name for kind, path in self.path.items()}
        for kind, path in self.path.items():
            self[kind] = rows_of(path, kind)
        others = {name: path for name, path in newest_of("*-halves.json", results).items() if name not in KINDS["halves"]}
        self.other_halves = {machine_text(read_json(path)["context"]): rows_of(path, "halves") for path in others.values()}


def machine_text(context):
    """A CPU and its best instruction set, of a file that python -m rapt.bench wrote."""
    return f"{context['cpu']}, {context['isas'][0]}"


def geomean(values):
    values = list(values)
    return math.exp(sum(math.log(value) for value in values) / len(values))


def table(head, rows):
    return "\n".join(["| " + " | ".join(head) + " |", "|" + "---|" * len(head)] + ["| " + " | ".join(row) + " |" for row in rows])
