"""What the execution provider for ONNX Runtime leaves to others, refuses and survives; and whole models."""

import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

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

import onnxruntime_decoder
import onnxruntime_nodes as nodes
from onnxruntime_nodes import assert_close, claimed, model, run, session


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
