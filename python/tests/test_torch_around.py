"""rapt.torch beside the rest of PyTorch: overrides, tracers, transforms, the profiler, its modules and its switches."""

import io
import threading
import warnings
from unittest import mock

import pytest
import rapt.torch
import torch
from kernel_calls import kernel_calls
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.overrides import TorchFunctionMode

ours = rapt.torch.scaled_dot_product_attention
theirs = functional.scaled_dot_product_attention
X, K = torch.randn(2, 4, 9, 16), torch.randn(2, 4, 12, 16)


pytestmark = pytest.mark.usefixtures("seeded", "without_fallbacks")


def falls_back(reason):
    return pytest.warns(rapt.torch.FallbackWarning, match=reason)


def close(got, wanted):
    torch.testing.assert_close(got, wanted, rtol=0, atol=2e-6)


class Model(torch.nn.Module):
    def forward(self, x):
        return functional.scaled_dot_product_attention(x, x, x, is_causal=True)


# Overrides


@pytest.mark.parametrize("by_name", [True, False])
@pytest.mark.parametrize("bias", [causal_lower_right(9, 12), causal_upper_left(9, 12), causal_lower_right(9, 9)])
def test_causal_biases(bias, by_name):
    k = K[:, :, : bias.seq_len_kv]
    wanted = theirs(X, k, k, bias)
    with kernel_calls() as kernel, rapt.torch.enabled():
        got = (ours if by_name else functional.scaled_dot_product_attention)(X, k, k, bias)
        with pytest.raises(ValueError, match="CausalBias should not be used with causal=True"):
            ours(X, k, k, bias, is_causal=True)
    assert kernel.call_count == 1 and type(got) is torch.Tensor
    close(got, wanted)


def test_compiled_causal_biases():
    bias = causal_lower_right(9, 12)
    with kernel_calls() as kernel:
        close(torch.compile(lambda q, k: ours(q, k, k, bias))(X, K), theirs(X, K, K, bias))
    assert kernel.call_count == 1


class Log(TorchFunctionMode):
    def __init__(self):
        self.seen = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


def test_modes_see_pytorchs_function_once_and_rapts_kernel_runs():
    wanted, half = theirs(X, X, X), X[..., :8]
    with kernel_calls() as kernel, rapt.torch.enabled(), Log() as outer, Log() as inner:
        got = functional.scaled_dot_product_attention(X, X, X)
        assert outer.seen == inner.seen == [theirs]
        warnings.simplefilter("ignore", rapt.torch.FallbackWarning)
        with pytest.raises(RuntimeError):
            functional.scaled_dot_product_attention(X, half, X)
        assert torch.overrides._get_current_function_mode_stack() == [outer, inner]
    assert kernel.call_count == 1
    close(got, wanted)


def test_a_mode_that_computes_attention_itself():
    class Zeros(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            return 0 if func is theirs else func(*args, **(kwargs or {}))

    with Zeros():
        assert ours(X, X, X) == 0


def test_a_default_device_keeps_the_kernel():
    with kernel_calls() as kernel, torch.device("cpu"):
        ours(X, X, X)
        torch.compile(ours, fullgraph=True)(X, X, X)
    assert kernel.call_count == 2


class Tagged(torch.Tensor):
    """A subclass that takes the function itself where `takes` says so."""

    takes = False

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is theirs and cls.takes:
            return "taken"
        return super().__torch_function__(func, types, args, kwargs)


@pytest.mark.parametrize("place", range(4))
def test_subclasses_see_pytorchs_function(place, monkeypatch):
    tensors = [X, X, X, torch.randn(9, 9)]
    wanted = theirs(*tensors)
    tensors[place] = tensors[place].as_subclass(Tagged)
    with kernel_calls() as kernel, Log() as log:
        got = ours(*tensors)
    assert kernel.call_count == 1 and log.seen[0] is theirs and type(got) is Tagged
    close(got.as_subclass(torch.Tensor), wanted)
    monkeypatch.setattr(Tagged, "takes", True)
    assert ours(*tensors) == "taken"


def test_nested_tensors():
    for layout, shape in ((torch.strided, (4, -1, 16)), (torch.jagged, (-1, 4, 16))):
        rows = [torch.randn([n if size < 0 else size for size in shape]) for n in (5, 7)]
        x = torch.nested.nested_tensor(rows, layout=layout)
        x = x.transpose(1, 2) if layout is torch.jagged else x
        rapt._refusals.warned.clear()
        with falls_back("not dense"):
            got = ours(x, x, x)
        for a, b in zip(got.unbind(), theirs(x, x, x).unbind()):
            close(a, b)


def test_distributed_tensors():
    if not torch.distributed.is_available():
        pytest.skip("PyTorch without torch.distributed")
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        x = distribute_tensor(X, init_device_mesh("cpu", (1,)), [Shard(1)])
        with falls_back("tensors of DTensor"), mock.patch("rapt.torch._pytorch") as pytorch:  # which plans for 20 s
            got = ours(x, x, x)
        assert got is pytorch.return_value and all(tensor is x for tensor in pytorch.call_args.args[:3])
    finally:
        torch.distributed.destroy_process_group()


# Tracers and transforms


def test_symbolic_traces_are_pytorchs():
    with falls_back("query of Proxy"), rapt.torch.enabled():
        traced = torch.fx.symbolic_trace(Model())
    assert theirs in [node.target for node in traced.graph.nodes]
    assert (traced(X) == theirs(X, X, X, is_causal=True)).all()


@pytest.mark.parametrize("name", ["Bert", "Llama"])
def test_traced_models_are_pytorchs(name):
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{name}Config")(
        vocab_size=96, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4
    )
    config.use_cache = False
    model = getattr(transformers, f"{name}Model")._from_config(config, attn_implementation="sdpa").eval()
    ids, longer = torch.arange(10)[None], torch.arange(17)[None]
    with rapt.torch.enabled(), warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        with falls_back("torch.jit.trace"):
            traced = torch.jit.trace(model, ids, strict=False, check_trace=False)
        torch.jit.save(traced, io.BytesIO())
        for x in (ids, longer):
            torch.testing.assert_close(traced(x)["last_hidden_state"], model(x)[0], rtol=0, atol=1e-5)
    assert "aten::scaled_dot_product_attention" in str(traced.inlined_graph)
    assert "rapt::" not in str(traced.inlined_graph)  # so that it runs where rapt is not


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_scripted_modules_are_pytorchs():
    class ByName(torch.nn.Module):
        def forward(self, x):
            return ours(x, x, x, is_causal=True)

    with rapt.torch.enabled():
        scripted = [torch.jit.script(module) for module in (Model(), ByName())]
        attention = torch.jit.script(torch.nn.MultiheadAttention(16, 2))
    for module in scripted:
        assert (module(X) == theirs(X, X, X, is_causal=True)).all()
        torch.jit.save(module, io.BytesIO())
    assert attention(X[0], X[0], X[0])[0].shape == X[0].shape


@pytest.mark.parametrize("dynamo", [True, False])
def test_onnx_export(dynamo):
    onnx = pytest.importorskip("onnx")
    if dynamo:
        pytest.importorskip("onnxscript")
    file = io.BytesIO()
    with rapt.torch.enabled(), warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        with falls_back("torch.onnx.export" if dynamo else "torch.jit.trace"):
            torch.onnx.export(Model(), (X,), file, dynamo=dynamo, **({"verbose": False} if dynamo else {}))
    graph = onnx.load_from_string(file.getvalue()).graph
    assert graph.node and all("rapt" not in node.op_type + node.domain for node in graph.node)


def test_transforms_of_torch_func():
    x = torch.randn(3, 4, 9, 16)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        close(torch.vmap(ours)(x, x, x), theirs(x, x, x))
        grads = [torch.func.grad(lambda t, f=f: f(t, t, t).square().sum())(x) for f in (ours, theirs)]
        torch.testing.assert_close(*grads, rtol=0, atol=1e-5)
        with torch.autograd.forward_ad.dual_level(), pytest.raises(NotImplementedError):
            dual = torch.autograd.forward_ad.make_dual(x, x)
            ours(dual, dual, dual)


def test_compiled_transforms():
    def grad(function):
        return lambda x: torch.func.grad(lambda t: function(t, t, t).square().sum())(x)

    with falls_back("torch.func"):
        got = torch.compile(grad(ours), fullgraph=True, backend="aot_eager")(X)
    torch.testing.assert_close(got, grad(theirs)(X), rtol=0, atol=1e-5)
    rapt._refusals.warned.clear()
    with falls_back("torch.func"):
        close(torch.compile(torch.vmap(ours), fullgraph=True, backend="aot_eager")(X, X, X), theirs(X, X, X))


# Switches


def test_backends_that_leave_out_flash_attention():
    def restricted(x):
        with sdpa_kernel(SDPBackend.MATH):
            return ours(x, x, x)

    with kernel_calls() as kernel:
        with falls_back("sdpa_kernel without FLASH_ATTENTION"):
            got = restricted(X)
        with sdpa_kernel(SDPBackend.MATH):
            assert (got == theirs(X, X, X)).all()
        rapt._refusals.warned.clear()
        with falls_back("sdpa_kernel without FLASH_ATTENTION"):
            torch.compile(restricted, fullgraph=True)(X)
        assert kernel.call_count == 0
        with sdpa_kernel([SDPBackend.MATH, SDPBackend.FLASH_ATTENTION]):
            ours(X, X, X)
        torch.compile(ours, fullgraph=True)(X, X, X)
        assert kernel.call_count == 2


def test_overlapping_blocks_of_two_threads():
    """One thread's block begins first and ends first."""
    inside, ended = threading.Event(), threading.Event()

    def other():
        with rapt.torch.enabled():
            inside.set()
            ended.wait(10)
            seen.append(functional.scaled_dot_product_attention)

    seen, thread = [], threading.Thread(target=other)
    with rapt.torch.enabled():
        thread.start()
        inside.wait(10)
    assert functional.scaled_dot_product_attention is ours
    ended.set()
    thread.join()
    assert seen == [ours] and functional.scaled_dot_product_attention is theirs


def test_blocks_and_switch():
    rapt.torch.enable()
    rapt.torch.enable()
    with rapt.torch.enabled():
        rapt.torch.disable()
        assert functional.scaled_dot_product_attention is ours
    assert functional.scaled_dot_product_attention is theirs
    with rapt.torch.enabled():
        rapt.torch.enable()
    assert functional.scaled_dot_product_attention is ours
    rapt.torch.disable()
    assert functional.scaled_dot_product_attention is theirs


def test_what_another_library_put_there_comes_back(monkeypatch):
    monkeypatch.setattr(functional, "scaled_dot_product_attention", print)
    with rapt.torch.enabled():
        assert functional.scaled_dot_product_attention is ours
    assert functional.scaled_dot_product_attention is print


# PyTorch's modules and its profiler


@pytest.mark.parametrize("padded", [False, True])
def test_the_fused_path_of_transformer_encoders_is_left_out(padded):
    layer = torch.nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    model, x = torch.nn.TransformerEncoder(layer, 2).eval(), torch.randn(2, 9, 32)
    padding = torch.arange(9).expand(2, 9) >= torch.tensor([[9], [6]]) if padded else None
    with torch.no_grad(), kernel_calls() as kernel, warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # nested tensors are a prototype
        warnings.simplefilter("error", rapt.torch.FallbackWarning)
        wanted = model(x, src_key_padding_mask=padding)
        with rapt.torch.enabled():
            got = model(x, src_key_padding_mask=padding)
    kept = slice(None) if padding is None else ~padding
    torch.testing.assert_close(got[kept], wanted[kept], rtol=0, atol=1e-5)
    assert kernel.call_count == 2 and torch.backends.mha.get_fastpath_enabled()


@pytest.mark.parametrize("training", [False, True])
def test_multihead_attention(training):
    attention, x = torch.nn.MultiheadAttention(32, 4, batch_first=True).train(training), torch.randn(2, 9, 32)
    with torch.set_grad_enabled(training), kernel_calls() as kernel:
        wanted = attention(x, x, x, need_weights=False)[0]
        with rapt.torch.enabled():
            got = attention(x, x, x, need_weights=False)[0]
    assert kernel.call_count == 1
    close(got, wanted)


def test_the_fused_path_stays_off_where_it_was():
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with rapt.torch.enabled():
            pass
        assert not torch.backends.mha.get_fastpath_enabled()
    finally:
        torch.backends.mha.set_fastpath_enabled(True)


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("run", [ours, torch.compile(ours)], ids=["eager", "compiled"])
def test_profiled_calls_are_events(run, requires_grad):
    x = X.clone().requires_grad_(requires_grad)
    run(x, x, x)
    with torch.profiler.profile(record_shapes=True) as profile:
        run(x, x, x)
        run(x, x, x)
    # Compiled code shows the operator that it calls.
    name = "rapt::scaled_dot_product_attention" + "_with_lse" * (requires_grad and run is not ours)
    (event,) = [e for e in profile.key_averages(group_by_input_shape=True) if e.key == name]
    assert event.count == 2 and event.input_shapes[:3] == [[2, 4, 9, 16]] * 3


def test_nothing_is_recorded_without_a_profiler():
    with mock.patch.object(torch._C._profiler, "_RecordFunctionFast", side_effect=AssertionError):
        ours(X, X, X)
