"""The execution provider for ONNX Runtime (docs/guide/python/onnxruntime.md) against ONNX Runtime's CPU provider: every operator."""

import itertools

import pytest
from onnxruntime_inputs import (  # first: it may skip
    attention_inputs,
    grouped_inputs,
    linear_inputs,
    multi_head_inputs,
    normal,
    np,
    onnx,
    onnxruntime,
)

import onnxruntime_nodes as nodes
from onnxruntime_nodes import assert_close, both, claimed, model, run, session

DTYPES = ["fp32", "fp16", "bf16"]


# -- Attention ---------------------------------------------------------------------------------------------------------


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
