"""Models of one node, sessions with and without rapt's execution provider, and the library that has it."""

import importlib.util
import os
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper

STATES = ("past_state", "present_state")  # of linear attention
PROVIDER = "RaptExecutionProvider"
TYPES = {"fp32": TensorProto.FLOAT, "fp16": TensorProto.FLOAT16, "bf16": TensorProto.BFLOAT16}
# Largest error of results of about 1: rounding of results, and of weights where kernels multiply in 16 bits.
TOLERANCE = {"fp32": 4e-6, "fp16": 2e-3, "bf16": 2e-2}


def library():
    """The provider's library: named by RAPT_ONNXRUNTIME_LIBRARY, or in the package's folder; None if there is none."""
    named = os.environ.get("RAPT_ONNXRUNTIME_LIBRARY")
    if named:
        return Path(named)
    spec = importlib.util.find_spec("rapt")
    beside = Path(spec.origin).parent / "librapt_onnxruntime.so" if spec and spec.origin else None
    return beside if beside and beside.exists() else None


def devices():
    found = [device for device in onnxruntime.get_ep_devices() if device.ep_name == PROVIDER]
    if not found:
        onnxruntime.register_execution_provider_library("rapt", str(library()))
        found = [device for device in onnxruntime.get_ep_devices() if device.ep_name == PROVIDER]
    return found


def session(model, rapt=True, threads=2, options=None):
    options = options or onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    if rapt:
        options.add_provider_for_devices(devices(), {})
    data = model if isinstance(model, (str, bytes)) else model.SerializeToString()
    return onnxruntime.InferenceSession(data, options, providers=None if rapt else ["CPUExecutionProvider"])


def claimed(running):
    """The operators of the nodes that rapt computes, in order."""
    return [
        node.op_type
        for part in running.get_provider_graph_assignment_info()
        if part.ep_name == PROVIDER
        for node in part.get_nodes()
    ]


def cast(array, dtype):
    """A float32 array as a type of TYPES, and rounded to it as float32."""
    if dtype == "bf16":
        import ml_dtypes

        narrow = array.astype(ml_dtypes.bfloat16)
    else:
        narrow = array.astype({"fp32": np.float32, "fp16": np.float16}[dtype])
    return narrow, narrow.astype(np.float32)


def model(op, inputs, outputs, attributes, dtype="fp32", opset=24, unknown=(), known=()):
    """A model of one node. `inputs` are arrays by name, None where the node lacks an input; float32 stands for `dtype`,
    except in states. `unknown` names inputs whose shape the model does not state, `known` those whose last size it states."""
    kinds = {np.dtype(np.float32): TYPES[dtype], np.dtype(bool): TensorProto.BOOL}
    kinds |= {np.dtype(np.int32): TensorProto.INT32, np.dtype(np.int64): TensorProto.INT64}
    kinds |= {np.dtype(np.int8): TensorProto.INT8}
    domain = "" if op == "Attention" else "com.microsoft"
    names = [name if array is not None else "" for name, array in inputs.items()]
    while not names[-1]:  # version 23 of Attention has an input less than version 24
        names.pop()
    node = helper.make_node(op, names, outputs, domain=domain, **attributes)
    graph = helper.make_graph(
        [node],
        "node",
        [
            helper.make_tensor_value_info(
                name,
                TensorProto.FLOAT if name in STATES else kinds[a.dtype],
                None if name in unknown else [None] * (a.ndim - 1) + [a.shape[-1] if name in known else None],
            )
            for name, a in inputs.items()
            if a is not None
        ],
        [
            helper.make_tensor_value_info(name, TensorProto.FLOAT if name in STATES else TYPES[dtype], None)
            for name in outputs
            if name
        ],
    )
    imports = [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=imports, ir_version=11)


def run(running, inputs):
    """Results as float32."""
    import ml_dtypes

    values, bf16 = {}, np.dtype(ml_dtypes.bfloat16)
    for name, array in inputs.items():
        if array is None:
            continue
        if array.dtype == bf16:
            value = onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(array.view(np.uint16), TensorProto.BFLOAT16)
        else:
            value = onnxruntime.OrtValue.ortvalue_from_numpy(array)
        values[name] = value
    results = running.run_with_ort_values(None, values)
    return [to_numpy(result) for result in results]


def to_numpy(value):
    import ml_dtypes

    if "bfloat16" in value.data_type():
        pointer = np.ctypeslib.as_array(
            (np.ctypeslib.ctypes.c_uint16 * max(1, int(np.prod(value.shape())))).from_address(value.data_ptr())
        )
        return pointer[: int(np.prod(value.shape()))].view(ml_dtypes.bfloat16).reshape(value.shape()).astype(np.float32)
    array = value.numpy()
    return array.astype(np.float32) if array.dtype == np.float16 else array


def both(op, inputs, outputs, attributes, dtype="fp32", opset=24, threads=2, **options):
    """Results of rapt on inputs of `dtype`, and of ONNX Runtime's CPU provider in float32 on the same numbers."""
    narrow, wide = {}, {}
    for name, array in inputs.items():
        floating = array is not None and array.dtype == np.float32 and name not in STATES
        narrow[name], wide[name] = cast(array, dtype) if floating else (array, array)
    ours = session(model(op, inputs, outputs, attributes, dtype, opset, **options), threads=threads)
    assert claimed(ours) == [op]
    theirs = session(model(op, inputs, outputs, attributes, "fp32", opset, **options), rapt=False)
    return run(ours, narrow), run(theirs, wide)


def assert_close(ours, theirs, dtype, scale=1.0):
    assert ours.shape == theirs.shape
    np.testing.assert_allclose(ours, theirs, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype] * scale)
