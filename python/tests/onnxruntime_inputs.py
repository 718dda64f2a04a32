"""Inputs of ONNX's nodes of attention: arrays by name, outputs, and attributes. Modules that import this are skipped without
what their tests need."""

import pytest

np = pytest.importorskip("numpy")
onnxruntime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
onnx = pytest.importorskip("onnx", reason="onnx is not installed")

from onnxruntime_nodes import library  # noqa: E402

NEEDED = (1, 32)  # older CPU providers differ from ONNX's text

if tuple(int(part) for part in onnxruntime.__version__.split(".")[:2]) < NEEDED:
    pytest.skip(f"onnxruntime is {onnxruntime.__version__}, older than 1.32", allow_module_level=True)
if library() is None:
    pytest.skip("no librapt_onnxruntime.so: build with RAPT_ONNXRUNTIME, name it by RAPT_ONNXRUNTIME_LIBRARY", allow_module_level=True)


def normal(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).standard_normal(shape, dtype=np.float32)


def attention_inputs(b=2, hq=4, hk=4, sq=19, sk=19, d=32, dv=32, past=None, mask=None, lengths=None, rank=4):
    rows = {4: lambda h, s, e, seed: normal(b, h, s, e, seed=seed), 3: lambda h, s, e, seed: normal(b, s, h * e, seed=seed)}
    make, total = rows[rank], sk + (past or 0)
    inputs = {"q": make(hq, sq, d, 1), "k": make(hk, sk, d, 2), "v": make(hk, sk, dv, 3)}
    shape = {"2d": (sq, total), "3d": (hq, sq, total), "4d": (b, 1, sq, total), "full": (b, hq, sq, total)}
    if mask:
        kind, shape = mask.split("-")[0], shape[mask.split("-")[1]]
        inputs["mask"] = np.random.default_rng(5).random(shape) < 0.7 if kind == "bool" else normal(*shape, seed=5)
    else:
        inputs["mask"] = None
    inputs["past_k"] = None if past is None else normal(b, hk, past, d, seed=6)
    inputs["past_v"] = None if past is None else normal(b, hk, past, dv, seed=7)
    inputs["lengths"] = None if lengths is None else np.array(lengths, np.int64)
    heads = {} if rank == 4 else {"q_num_heads": hq, "kv_num_heads": hk}
    return inputs, ["y"] if past is None else ["y", "present_k", "present_v"], heads


def multi_head_inputs(b=2, h=4, sq=17, sk=17, d=32, dv=32, bias=False, padding=None, score_bias=None, past=None, cross=False):
    total = sk + (past or 0)
    inputs = {"query": normal(b, sq, h * d, seed=1)}
    inputs["key"] = normal(b, h, sk, d, seed=2) if cross else normal(b, sk, h * d, seed=2)
    inputs["value"] = normal(b, h, sk, dv, seed=3) if cross else normal(b, sk, h * dv, seed=3)
    inputs["bias"] = normal(2 * h * d + h * dv, seed=4) if bias else None
    shapes = {"2d": (b, total), "3d": (b, sq, total)}
    inputs["padding"] = (np.random.default_rng(5).random(shapes[padding]) < 0.7).astype(np.int32) if padding else None
    if padding:
        inputs["padding"][..., 0] = 1  # rows of padding alone: test_rows_of_padding()
    inputs["score_bias"] = normal(*score_bias(b, h), sq, total, seed=6) if score_bias else None
    inputs["past_k"] = None if past is None else normal(b, h, past, d, seed=7)
    inputs["past_v"] = None if past is None else normal(b, h, past, dv, seed=8)
    return inputs, ["y"] if past is None else ["y", "present_k", "present_v"]


def tables(rows, d, seed=9):
    angles = np.outer(np.arange(rows), 1e4 ** (-np.arange(0, d, 2) / d)) + seed
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def grouped_inputs(
    b=2, hq=4, hk=2, s=15, d=32, lengths=None, room=None, packed=False, rotary=None, bias=None, sinks=False, positions=False
):
    """`lengths`: keys of each sequence after the call (default: s, a prompt); `room`: rows of the past (None: no past)."""
    lengths = lengths or [s] * b
    total = max(lengths)
    q, k, v = normal(b, s, hq * d, seed=1), normal(b, s, hk * d, seed=2), normal(b, s, hk * d, seed=3)
    inputs = {"query": np.concatenate((q, k, v), axis=2)} if packed else {"query": q}
    inputs |= {"key": None, "value": None} if packed else {"key": k, "value": v}
    inputs["past_k"] = None if room is None else normal(b, hk, room, d, seed=4)
    inputs["past_v"] = None if room is None else normal(b, hk, room, d, seed=5)
    inputs["last_key"] = np.array(lengths, np.int32) - 1
    inputs["total"] = np.array(total, np.int32).reshape(1)
    inputs["cos"], inputs["sin"] = tables(512, rotary) if rotary else (None, None)
    first = np.array(lengths)[:, None] - s if s != total else np.zeros((b, 1), int)
    inputs["positions"] = (first + np.arange(s) + 7).astype(np.int64) if positions else None
    inputs["bias"] = normal(*bias, s, total, seed=6) if bias else None
    inputs["sinks"] = normal(hq, seed=7) if sinks else None
    return inputs, ["y", "present_k", "present_v"]


def linear_inputs(rule, b=2, t=21, hq=4, hk=2, d=32, dv=48, channels=False, shared=False, past=True):
    inputs = {"query": normal(b, t, hq * d, seed=1), "key": normal(b, t, hk * d, seed=2), "value": normal(b, t, hk * dv, seed=3)}
    inputs["key"] /= d**0.5
    inputs["past_state"] = normal(b, hk, d, dv, seed=4) if past else None
    inputs["decay"] = -abs(normal(b, t, hk * d if channels else hk, seed=5)) if "gated" in rule else None
    inputs["beta"] = 1 / (1 + np.exp(normal(b, t, 1 if shared else hk, seed=6))) if "delta" in rule else None
    return inputs, {"update_rule": rule, "q_num_heads": hq, "kv_num_heads": hk}
