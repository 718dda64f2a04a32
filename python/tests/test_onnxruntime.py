"""The execution provider for ONNX Runtime (docs/guide/python/onnxruntime.md) against ONNX Runtime's CPU provider."""

import itertools
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

np = pytest.importorskip("numpy")
onnxruntime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
onnx = pytest.importorskip("onnx", reason="onnx is not installed")

import onnxruntime_decoder  # noqa: E402
import onnxruntime_nodes as nodes  # noqa: E402
from onnxruntime_nodes import assert_close, both, claimed, model, run, session  # noqa: E402

NEEDED = (1, 32)  # older CPU providers differ from ONNX's text

if tuple(int(part) for part in onnxruntime.__version__.split(".")[:2]) < NEEDED:
    pytest.skip(f"onnxruntime is {onnxruntime.__version__}, older than 1.32", allow_module_level=True)
if nodes.library() is None:
    pytest.skip("no librapt_onnxruntime.so: build with RAPT_ONNXRUNTIME, name it by RAPT_ONNXRUNTIME_LIBRARY", allow_module_level=True)

DTYPES = ["fp32", "fp16", "bf16"]


def normal(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).standard_normal(shape, dtype=np.float32)


# -- Attention ---------------------------------------------------------------------------------------------------------


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


ATTENTION = {
    "self": {},
    "one-token": dict(sq=1, sk=1),
    "grouped": dict(hk=2),
    "multi-query": dict(hk=1, d=80, dv=80),
    "cross": dict(sk=45),
    "values-narrower": dict(dv=16),
    "values-wider": dict(dv=48, hk=2),
    "long": dict(b=1, sq=300, sk=300, hq=8, hk=2, d=64, dv=64),
    "past": dict(past=33, hk=2),
    "decode": dict(sq=1, sk=1, past=200, hk=2, d=64, dv=64),
    "empty-past": dict(past=0),
}
MASKS = [None, "bool-2d", "bool-4d", "float-3d", "float-full"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rank", [3, 4])
@pytest.mark.parametrize("case", ATTENTION)
def test_attention(case, rank, dtype):
    for mask, causal in itertools.product(MASKS, (0, 1)):
        inputs, outputs, heads = attention_inputs(**ATTENTION[case], rank=rank, mask=mask)
        ours, theirs = both("Attention", inputs, outputs, heads | {"is_causal": causal}, dtype)
        for one, other in zip(ours, theirs):
            assert_close(one, other, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("opset", [23, 24])
@pytest.mark.parametrize("attributes", [{"scale": 0.3}, {"softcap": 2.0}, {"scale": 0.2, "softcap": 1.5, "is_causal": 1}])
def test_attention_scores(attributes, opset, dtype):
    inputs, outputs, _ = attention_inputs(hk=2, past=21, mask="float-4d")
    ours, theirs = both("Attention", inputs, outputs, attributes, dtype, opset)
    assert_close(ours[0], theirs[0], dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("causal", [0, 1])
@pytest.mark.parametrize("sq", [1, 8, 19])
def test_attention_lengths(sq, causal, dtype):
    for mask in (None, "bool-2d", "float-full"):
        inputs, outputs, _ = attention_inputs(b=3, hk=2, sq=sq, sk=40, lengths=[40, 23, 11], mask=mask)
        ours, theirs = both("Attention", inputs, outputs, {"is_causal": causal}, dtype)
        assert_close(ours[0], theirs[0], dtype)


def test_rows_without_keys_are_zero():
    inputs, outputs, _ = attention_inputs(mask="bool-2d")
    inputs["mask"][3] = False
    ours, theirs = both("Attention", inputs, outputs, {})
    assert (ours[0][:, :, 3] == 0).all()
    assert_close(ours[0], theirs[0], "fp32")


def node_tests():
    """ONNX's own tests of these operators."""
    import warnings

    from onnx.backend.test import loader

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {
            test.name: test
            for test in loader.load_model_tests(kind="node")
            if test.name.startswith(("test_attention", "test_linear_attention")) and "expanded" not in test.name
        }


NODE_TESTS = node_tests()


@pytest.mark.parametrize("name", NODE_TESTS)
def test_onnx_node(name):
    test = NODE_TESTS[name]
    node = test.model.graph.node[0]
    ours = session(test.model)
    half_states = node.op_type == "LinearAttention" and test.model.graph.output[1].type.tensor_type.elem_type == onnx.TensorProto.FLOAT16
    scores = node.op_type == "Attention" and len(node.output) > 3 and node.output[3]
    if scores or half_states:  # the CPU provider's part
        assert claimed(ours) == []
        return
    assert claimed(ours) == [node.op_type]
    for given, expected in test.data_sets:
        names = [i.name for i in test.model.graph.input]
        for result, wanted in zip(run(ours, dict(zip(names, given))), expected):
            dtype = {"bfloat16": "bf16", "float16": "fp16"}.get(wanted.dtype.name, "fp32")
            np.testing.assert_allclose(result, wanted.astype(np.float32), rtol=1e-3, atol=nodes.TOLERANCE[dtype])


# -- MultiHeadAttention ------------------------------------------------------------------------------------------------


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


MULTI_HEAD = {
    "self": {},
    "cross": dict(sk=50),
    "cross-4d": dict(sk=50, cross=True),
    "cross-4d-bias": dict(sk=50, cross=True, bias=True),
    "values-narrower": dict(dv=16),
    "bias": dict(bias=True),
    "bias-past": dict(bias=True, past=9),
    "past": dict(past=30),
    "decode": dict(past=200, sq=1, sk=1, d=64, dv=64),
    "empty-past": dict(past=0),
    "padding-2d": dict(padding="2d"),
    "padding-3d": dict(padding="3d"),
    "padding-past": dict(padding="2d", past=12),
    "score-bias": dict(score_bias=lambda b, h: (b, h)),
    "score-bias-broadcast": dict(score_bias=lambda b, h: (1, 1), past=5),
    "long": dict(b=1, h=12, sq=512, sk=512),
}


def multi_head_cases():
    for case, causal, dtype in itertools.product(MULTI_HEAD, (0, 1), DTYPES):
        if causal and "cross" in case:
            continue  # the CPU provider lets the last query see all keys
        if "bias" in MULTI_HEAD[case] and dtype != "fp32":
            continue  # test_left()
        yield case, causal, dtype


@pytest.mark.parametrize("case, causal, dtype", list(multi_head_cases()))
def test_multi_head(case, causal, dtype):
    inputs, outputs = multi_head_inputs(**MULTI_HEAD[case])
    attributes = {"num_heads": 4 if case != "long" else 12, "unidirectional": causal}
    ours, theirs = both("MultiHeadAttention", inputs, outputs, attributes, dtype)
    for one, other in zip(ours, theirs):
        assert_close(one, other, dtype)


@pytest.mark.parametrize("attributes", [{"scale": 0.4}, {"mask_filter_value": -3.0}, {"mask_filter_value": -1e30}])
def test_multi_head_attributes(attributes):
    inputs, outputs = multi_head_inputs(padding="2d")
    ours, theirs = both("MultiHeadAttention", inputs, outputs, attributes | {"num_heads": 4})
    assert_close(ours[0], theirs[0], "fp32")


@pytest.mark.parametrize("value, digits_lost", [(-3.0, 1), (-10000.0, 1000)])
def test_rows_of_padding(value, digits_lost):
    """A sequence of padding alone attends to all its keys: mask_filter_value is added to all scores."""
    inputs, outputs = multi_head_inputs(padding="2d")
    inputs["padding"][1] = 0
    ours, theirs = both("MultiHeadAttention", inputs, outputs, {"num_heads": 4, "mask_filter_value": value})
    np.testing.assert_allclose(ours[0], theirs[0], rtol=0, atol=digits_lost * nodes.TOLERANCE["fp32"])


@pytest.mark.parametrize("dtype", DTYPES)
def test_multi_head_packed(dtype):
    """Packed inputs, which the CPU provider lacks, against the same node with its inputs apart."""
    inputs, outputs = multi_head_inputs()
    apart = session(model("MultiHeadAttention", inputs, outputs, {"num_heads": 4}, dtype))
    narrow = {name: nodes.cast(a, dtype)[0] if a is not None else None for name, a in inputs.items()}
    expected = run(apart, narrow)[0]
    q, k, v = (inputs[name].reshape(2, 17, 4, 32) for name in ("query", "key", "value"))
    for packed in (
        {"query": np.stack((q, k, v), axis=3)},
        {"query": inputs["query"], "key": np.stack((k, v), axis=3)},
    ):
        ours = session(model("MultiHeadAttention", packed, outputs, {"num_heads": 4}, dtype))
        assert claimed(ours) == ["MultiHeadAttention"]
        assert (run(ours, {name: nodes.cast(a, dtype)[0] for name, a in packed.items()})[0] == expected).all()


# -- GroupQueryAttention -----------------------------------------------------------------------------------------------


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


GROUPED = {
    "prompt": {},
    "prompt-packed": dict(packed=True),
    "prompt-long": dict(b=1, s=400, hq=8, d=64),
    "prompt-lengths": dict(b=3, s=20, lengths=[20, 13, 1]),
    "prompt-room": dict(room=64),
    "decode": dict(s=1, lengths=[101, 101], room=100),
    "decode-lengths": dict(b=3, s=1, lengths=[101, 57, 1], room=128),
    "decode-packed": dict(s=1, lengths=[90, 60], room=128, packed=True, rotary=32),
    "continued": dict(b=1, s=9, lengths=[50], room=41),
    "continued-room": dict(b=1, s=9, lengths=[50], room=80),
    "rotary": dict(rotary=32),
    "rotary-partial": dict(rotary=16),
    "rotary-decode": dict(s=1, lengths=[101, 77], room=128, rotary=32),
    "rotary-continued": dict(b=1, s=9, lengths=[50], room=80, rotary=32),
    "rotary-positions": dict(b=1, s=9, lengths=[50], room=80, rotary=32, positions=True),
    "rotary-prompt-positions": dict(rotary=32, positions=True),
    "bias": dict(bias=(2, 4)),
    "bias-decode": dict(s=1, lengths=[101, 101], room=128, bias=(1, 1)),
    "sinks": dict(sinks=True),
    "sinks-decode": dict(s=1, lengths=[101, 77], room=128, sinks=True),
}
GROUPED_ATTRIBUTES = {
    "plain": {},
    "window": {"local_window_size": 6},
    "softcap": {"softcap": 2.0, "scale": 0.3},
    "all-keys": {"causal": 0},
    "smooth": {"smooth_softmax": 1},
    "interleaved": {"rotary_interleaved": 1},
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("attributes", GROUPED_ATTRIBUTES)
@pytest.mark.parametrize("case", GROUPED)
def test_grouped(case, attributes, dtype):
    options = GROUPED[case]
    inputs, outputs = grouped_inputs(**options)
    named = GROUPED_ATTRIBUTES[attributes] | {"num_heads": options.get("hq", 4), "kv_num_heads": 2}
    named["do_rotary"] = int("rotary" in options)
    ours, theirs = both("GroupQueryAttention", inputs, outputs, named, dtype)
    s, lengths = options.get("s", 15), inputs["last_key"] + 1
    for i, length in enumerate(lengths):
        rows = min(s, length)  # others are padding
        assert_close(ours[0][i, :rows], theirs[0][i, :rows], dtype)
    for one, other in zip(ours[1:], theirs[1:]):
        assert_close(one, other, dtype, scale=2)


def test_grouped_with_all_keys_in_the_cache():
    """No new keys: the layer reads another layer's cache."""
    inputs, outputs = grouped_inputs(s=1, lengths=[60, 44], room=64, rotary=32)
    inputs["key"], inputs["value"] = (np.zeros((2, 0, 64), np.float32) for _ in range(2))
    named = {"num_heads": 4, "kv_num_heads": 2, "do_rotary": 1}
    ours, theirs = both("GroupQueryAttention", inputs, outputs, named)
    assert_close(ours[0], theirs[0], "fp32")


@pytest.mark.parametrize("given", [True, False])
def test_grouped_norms(given):
    """RMS norms before the rotation, which the CPU provider lacks, against norms by hand."""
    inputs, outputs = grouped_inputs(s=1, lengths=[101, 77], room=128, rotary=32)
    weights = {"q_norm": normal(32, seed=11), "k_norm": normal(32, seed=12)}
    named = {"num_heads": 4, "kv_num_heads": 2, "do_rotary": 1}

    def norm(rows, weight):
        heads = rows.reshape(2, 1, -1, 32).astype(np.float64)
        return (heads / np.sqrt((heads**2).mean(-1, keepdims=True) + 1e-6) * weight).astype(np.float32).reshape(rows.shape)

    by_hand = inputs | {"query": norm(inputs["query"], weights["q_norm"]), "key": norm(inputs["key"], weights["k_norm"])}
    expected = run(session(model("GroupQueryAttention", by_hand, outputs, named), rapt=False), by_hand)
    fused = inputs | {"k_scale": None, "v_scale": None} | weights if given else by_hand
    ours = session(model("GroupQueryAttention", fused, outputs, named))
    assert claimed(ours) == ["GroupQueryAttention"]
    for one, other in zip(run(ours, fused), expected):
        assert_close(one, other, "fp32", scale=2)


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_grouped_in_place(dtype):
    """past and present bound to one buffer: other rows keep their bits."""
    inputs, outputs = grouped_inputs(s=1, lengths=[101, 77], room=128, rotary=32)
    named = {"num_heads": 4, "kv_num_heads": 2, "do_rotary": 1}
    narrow = {n: nodes.cast(a, dtype)[0] if a is not None and a.dtype == np.float32 else a for n, a in inputs.items()}
    ours = session(model("GroupQueryAttention", inputs, outputs, named, dtype))
    apart = ours.run(None, {name: a for name, a in narrow.items() if a is not None})
    values = {n: onnxruntime.OrtValue.ortvalue_from_numpy(a.copy()) for n, a in narrow.items() if a is not None}
    binding = ours.io_binding()
    for name, value in values.items():
        binding.bind_ortvalue_input(name, value)
    binding.bind_output("y")
    binding.bind_ortvalue_output("present_k", values["past_k"])
    binding.bind_ortvalue_output("present_v", values["past_v"])
    ours.run_with_iobinding(binding)
    assert (binding.copy_outputs_to_cpu()[0] == apart[0]).all()
    for i, length in enumerate((101, 77)):
        for name, present in (("past_k", apart[1]), ("past_v", apart[2])):
            now = values[name].numpy()
            assert (now[i, :, :length] == present[i, :, :length]).all()
            assert (now[i, :, length:] == narrow[name][i, :, length:]).all()


# -- LinearAttention ---------------------------------------------------------------------------------------------------


def linear_inputs(rule, b=2, t=21, hq=4, hk=2, d=32, dv=48, channels=False, shared=False, past=True):
    inputs = {"query": normal(b, t, hq * d, seed=1), "key": normal(b, t, hk * d, seed=2), "value": normal(b, t, hk * dv, seed=3)}
    inputs["key"] /= d**0.5
    inputs["past_state"] = normal(b, hk, d, dv, seed=4) if past else None
    inputs["decay"] = -abs(normal(b, t, hk * d if channels else hk, seed=5)) if "gated" in rule else None
    inputs["beta"] = 1 / (1 + np.exp(normal(b, t, 1 if shared else hk, seed=6))) if "delta" in rule else None
    return inputs, {"update_rule": rule, "q_num_heads": hq, "kv_num_heads": hk}


RULES = ["linear", "gated", "delta", "gated_delta"]
LINEAR = {
    "prompt": {},
    "token": dict(t=1),
    "no-past": dict(past=False),
    "channels": dict(channels=True),
    "one-rate": dict(shared=True),
    "long": dict(b=1, t=300, hq=2, d=64, dv=64),
}


LINEAR_TYPES = [(case, dtype) for case in LINEAR for dtype in DTYPES if LINEAR[case].get("past", True) or dtype == "fp32"]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("case, dtype", LINEAR_TYPES)
def test_linear(case, dtype, rule):
    inputs, attributes = linear_inputs(rule, **LINEAR[case])
    ours, theirs = both(
        "LinearAttention", inputs, ["y", "present_state"], attributes, dtype, known=("query", "key", "value")
    )
    for one, other in zip(ours, theirs):  # sums over tokens grow
        np.testing.assert_allclose(one, other, rtol=0, atol=4 * nodes.TOLERANCE[dtype] * max(1, abs(other).max()))


# -- claims ------------------------------------------------------------------------------------------------------------


def left_nodes():
    inputs, outputs, _ = attention_inputs()
    yield "scores", ("Attention", inputs, ["y", "", "", "scores"], {})
    yield "softmax-precision", ("Attention", inputs, outputs, {"softmax_precision": onnx.TensorProto.DOUBLE})
    yield "integer-mask", ("Attention", inputs | {"mask": np.ones((19, 19), np.int64)}, outputs, {})
    inputs, outputs = multi_head_inputs(padding="2d")
    past, presents = multi_head_inputs(past=12, sq=1, sk=1)
    past |= {"past_length": np.array([9], np.int32)}
    yield "past-length", ("MultiHeadAttention", past, presents, {"num_heads": 4})
    past, presents = multi_head_inputs(past=9, sq=1, sk=1)
    past |= {"past_length": None, "beams": np.zeros((2, 1, 10), np.int32)}
    yield "beams", ("MultiHeadAttention", past, presents, {"num_heads": 4})
    yield "padding-1d", ("MultiHeadAttention", inputs | {"padding": np.array([17, 9], np.int32)}, outputs, {"num_heads": 4})
    inputs, outputs = multi_head_inputs(padding="2d", score_bias=lambda b, h: (b, h))
    yield "two-biases", ("MultiHeadAttention", inputs, outputs, {"num_heads": 4})
    inputs, outputs = multi_head_inputs(bias=True)
    yield "half-bias", ("MultiHeadAttention", inputs, outputs, {"num_heads": 4}, "fp16")
    inputs, attributes = linear_inputs("gated")
    yield "heads-unknown", ("LinearAttention", inputs, ["y", "present_state"], attributes)
    inputs, outputs = grouped_inputs()
    heads = {"num_heads": 4, "kv_num_heads": 2}
    past, _ = grouped_inputs(s=1, lengths=[30, 30], room=8)
    sliding = {"sliding_window_cache": 1, "local_window_size": 8}
    yield "sliding-cache", ("GroupQueryAttention", past, outputs, heads | sliding)
    yield "output-qk", ("GroupQueryAttention", inputs, [*outputs, "scores"], heads | {"qk_output": 1})


LEFT = dict(left_nodes())


@pytest.mark.parametrize("case", LEFT)
def test_left(case):
    """What rapt does not compute stays with the CPU provider, whose results come back."""
    op, inputs, outputs, attributes, *dtype = LEFT[case]
    made = model(op, inputs, outputs, attributes, *dtype)
    ours, theirs = session(made), session(made, rapt=False)
    assert claimed(ours) == []
    inputs = {n: nodes.cast(a, *dtype)[0] if dtype and a is not None else a for n, a in inputs.items()}
    for one, other in zip(run(ours, inputs), run(theirs, inputs)):
        assert (one == other).all()


def left_by_both():
    """Nodes that are an error of the CPU provider's."""
    inputs, attributes = linear_inputs("gated")
    yield "state-window", ("LinearAttention", inputs, ["y", "present_state"], attributes | {"state_window": 2})
    heads = {"num_heads": 4, "kv_num_heads": 2}
    inputs, outputs = grouped_inputs(s=1, lengths=[30, 30], room=64)
    quantised = {name: inputs[name].astype(np.int8) for name in ("past_k", "past_v")}
    scales = {"k_scale": np.ones(1, np.float32), "v_scale": np.ones(1, np.float32)}
    kinds = {"k_quant_type": "PER_TENSOR", "v_quant_type": "PER_TENSOR", "kv_cache_bit_width": 8}
    yield "quantised", ("GroupQueryAttention", inputs | quantised | scales, ["y"], heads | kinds)
    norms = {"k_scale": None, "v_scale": None, "q_norm": normal(32, seed=11), "k_norm": normal(32, seed=12)}
    yield "norms", ("GroupQueryAttention", inputs | norms, outputs, heads)
    inputs, outputs = grouped_inputs(s=1, lengths=[30, 30], room=64, rotary=32)
    yield "one-norm", ("GroupQueryAttention", inputs | norms | {"k_norm": None}, outputs, heads | {"do_rotary": 1})


LEFT_BY_BOTH = dict(left_by_both())


@pytest.mark.parametrize("case", LEFT_BY_BOTH)
def test_left_by_both(case):
    op, inputs, outputs, attributes = LEFT_BY_BOTH[case]
    made = model(op, inputs, outputs, attributes, known=("query", "key", "value"))

    def outcome(rapt):
        try:
            running = session(made, rapt=rapt)
            return claimed(running), run(running, inputs)
        except Exception as error:
            return str(error)

    assert isinstance(outcome(rapt=False), str)
    assert outcome(rapt=True) == outcome(rapt=False)


def test_shapes_unknown_before_the_run():
    inputs, outputs, heads = attention_inputs(rank=3, hk=2)
    ours = session(model("Attention", inputs, outputs, heads, unknown=("q", "k", "v")))
    theirs = session(model("Attention", inputs, outputs, heads), rapt=False)
    assert claimed(ours) == ["Attention"]
    for sq in (19, 1, 7):
        cut = {name: a[:, :sq] if a is not None and name == "q" else a for name, a in inputs.items()}
        assert_close(run(ours, cut)[0], run(theirs, cut)[0], "fp32")


@pytest.mark.parametrize("sizes", [dict(sq=0), dict(b=0), dict(sk=0), dict(sk=0, past=3), dict(b=0, past=3)])
def test_empty(sizes):
    inputs, outputs, _ = attention_inputs(**sizes)
    result, *present = run(session(model("Attention", inputs, outputs, {})), inputs)
    assert result.shape == inputs["q"].shape
    assert (result == 0).all() or sizes == dict(sk=0, past=3)
    if "past" in sizes:
        assert (present[0][:, :, :3] == inputs["past_k"]).all()
    inputs, outputs = multi_head_inputs(**sizes)
    assert run(session(model("MultiHeadAttention", inputs, outputs, {"num_heads": 4})), inputs)[0].shape == inputs["query"].shape


@pytest.mark.parametrize("op", ["Attention", "MultiHeadAttention", "GroupQueryAttention"])
def test_empty_past_made_in_the_model(op):
    """From the second run on, ONNX Runtime may give it the address of present."""
    helper, kinds, heads = onnx.helper, onnx.TensorProto, 2
    initial = {"zero": np.zeros(1, np.int64), "axis": np.array([2], np.int64)}
    initial |= {"last_key": np.full(heads, 2, np.int32), "total": np.array([3], np.int32)}
    before, attributes = {
        "Attention": ([""], {"q_num_heads": heads, "kv_num_heads": heads}),
        "MultiHeadAttention": ([""] * 3, {"num_heads": heads}),
        "GroupQueryAttention": ([], {"num_heads": heads, "kv_num_heads": heads}),
    }[op]
    after = ["last_key", "total"] if op == "GroupQueryAttention" else []
    given = ["x", "x", "x", *before, "past", "past", *after]
    graph = helper.make_graph(
        [
            helper.make_node("Slice", ["rows", "zero", "zero", "axis"], ["past"]),
            helper.make_node(op, given, ["y", "k", "v"], domain="" if op == "Attention" else "com.microsoft", **attributes),
            helper.make_node("Neg", ["k"], ["minus_k"]),
            helper.make_node("Neg", ["v"], ["minus_v"]),
        ],
        "past",
        [
            helper.make_tensor_value_info("x", kinds.FLOAT, [heads, 3, heads * 32]),
            helper.make_tensor_value_info("rows", kinds.FLOAT, [heads, heads, 4, 32]),
        ],
        [helper.make_tensor_value_info(name, kinds.FLOAT, None) for name in ("y", "minus_k", "minus_v")],
        [onnx.numpy_helper.from_array(array, name) for name, array in initial.items()],
    )
    imports = [helper.make_opsetid("", 24), helper.make_opsetid("com.microsoft", 1)]
    made = helper.make_model(graph, opset_imports=imports, ir_version=11)
    inputs = {"x": normal(heads, 3, heads * 32), "rows": normal(heads, heads, 4, 32)}
    ours = session(made)
    assert claimed(ours) == [op]
    expected = run(session(made, rapt=False), inputs)
    for _ in range(3):
        for one, other in zip(run(ours, inputs), expected):
            assert_close(one, other, "fp32")


def test_linear_without_tokens():
    inputs, attributes = linear_inputs("gated_delta", t=0)
    made = model("LinearAttention", inputs, ["y", "present_state"], attributes, known=("query", "key", "value"))
    assert (run(session(made), inputs)[1] == inputs["past_state"]).all()


def bad_nodes():
    """Nodes, their inputs with one that is wrong, and what the error says of it."""
    scalar, wide = np.array(1, np.float32), normal(1, 3, 128)
    heads, grouped = {"num_heads": 4}, {"num_heads": 4, "kv_num_heads": 2}

    def variants(op, inputs, outputs, attributes, changes):
        for change, message in changes:
            yield op, inputs | change, outputs, attributes, message

    inputs, outputs, _ = attention_inputs(past=5)
    yield from variants("Attention", inputs, outputs, {}, [
        ({"past_v": normal(2, 4, 9, 32)}, "past_value: 9 rows; wanted as many as past_key: 5"),
        ({"lengths": np.array([5, 3])}, "nonpad_kv_seqlen: together with a past"),
        ({"k": normal(2, 4, 0, 32)}, "value: 19 rows; wanted as many as key: 0"),
        ({"mask": np.array(False)}, "attn_mask: 0 dimensions"),
    ])  # fmt: skip
    inputs, outputs, _ = attention_inputs(lengths=[19, 19])
    yield from variants("Attention", inputs, outputs, {}, [({"lengths": np.array(19)}, "nonpad_kv_seqlen: 0 dimensions")])

    inputs = {"query": normal(1, 1, 128), "key": normal(1, 1, 128), "value": normal(1, 1, 128), "bias": normal(384)}
    yield from variants("MultiHeadAttention", inputs, ["y"], heads, [
        ({"key": normal(1, 1, 4096)}, "key: 1024 elements per head; wanted 32"),
        ({"key": normal(1, 2, 5, 32), "value": normal(1, 2, 5, 32)}, "key: 2 heads; wanted 4"),
        ({"key": normal(1, 4, 5, 32), "value": normal(1, 2, 5, 64)}, "value: 2 heads; wanted 4"),
    ])  # fmt: skip
    yield from variants("MultiHeadAttention", {"query": normal(1, 3, 4, 3, 32)}, ["y"], heads, [
        ({"query": normal(1, 3, 2, 3, 32)}, "query: 2 heads; wanted 4"),
        ({"key": wide, "value": wide}, "query: 5 dimensions; wanted 3"),
        ({"key": None, "value": wide}, "value: given without key"),
    ])  # fmt: skip
    inputs, outputs = multi_head_inputs(past=5)
    yield from variants("MultiHeadAttention", inputs, outputs, heads, [
        ({"padding": np.ones((2, 1), np.int32)}, "key_padding_mask: .*; wanted 2 sequences of 22 keys"),
        ({"padding": np.ones((2, 17), np.int32)}, "key_padding_mask: .*; wanted 2 sequences of 22 keys"),
        ({"padding": np.ones((1, 22), np.int32)}, "key_padding_mask: .*; wanted 2 sequences of 22 keys"),
        ({"score_bias": scalar}, "attention_bias: 0 dimensions"),
    ])  # fmt: skip

    inputs, outputs = grouped_inputs(s=1, lengths=[101, 77], room=128)
    yield from variants("GroupQueryAttention", inputs, outputs, grouped, [
        ({"last_key": np.array([2**31 - 1, 5], np.int32)}, "seqlens_k: 2147483647; wanted 0 .. 127"),
        ({"total": np.array([-5], np.int32)}, "total_sequence_length: -5"),
        ({"past_v": normal(2, 2, 200, 32)}, "past_value: 200 rows; wanted as many as past_key: 128"),
        ({"key": normal(2, 0, 64)}, "value: 1 rows; wanted as many as key: 0"),
        ({"sinks": scalar}, "head_sink: 0 dimensions"),
        ({"bias": scalar}, "attention_bias: 0 dimensions"),
        ({"query": normal(2, 1, 257), "key": None, "value": None}, "query: rows of 257; wanted a multiple of 8 heads"),
    ])  # fmt: skip
    rotary = grouped | {"do_rotary": 1}
    inputs, outputs = grouped_inputs(b=1, s=2, lengths=[50], room=80, rotary=32)
    yield from variants("GroupQueryAttention", inputs, outputs, rotary, [
        ({"cos": scalar, "sin": scalar}, "cos_cache: 0 dimensions"),
        ({"positions": np.array([[48]])}, "position_ids: 1 sequences of 1; wanted 1 of at least 2"),
        ({"positions": np.full((2, 2), 48)}, "position_ids: 2 sequences of 2; wanted 1 of at least 2"),
        ({"k_scale": None, "v_scale": None, "q_norm": scalar, "k_norm": scalar}, "q_norm_weight: 0 dimensions"),
    ])  # fmt: skip
    inputs, outputs = grouped_inputs(rotary=32)
    yield from variants("GroupQueryAttention", inputs, outputs, rotary, [
        ({"positions": np.full((2, 15), -3)}, "position_ids: -3; wanted 0 .. 497"),
        ({"positions": np.full((2, 15), 498)}, "position_ids: 498; wanted 0 .. 497"),
        ({"positions": np.full((2, 15), 2**63 - 1)}, "position_ids: 9223372036854775807; wanted 0 .. 497"),
        ({"positions": np.zeros((2, 0), np.int64)}, "position_ids: 2 sequences of 0"),
    ])  # fmt: skip

    inputs, attributes = linear_inputs("gated_delta")
    yield from variants("LinearAttention", inputs, ["y", "present_state"], attributes, [
        ({"key": normal(2, 21, row)}, f"key: rows of {row}; wanted a multiple of query's heads of 32") for row in (0, 16, 40)
    ])  # fmt: skip


@pytest.mark.parametrize("op, inputs, outputs, attributes, message", list(bad_nodes()))
def test_bad_inputs_are_errors(op, inputs, outputs, attributes, message):
    scalars = [name for name, array in inputs.items() if array is not None and array.ndim == 0]
    known = ("query", "value") if op == "LinearAttention" else ()
    ours = session(model(op, inputs, outputs, attributes, unknown=scalars, known=known))
    assert claimed(ours) == [op]
    with pytest.raises(Exception, match=f"rapt: {message}"):
        run(ours, inputs)


def test_bad_shapes_are_errors():
    inputs, outputs, _ = attention_inputs()
    ours = session(model("Attention", inputs, outputs, {}))
    with pytest.raises(Exception, match="rapt: k: .*wanted"):
        run(ours, inputs | {"k": normal(2, 3, 19, 32)})
    inputs, outputs = grouped_inputs(s=1, lengths=[101, 101], room=50)
    ours = session(model("GroupQueryAttention", inputs, outputs, {"num_heads": 4, "kv_num_heads": 2}))
    with pytest.raises(Exception, match="rapt: past_key: 50 rows; wanted at least 100"):
        run(ours, inputs)
    inputs["last_key"][0] = -1
    with pytest.raises(Exception, match="rapt: seqlens_k: -1"):
        run(ours, inputs)


# -- threads -----------------------------------------------------------------------------------------------------------


def test_fewer_threads_than_workers():
    """The executor offers as many workers as there are CPUs, whatever the session's threads."""
    inputs, outputs, heads = attention_inputs(b=1, hq=8, hk=2, sq=300, sk=300, d=64, dv=64)
    made = model("Attention", inputs, outputs, heads | {"is_causal": 1})
    results = [run(session(made, threads=n), inputs)[0] for n in (1, 2, 3)]
    assert all((result == results[0]).all() for result in results)


def test_sessions_at_once():
    """Several sessions, each called by several threads."""
    cases = []
    for i in range(3):
        inputs, outputs = grouped_inputs(b=1, s=60 + i, hq=8, d=64)
        ours = session(model("GroupQueryAttention", inputs, outputs, {"num_heads": 8, "kv_num_heads": 2}), threads=1 + i)
        cases.append((ours, inputs, run(ours, inputs)))

    def call(running, inputs, expected):
        for _ in range(20):
            for one, other in zip(run(running, inputs), expected):
                assert (one == other).all()

    with ThreadPoolExecutor(6) as threads:
        for done in [threads.submit(call, *case) for case in cases for _ in range(2)]:
            done.result()


# -- a model -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op, window", [("Attention", -1), ("GroupQueryAttention", -1), ("GroupQueryAttention", 16)])
def test_decoder_tokens(op, window):
    made = onnxruntime_decoder.decoder(op, window=window)
    prompt = np.random.default_rng(1).integers(0, onnxruntime_decoder.WORDS, (2, 40))
    ours = session(made)
    assert claimed(ours) == [op] * onnxruntime_decoder.LAYERS
    expected = onnxruntime_decoder.generate(session(made, rapt=False), prompt, 50)
    assert len(np.unique(expected)) > 10
    assert (onnxruntime_decoder.generate(ours, prompt, 50) == expected).all()


def test_guide(tmp_path):
    """The page's Python, in a process of its own with a model and a package that has the library."""
    page = Path(__file__).parents[2] / "docs" / "guide" / "python" / "onnxruntime.md"
    code = "\n".join(re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S))
    (tmp_path / "rapt").mkdir()
    (tmp_path / "rapt" / "__init__.py").touch()
    (tmp_path / "rapt" / "librapt_onnxruntime.so").symlink_to(nodes.library())
    onnx.save(onnxruntime_decoder.decoder("Attention"), tmp_path / "model.onnx")
    code = "import onnxruntime\nonnxruntime.set_default_logger_severity(0)\n" + code
    code = code.replace("session =", "print(session.get_providers()) if 'session' in globals() else None\nsession =")
    done = subprocess.run(
        [sys.executable, "-c", code + "print(session.get_providers())"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.stdout.splitlines() == ["['RaptExecutionProvider', 'CPUExecutionProvider']"] * 2, done.stderr
    assert done.stderr.count('rapt computes Attention "') == 2 * onnxruntime_decoder.LAYERS


def test_headers_too_old(tmp_path):
    for name in ("onnxruntime_c_api.h", "onnxruntime_cxx_api.h", "onnxruntime_ep_c_api.h"):
        (tmp_path / name).write_text("#define ORT_API_VERSION 23\n", encoding="utf-8")
    script = Path(__file__).parents[2] / "cmake" / "RaptOnnxRuntime.cmake"
    done = subprocess.run(["cmake", f"-DRAPT_ONNXRUNTIME={tmp_path}", "-P", script], capture_output=True, text=True)
    assert done.returncode != 0 and "of ONNX Runtime 1.23" in " ".join(done.stderr.split())
