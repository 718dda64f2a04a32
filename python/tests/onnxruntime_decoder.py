"""A small decoder as ONNX, with random weights, and greedy decoding with it."""

import numpy as np
from onnx import TensorProto, helper, numpy_helper

LAYERS, HIDDEN, HEADS, KV_HEADS, D, WORDS, ROOM = 3, 64, 4, 2, 16, 97, 256


def decoder(op, layers=LAYERS, hidden=HIDDEN, heads=HEADS, kv_heads=KV_HEADS, d=D, words=WORDS, room=ROOM, window=-1):
    """`op`: GroupQueryAttention, which rotates, or ONNX's Attention after RotaryEmbedding. Inputs: tokens [b, s],
    positions [b, s], last_key [b], total [1] and the caches past_k0, past_v0, ...; outputs: logits [b, s, words] and the
    caches present_k0, ..."""
    random, nodes, weights, inputs, outputs = np.random.default_rng(0), [], [], [], []

    def weight(name, array):
        weights.append(numpy_helper.from_array(array.astype(np.float32), name))
        return name

    def linear(x, name, rows, columns):
        matrix = weight(name, random.standard_normal((rows, columns)) / rows**0.5)
        return add("MatMul", [x, matrix], name)

    def add(kind, names, out, domain="", outs=(), **attributes):
        nodes.append(helper.make_node(kind, names, [out + "_out", *outs], domain=domain, **attributes))
        return out + "_out"

    angles = np.outer(np.arange(room), 1e4 ** (-np.arange(0, d, 2) / d))
    weight("cos", np.cos(angles)), weight("sin", np.sin(angles))
    weight("embedding", random.standard_normal((words, hidden)))
    x = add("Gather", ["embedding", "tokens"], "embed")
    for i in range(layers):
        normed = add("RMSNormalization", [x, weight(f"norm_a{i}", np.ones(hidden))], f"norm_a{i}")
        q = linear(normed, f"q{i}", hidden, heads * d)
        k, v = (linear(normed, f"{name}{i}", hidden, kv_heads * d) for name in "kv")
        caches = [f"past_k{i}", f"past_v{i}"], [f"present_k{i}", f"present_v{i}"]
        if op == "GroupQueryAttention":
            names = [q, k, v, *caches[0], "last_key", "total", "cos", "sin"]
            heads_of = {"num_heads": heads, "kv_num_heads": kv_heads, "do_rotary": 1, "local_window_size": window}
            y = add(op, names, f"attention{i}", "com.microsoft", caches[1], **heads_of)
        else:
            q, k = (
                add("RotaryEmbedding", [rows, "cos", "sin", "positions"], f"turn_{name}{i}", num_heads=n)
                for rows, name, n in ((q, "q", heads), (k, "k", kv_heads))
            )
            heads_of = {"q_num_heads": heads, "kv_num_heads": kv_heads, "is_causal": 1}
            y = add(op, [q, k, v, "", *caches[0]], f"attention{i}", "", caches[1], **heads_of)
        x = add("Add", [x, linear(y, f"o{i}", heads * d, hidden)], f"sum_a{i}")
        normed = add("RMSNormalization", [x, weight(f"norm_b{i}", np.ones(hidden))], f"norm_b{i}")
        up, gate = (linear(normed, f"{name}{i}", hidden, 2 * hidden) for name in ("up", "gate"))
        gate = add("Mul", [gate, add("Sigmoid", [gate], f"sigmoid{i}")], f"silu{i}")
        x = add("Add", [x, linear(add("Mul", [up, gate], f"mul{i}"), f"down{i}", 2 * hidden, hidden)], f"sum_b{i}")
        for names, values in zip(caches, (inputs, outputs)):
            values += [helper.make_tensor_value_info(n, TensorProto.FLOAT, ["b", kv_heads, None, d]) for n in names]
    nodes.append(helper.make_node("MatMul", [x, weight("head", random.standard_normal((hidden, words)))], ["logits"]))
    step = [("tokens", TensorProto.INT64, ["b", "s"])]
    if op == "GroupQueryAttention":
        step += [("last_key", TensorProto.INT32, ["b"]), ("total", TensorProto.INT32, [1])]
    else:
        step += [("positions", TensorProto.INT64, ["b", "s"])]
    graph = helper.make_graph(
        nodes,
        "decoder",
        [helper.make_tensor_value_info(*value) for value in step] + inputs,
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["b", "s", words]), *outputs],
        weights,
    )
    imports = [helper.make_opsetid("", 23), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=imports, ir_version=11)


def generate(session, prompt, count):
    """Greedy tokens [b, count] after a prompt [b, s]."""
    names = {value.name: value for value in session.get_inputs()}
    b, tokens, written, found = len(prompt), prompt, 0, []
    caches = {n: np.zeros((b, v.shape[1], 0, v.shape[3]), np.float32) for n, v in names.items() if n.startswith("past")}
    for _ in range(count):
        s = tokens.shape[1]
        step = {
            "tokens": tokens,
            "positions": np.tile(np.arange(written, written + s), (b, 1)),
            "last_key": np.full(b, written + s - 1, np.int32),
            "total": np.array([written + s], np.int32),
        }
        logits, *presents = session.run(None, {n: a for n, a in step.items() if n in names} | caches)
        written += s
        caches = dict(zip(caches, presents))
        tokens = logits[:, -1].argmax(-1)[:, None]
        found.append(tokens)
    return np.concatenate(found, axis=1)
