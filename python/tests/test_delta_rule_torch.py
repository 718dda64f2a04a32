"""rapt.torch.delta_rule and flash-linear-attention's functions against a loop in double, gradients by autograd of that."""

import copy
import subprocess
import sys
import warnings

import numpy as np
import pytest
import rapt
import rapt.torch
import torch
from autograd_reference import OF_DECAYS, ratio
from autograd_reference import delta_rule as loop
from delta_rule_reference import delta_rule as numpy_delta_rule
from rapt import _core
from rapt._delta_rule_torch import Options
from torch.autograd import forward_ad
from torch.nn import functional

NAMES = ("q", "k", "v", "g", "beta", "initial_state", "a_log", "dt_bias")


def draw(b=2, t=9, hq=2, hk=2, hv=4, d=8, dv=12, decay="channel", dtype=torch.float32, state=True, seed=0):
    torch.manual_seed(seed)
    h = max(hk, hv)
    g = {"none": None, "constant": (h,), "head": (b, t, h), "channel": (b, t, h, d)}[decay]
    tensors = {
        "q": torch.randn(b, t, hq, d),
        "k": functional.normalize(torch.randn(b, t, hk, d), dim=-1),
        "v": torch.randn(b, t, hv, dv),
        "g": None if g is None else -torch.rand(g),
        "beta": torch.rand(b, t, h),
    }
    tensors = {name: x.to(dtype) for name, x in tensors.items() if x is not None}
    return tensors | ({"initial_state": torch.randn(b, h, d, dv)} if state else {})


def losses(function, tensors, wanted=None, **options):
    """Results and gradients of all tensors, of a loss that depends on both results."""
    leaves = {name: x.detach().clone().requires_grad_() for name, x in tensors.items()}
    out, state = function(**leaves, **options)
    torch.manual_seed(7)
    loss = (out * torch.randn(out.shape).to(out.dtype)).double().sum() + (state * torch.randn(state.shape)).double().sum()
    return out, state, dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values()))))


def rapt_with_state(**given):
    return rapt.torch.delta_rule(**given, return_state=True)


def check(tensors, unit=2e-6, **options):
    out, state, grads = losses(rapt_with_state, tensors, **options)
    wanted_out, wanted_state, wanted = losses(loop, tensors, **options)
    assert ratio(out, wanted_out) < unit and ratio(state, wanted_state) < 2e-6
    for name, x in tensors.items():
        assert grads[name].dtype == x.dtype
        assert ratio(grads[name], wanted[name]) < max(3 * unit, 5e-5 * (name in OF_DECAYS)), name


@pytest.mark.parametrize("dtype, unit", [(torch.float32, 2e-6), (torch.bfloat16, 4e-3), (torch.float16, 1e-3)])
@pytest.mark.parametrize("decay", ["none", "constant", "head", "channel"])
def test_gradients(decay, dtype, unit):
    check(draw(decay=decay, dtype=dtype), unit)


@pytest.mark.parametrize("heads", [(4, 4, 4), (2, 2, 4), (8, 4, 2), (6, 1, 3), (2, 4, 1)])
@pytest.mark.parametrize("rule, taken", [("linear", ""), ("gated", "g"), ("delta", "beta"), ("gated_delta", "g beta")])
def test_gradients_of_rules_and_heads(rule, taken, heads):
    tensors = draw(hq=heads[0], hk=heads[1], hv=heads[2])
    check({name: x for name, x in tensors.items() if name not in ("g", "beta") or name in taken.split()}, rule=rule)


OPTIONS = {
    "scale": {"scale": -0.3},
    "l2norm": {"l2norm_qk": True},
    "sigmoid": {"beta_sigmoid": True},
    "double": {"beta_sigmoid": True, "beta_double": True},
    "values first": {"state_v_first": True},
    "gate": {"gate": True},
    "gate with all": {"gate": True, "l2norm_qk": True, "beta_sigmoid": True},
    "bounded gate": {"gate": True, "gate_lower_bound": -5.0},
    "bounded gate with all": {"gate": True, "gate_lower_bound": -5.0, "l2norm_qk": True},
}


@pytest.mark.parametrize("decay", ["head", "channel"])
@pytest.mark.parametrize("name", OPTIONS)
def test_gradients_of_options(name, decay):
    tensors = draw(decay=decay)
    if "with all" in name:
        tensors |= {"a_log": torch.randn(4), "dt_bias": 3 * torch.randn((4, 8) if decay == "channel" else 4)}
    if name == "values first":
        tensors["initial_state"] = tensors["initial_state"].mT.contiguous()
    check(tensors, **OPTIONS[name])


def test_gradients_of_saturated_gates_are_finite():
    tensors = draw() | {"a_log": torch.tensor([-20.0, 0, 5, 20]), "dt_bias": 30 * torch.randn(4, 8)}
    for bound in (None, -5.0):
        *_, grads = losses(rapt_with_state, tensors, gate=True, gate_lower_bound=bound)
        assert all(torch.isfinite(x).all() for x in grads.values())


def test_gradients_of_many_tokens_and_strong_decays():
    tensors = draw(t=150, decay="channel")  # more than are kept at once
    tensors["g"] = tensors["g"] * torch.tensor([0.01, 1, 20, 600])[:, None]
    check(tensors)


@pytest.mark.parametrize("rank", [3, 4])
@pytest.mark.parametrize("decay", ["constant", "head", "channel"])
def test_gradients_of_ragged_batches(rank, decay):
    tensors = draw(b=1, t=13, decay=decay, state=False) | {"initial_state": torch.randn(5, 4, 8, 12)}
    if rank == 3:
        tensors = {n: x[0] if n != "initial_state" and x.ndim > 1 else x for n, x in tensors.items()}
    check(tensors, cu_seqlens=torch.tensor([0, 0, 6, 7, 7, 13]))


def test_some_gradients_only(monkeypatch):
    """The kernel is asked for those of what requires grad."""
    tensors, asked, backward = draw(), [], rapt.delta_rule_backward
    *_, wanted = losses(rapt_with_state, tensors)
    monkeypatch.setattr(rapt, "delta_rule_backward", lambda **given: (asked.append(given), backward(**given))[1])
    out, state = rapt_with_state(**tensors | {"v": tensors["v"].requires_grad_()})
    torch.manual_seed(7)
    loss = (out * torch.randn(out.shape)).double().sum() + (state * torch.randn(state.shape)).double().sum()
    loss.backward()
    assert torch.equal(tensors["v"].grad, wanted["v"])
    assert len(asked) == 1 and asked[0]["want"] == ["v"]
    # A loss of out alone; its gradient has none of its own.
    out = rapt.torch.delta_rule(**tensors)
    (dv,) = torch.autograd.grad(out.square().sum(), tensors["v"], create_graph=True)
    with pytest.raises(RuntimeError, match="create_graph"):
        dv.sum().backward()


# flash-linear-attention's tests: shapes (T, H, HV, D) and tolerances of its metric.
SHAPES = [(63, 1, 1, 64), (500, 3, 3, 60), (300, 4, 4, 100), (256, 4, 4, 128), (160, 2, 4, 64), (200, 2, 8, 128)]


def naive_recurrent_kda(q, k, v, g, beta, initial_state):
    return loop(q, k, v, g, beta, initial_state=initial_state)


def test_states_of_bfloat16():
    t = draw(dtype=torch.bfloat16)
    narrow = t["initial_state"].bfloat16().requires_grad_()
    wide = narrow.detach().float().requires_grad_()
    for function in (rapt.torch.chunk_kda, rapt.torch.fused_recurrent_kda):
        results = [function(**t | {"initial_state": state}, output_final_state=True) for state in (narrow, wide)]
        for got, wanted in zip(*results):
            assert torch.equal(got, wanted) and got.dtype == wanted.dtype
        grads = [torch.autograd.grad(out.sum() + last.sum(), state) for (out, last), state in zip(results, (narrow, wide))]
        assert torch.equal(grads[0][0], grads[1][0].bfloat16())
    state = narrow.detach().clone()
    out = rapt.torch.delta_rule(**t | {"initial_state": state}, final_state=state)
    assert torch.equal(out, results[0][0]) and torch.equal(state, results[0][1].bfloat16())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
def test_kda_as_flash_linear_attention_tests_it(shape, dtype):
    T, H, HV, D = shape
    torch.manual_seed(42)
    q, k, v = (torch.rand(1, T, n, D).to(dtype) for n in (H, H, HV))
    g = functional.logsigmoid(torch.randn(1, T, HV, D)) / 1.0
    beta, h0 = torch.randn(1, T, HV).sigmoid(), torch.randn(1, HV, D, D)
    normal = [functional.normalize(x.float(), dim=-1).to(dtype) for x in (q, k)]
    wanted, wanted_state = naive_recurrent_kda(*normal, v, g, beta, h0)
    for function in (rapt.torch.chunk_kda, rapt.torch.fused_recurrent_kda):
        out, state = function(q, k, v, g, beta, initial_state=h0, output_final_state=True, use_qk_l2norm_in_kernel=True)
        assert out.dtype == dtype and ratio(out, wanted) < 0.005 and ratio(state, wanted_state) < 0.005


@pytest.mark.parametrize("shape", [(63, 1, 2, 64), (300, 2, 2, 60), (200, 1, 4, 128)])
def test_gradients_of_kda_as_flash_linear_attention_tests_them(shape):
    T, H, HV, D = shape
    torch.manual_seed(42)
    tensors = {
        "q": torch.rand(2, T, H, D).half(),
        "k": functional.normalize(torch.rand(2, T, H, D), dim=-1).half(),
        "v": torch.rand(2, T, HV, D).half(),
        "g": functional.logsigmoid(torch.randn(2, T, HV, D)),
        "beta": torch.randn(2, T, HV).sigmoid(),
        "initial_state": torch.randn(2, HV, D, D),
    }
    chunk = lambda **given: rapt.torch.chunk_kda(**given, output_final_state=True, chunk_size=64, safe_gate=False)  # noqa: E731
    *_, got = losses(chunk, tensors)
    *_, wanted = losses(loop, tensors)
    limits = {"g": 0.02, "beta": 0.02}
    assert all(ratio(got[name], wanted[name]) < limits.get(name, 0.008) for name in tensors)


def test_the_gate_of_kda():
    t = draw(hv=4, hk=2)
    a_log, bias = torch.randn(4), torch.randn(32)
    more = {"use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True, "allow_neg_eigval": True, "output_final_state": True}
    for bound in (None, -5.0):
        wanted, wanted_state = loop(
            **t, gate=True, gate_lower_bound=bound, a_log=a_log, dt_bias=bias.view(4, 8), beta_sigmoid=True, beta_double=True
        )
        for function in (rapt.torch.chunk_kda, rapt.torch.fused_recurrent_kda):
            out, state = function(**t, **more, A_log=a_log, dt_bias=bias, lower_bound=bound, safe_gate=bound is not None)
            assert ratio(out, wanted) < 2e-6 and ratio(state, wanted_state) < 2e-6
    bare, none = rapt.torch.chunk_kda(**t, lower_bound=-5, allow_neg_eigval=True)  # neither matters without its switch
    assert none is None and torch.equal(bare, rapt.torch.delta_rule(**t))
    wanted, _ = loop(**t, gate=True, gate_lower_bound=-5.0)
    assert ratio(rapt.torch.chunk_kda(**t, use_gate_in_kernel=True, lower_bound=-5.0)[0], wanted) < 2e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gated_delta_rule_as_flash_linear_attention_has_it(dtype):
    t = draw(b=2, t=100, hq=2, hk=2, hv=6, d=32, dv=64, decay="head", dtype=dtype)
    t["g"], t["beta"] = t["g"].float(), t["beta"].float()
    wanted, wanted_state = loop(**t)
    for function in (rapt.torch.chunk_gated_delta_rule, rapt.torch.fused_recurrent_gated_delta_rule):
        out, state = function(**t, output_final_state=True, head_first=False)
        assert out.dtype == dtype and ratio(out, wanted) < 0.005 and ratio(state, wanted_state) < 0.005
    v_first = t | {"initial_state": t["initial_state"].mT.contiguous()}
    turned, turned_state = rapt.torch.chunk_gated_delta_rule(**v_first, state_v_first=True, output_final_state=True)
    assert torch.equal(turned, out) and torch.equal(turned_state.mT, state)
    gk = -torch.rand(2, 100, 6, 32)
    wanted, _ = loop(**t | {"g": t["g"][..., None] + gk})
    out, state = rapt.torch.fused_recurrent_gated_delta_rule(**t, gk=gk)
    assert state is None and ratio(out, wanted) < 0.005
    a_log, bias = torch.randn(6), torch.randn(6)
    out, _ = rapt.torch.chunk_gated_delta_rule(**t, use_gate_in_kernel=True, A_log=a_log, dt_bias=bias)
    assert ratio(out, loop(**t, gate=True, a_log=a_log, dt_bias=bias)[0]) < 0.005


def test_varlen_as_flash_linear_attention_has_it():
    t = draw(b=1, t=300, hv=2, state=False) | {"initial_state": torch.randn(4, 2, 8, 12)}
    starts = torch.tensor([0, 15, 100, 280, 300])
    out, state = rapt.torch.chunk_kda(**t, cu_seqlens=starts, cu_seqlens_cpu=starts, output_final_state=True)
    wanted, wanted_state = loop(**t, cu_seqlens=starts)
    assert ratio(out, wanted) < 2e-6 and ratio(state, wanted_state) < 2e-6


def test_what_flash_linear_attention_has_and_rapt_has_not():
    t = draw(decay="head")
    for function, given, message in [
        (rapt.torch.chunk_kda, {"head_first": True}, "head_first: got True; wanted False"),
        (rapt.torch.chunk_kda, {"cp_context": "context"}, "cp_context: got 'context'; wanted None"),
        (rapt.torch.fused_recurrent_gated_delta_rule, {"gv": t["v"]}, "gv: got a tensor; wanted None"),
        (rapt.torch.chunk_kda, {"use_gate_in_kernel": True}, "A_log: got None"),
        (rapt.torch.chunk_kda, {"cu_seqlens": torch.tensor([0, 9])}, "q: got shape [2, 9, 2, 8] with cu_seqlens"),
    ]:
        with pytest.raises(ValueError) as raised:
            function(**t, **given)
        assert str(raised.value).startswith(message)


LINEAR_MODELS = ["qwen3_next", "qwen3_5", "kimi_linear", "olmo_hybrid"]


def linear_model(kind, layer_types=("linear_attention", "full_attention"), **made):
    """A small model of transformers."""
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 64, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "layer_types": list(layer_types)}
    linear = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 24}
    if kind == "kimi_linear":
        more = {"linear_num_heads": 3, "linear_head_dim": 16, "mlp_layer_types": ["dense"] * 2}
        config, name = transformers.KimiLinearConfig(**sizes, **more), "KimiLinearForCausalLM"
    elif kind == "qwen3_next":
        more = {"num_key_value_heads": 1, "head_dim": 24, "num_experts": 0}
        config, name = transformers.Qwen3NextConfig(**sizes, **linear, **more), "Qwen3NextForCausalLM"
    elif kind == "qwen3_5":
        more = {"num_key_value_heads": 1, "head_dim": 24}
        config, name = transformers.Qwen3_5TextConfig(**sizes, **linear, **more), "Qwen3_5ForCausalLM"
    else:
        linear |= {"linear_num_value_heads": 2}
        config, name = transformers.OlmoHybridConfig(**sizes, **linear), "OlmoHybridForCausalLM"
    torch.manual_seed(0)
    return getattr(transformers, name)._from_config(config, **made)


@pytest.mark.parametrize("kind", LINEAR_MODELS)
def test_models_of_transformers(kind, monkeypatch):
    """A prompt with padding, then token by token, and a step of training: as with transformers' own loops."""
    import rapt.transformers

    rapt.transformers.register()
    model, calls = linear_model(kind), []
    tokens = torch.randint(3, 64, (2, 90))
    mask = torch.ones_like(tokens)
    mask[1, :7] = 0
    for name in ("delta_rule", "delta_rule_backward"):
        function = getattr(_core, name)
        monkeypatch.setattr(_core, name, lambda *a, f=function, n=name, **k: (calls.append(n), f(*a, **k))[1])

    def run():
        calls.clear()
        with torch.no_grad():
            result = model.eval()(tokens[:, :80], attention_mask=mask[:, :80], use_cache=True)
            logits, cache = [result.logits], result.past_key_values
            for t in range(80, 90):
                more = {"attention_mask": mask[:, : t + 1], "past_key_values": cache, "use_cache": True}
                logits.append(model(tokens[:, t : t + 1], **more).logits)
        model.train()(tokens, labels=tokens).loss.backward()
        gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        model.zero_grad()
        return torch.cat(logits, 1) * mask[..., None], gradients

    wanted, wanted_gradients = run()
    assert not calls
    model.set_attn_implementation("rapt")
    model = copy.deepcopy(model)
    got, gradients = run()
    assert calls.count("delta_rule") == 12 and calls.count("delta_rule_backward") == 1
    assert ratio(got, wanted) < 1e-5
    for gradient, one in zip(gradients, wanted_gradients, strict=True):
        assert ratio(gradient, one) < 1e-3
    model.set_attn_implementation("sdpa")
    assert torch.equal(run()[0], wanted) and not calls


def test_models_that_are_made_with_rapt(monkeypatch):
    import rapt.transformers

    rapt.transformers.register()
    one, other = linear_model("qwen3_next", attn_implementation="rapt"), linear_model("qwen3_next")
    calls, function = [], _core.delta_rule
    monkeypatch.setattr(_core, "delta_rule", lambda *a, **k: (calls.append(1), function(*a, **k))[1])
    tokens = torch.randint(3, 64, (1, 80))
    with torch.no_grad():
        compiled = torch.compile(one.eval(), backend="eager")(tokens).logits
        assert len(calls) == 1
        assert ratio(compiled, other.eval()(tokens).logits) < 1e-5 and len(calls) == 1


def test_models_off_the_cpu():
    """What is not on the CPU goes to the function that was there."""
    import rapt.transformers

    rapt.transformers.register()
    model = linear_model("qwen3_next", attn_implementation="rapt")
    run = sys.modules[type(model).__module__].torch_chunk_gated_delta_rule
    with torch.device("meta"):
        q, v, g = torch.empty(1, 80, 2, 16), torch.empty(1, 80, 2, 24), torch.empty(1, 80, 2)
    out, state = run(q, q, v, g=g, beta=g, output_final_state=True, rapt_delta_rule=True)
    assert out.device.type == "meta" and out.shape == v.shape and state.shape == (1, 2, 16, 24)


def test_models_refuse_packed_sequences():
    """transformers' convolution would mix them."""
    import rapt.transformers

    rapt.transformers.register()
    model = linear_model("qwen3_next", attn_implementation="rapt").eval()
    lengths = {"cu_seq_lens_q": torch.tensor([0, 30, 70], dtype=torch.int32), "max_length_q": 40}
    lengths |= {name.replace("_q", "_k"): x for name, x in lengths.items()}
    positions = torch.cat([torch.arange(30), torch.arange(40)])[None]
    with pytest.raises(ValueError, match="packed sequences"):
        model(torch.randint(3, 64, (1, 70)), position_ids=positions, use_cache=False, **lengths)


def test_models_that_were_pickled(tmp_path):
    """In another process, whose module has no functions of rapt's yet."""
    import rapt.transformers

    rapt.transformers.register()
    torch.save(linear_model("qwen3_next", attn_implementation="rapt"), tmp_path / "model.pt")
    script = """
import sys, torch, rapt._core, rapt.transformers
rapt.transformers.register()
model, calls, function = torch.load(sys.argv[1], weights_only=False), [], rapt._core.delta_rule
rapt._core.delta_rule = lambda *a, **k: (calls.append(1), function(*a, **k))[1]
with torch.no_grad():
    model(torch.randint(3, 64, (1, 80)))
print(len(calls))
"""
    run = subprocess.run([sys.executable, "-c", script, tmp_path / "model.pt"], capture_output=True, text=True)
    assert run.stdout.strip() == "1", run.stderr


def test_models_of_linear_layers_only():
    """Neither silent nor warned about; a layer whose forward is its base's is one, too."""
    pytest.importorskip("transformers")
    import rapt.transformers

    rapt.transformers.register()
    model = linear_model("qwen3_next", attn_implementation="sdpa", layer_types=["linear_attention"] * 2)
    layers = [layer for layer in model.modules() if type(layer).__name__.endswith("GatedDeltaNet")]
    kind = type(layers[0])

    def forward(self, *args, **kwargs):
        return kind.forward(self, *args, **kwargs)

    layers[0].__class__ = type("Own", (kind,), {"forward": forward})
    model.set_attn_implementation("rapt")
    before = rapt._model_delta_rule.calls
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error", rapt.torch.FallbackWarning)
        model.eval()(torch.randint(3, 64, (1, 80)), use_cache=False)
    assert rapt._model_delta_rule.calls == before + 2


@pytest.mark.parametrize("grad", [False, True])
def test_options_are_refused_in_the_same_words(grad):
    q = torch.zeros(1, 4, 1, 8, requires_grad=grad)
    array = q.detach().numpy()
    for options in ({"scale": "x"}, {"gate_lower_bound": "x"}, {"l2norm_qk": "yes"}, {"rule": None}, {"rule": "deltas"}):
        with pytest.raises((TypeError, ValueError)) as wanted:
            rapt.delta_rule(array, array, array, **options)
        with pytest.raises(type(wanted.value)) as raised:
            rapt.torch.delta_rule(q, q, q, **options)
        assert str(raised.value) == str(wanted.value)


def test_tracing_and_transforms():
    q = torch.randn(1, 4, 1, 8)
    traced = torch.jit.trace(lambda x: rapt.torch.delta_rule(x, x, x), (q,))
    other = torch.randn(1, 4, 1, 8)
    assert torch.equal(traced(other), rapt.torch.delta_rule(other, other, other))
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="q: got a tensor of forward mode"):
        rapt.torch.delta_rule(forward_ad.make_dual(q, q), q, q)
    for transform in (torch.func.grad, torch.vmap):
        with pytest.raises(NotImplementedError, match="q: got a tensor of forward mode or of a torch.func transform"):
            transform(lambda x: rapt.torch.delta_rule(x, x, x).sum())(q[None])
    with pytest.raises(ValueError, match="final_state: got a tensor that requires grad"):
        rapt.torch.delta_rule(q, q, q, return_state=True, final_state=torch.zeros(1, 1, 8, 8, requires_grad=True))


def onnx_linear_attention(
    query, key, value, past_state=None, decay=None, beta=None, *, q_num_heads, kv_num_heads, update_rule, scale=0.0
):  # fmt: skip
    """ONNX's LinearAttention by rapt: tensors [B, T, heads * size]; decay [B, T, heads * size] or [B, T, heads], beta
    [B, T, heads] or [B, T, 1]. Returns (output, present_state)."""
    sizes = {"q": (query, q_num_heads), "k": (key, kv_num_heads), "v": (value, kv_num_heads)}
    q, k, v = (np.ascontiguousarray(x).reshape(*x.shape[:2], n, -1) for x, n in sizes.values())
    if decay is not None and decay.shape[-1] != kv_num_heads:
        decay = decay.reshape(k.shape)
    if beta is not None:
        beta = np.broadcast_to(beta, (*beta.shape[:2], kv_num_heads))
    out, state = rapt.delta_rule(
        q, k, v, decay, beta, rule=update_rule, scale=scale or None, initial_state=past_state, return_state=True
    )
    return out.reshape(*out.shape[:2], -1), state


@pytest.mark.parametrize("readers", [1, 3])
@pytest.mark.parametrize("of_channels", [False, True])
@pytest.mark.parametrize("one_beta", [False, True])
@pytest.mark.parametrize("update_rule", ["linear", "gated", "delta", "gated_delta"])
def test_linear_attention_of_onnx(update_rule, of_channels, one_beta, readers):
    rng = np.random.default_rng(0)
    B, T, H, D, V = 2, 11, 2, 16, 24
    query, key, value = (rng.standard_normal((B, T, n), np.float32) for n in (H * readers * D, H * D, H * V))
    key /= np.sqrt(D, dtype=np.float32)
    decay = -rng.random((B, T, H * D if of_channels else H), np.float32) if "gated" in update_rule else None
    beta = rng.random((B, T, 1 if one_beta else H), np.float32) if "delta" in update_rule else None
    past = rng.standard_normal((B, H, D, V), np.float32)
    options = {"q_num_heads": H * readers, "kv_num_heads": H, "update_rule": update_rule}
    output, present = onnx_linear_attention(query, key, value, past, decay, beta, **options)
    wanted, states = numpy_delta_rule(
        query.reshape(B, T, -1, D), key.reshape(B, T, H, D), value.reshape(B, T, H, V),
        None if decay is None else decay.reshape((B, T, H, D) if of_channels else (B, T, H)),
        None if beta is None else np.broadcast_to(beta, (B, T, H)), rule=update_rule, initial_state=past
    )  # fmt: skip
    np.testing.assert_allclose(output, wanted.reshape(B, T, -1), rtol=0, atol=2e-5)
    np.testing.assert_allclose(present, states[:, -1], rtol=0, atol=2e-5)
    # In two calls, from the state that the first one leaves.
    cut = [[None if x is None else x[:, a:b] for x in (query, key, value, decay, beta)] for a, b in ((0, 4), (4, T))]
    first, state = onnx_linear_attention(*cut[0][:3], past, *cut[0][3:], **options)
    second, last = onnx_linear_attention(*cut[1][:3], state, *cut[1][3:], **options)
    np.testing.assert_allclose(np.concatenate((first, second), 1), output, rtol=0, atol=1e-5)
    np.testing.assert_allclose(last, present, rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_of_the_gated_delta_rule_as_flash_linear_attention_has_it(dtype):
    t = draw(b=2, t=100, hq=2, hk=2, hv=6, d=32, dv=64, decay="head", dtype=dtype)
    t["g"], t["beta"] = t["g"].float(), t["beta"].float()
    *_, got = losses(lambda **given: rapt.torch.chunk_gated_delta_rule(**given, output_final_state=True), t)
    *_, wanted = losses(loop, t)
    limits = {"g": 0.02, "beta": 0.02}
    assert all(ratio(got[name], wanted[name]) < limits.get(name, 0.008) for name in t)


def test_gradients_with_autocast():
    """Projections in bfloat16, decays in float32, as models have them."""
    torch.manual_seed(0)
    x, weights = torch.randn(2, 40, 24), torch.randn(3, 24, 32, requires_grad=True)
    g, beta = -torch.rand(2, 40, 2, 16), torch.rand(2, 40, 2)

    def loss(function):
        q, k, v = ((x @ w).unflatten(-1, (2, 16)) for w in weights.unbind())
        return function(q, k, v, g, beta, l2norm_qk=True).float().square().mean(), q.dtype

    with torch.autocast("cpu", torch.bfloat16):
        got, dtype = loss(rapt.torch.delta_rule)
    assert dtype == torch.bfloat16
    wanted, _ = loss(lambda *given, **options: loop(*given, **options)[0])
    (got,), (wanted,) = (torch.autograd.grad(made, weights) for made in (got, wanted))
    assert got.dtype == torch.float32 and ratio(got, wanted) < 0.03


def test_operators():
    t = draw()
    t["initial_state"] = t["initial_state"].mT.contiguous()
    given = [t.get(name) for name in NAMES]
    options = Options("gated_delta", 0.3, True, True, False, False, None, True)
    tests = ("test_schema", "test_faketensor", "test_autograd_registration", "test_aot_dispatch_static")
    given = [x if x is None else x.requires_grad_() for x in given]
    torch.library.opcheck(torch.ops.rapt.delta_rule.default, (*given, None, True, *options), test_utils=tests)
    given = [x if x is None else x.detach() for x in given]
    out, state = torch.empty(2, 9, 4, 12), torch.empty(2, 4, 12, 8)
    in_place = (out, state, None, None, *given, None, *options)
    torch.library.opcheck(torch.ops.rapt.delta_rule_.default, in_place, test_utils=tests)
    backward = (out, None, *given, None, *options, [x is not None for x in given])
    torch.library.opcheck(torch.ops.rapt.delta_rule_backward.default, backward, test_utils=tests[:2])


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled(backend):
    t = draw()

    def step(q, k, v, g, beta, initial_state):
        out, state = rapt.torch.delta_rule(q * 2, k, v, g, beta, initial_state=initial_state, return_state=True, l2norm_qk=True)
        return out.tanh(), state + 1

    compiled = torch.compile(step, backend=backend, fullgraph=True)
    with torch.no_grad():
        for wanted, got in zip(step(**t), compiled(**t)):
            torch.testing.assert_close(got, wanted)
    *_, wanted = losses(step, t)
    *_, got = losses(compiled, t)
    for name in t:
        torch.testing.assert_close(got[name], wanted[name])


def test_compiled_training_by_flash_linear_attentions_function():
    t = draw(b=1, t=40, state=False) | {"initial_state": torch.randn(2, 4, 8, 12)}

    def step(**given):
        return rapt.torch.fused_recurrent_gated_delta_rule(
            **given | {"g": None, "gk": given["g"]}, cu_seqlens=torch.tensor([0, 15, 40]), output_final_state=True
        )

    *_, wanted = losses(step, t)
    *_, got = losses(torch.compile(step, backend="aot_eager", fullgraph=True), t)
    assert all(torch.equal(got[name], wanted[name]) for name in t)


def test_compiled_for_any_length():
    compiled = torch.compile(rapt.torch.delta_rule, backend="aot_eager", fullgraph=True, dynamic=True)
    for t in (5, 6, 11):
        tensors = draw(b=1, t=t, state=False)
        torch.testing.assert_close(compiled(**tensors), rapt.torch.delta_rule(**tensors))
        starts = torch.tensor([0, 2, t])
        torch.testing.assert_close(
            compiled(**tensors, cu_seqlens=starts), rapt.torch.delta_rule(**tensors, cu_seqlens=starts)
        )


def test_compiled_in_place():
    t = draw()
    state = t.pop("initial_state")
    pool, slots = torch.cat((state, state)), torch.tensor([3, 0])

    def step(pool, q, k, v, g, beta):
        return rapt.torch.delta_rule(q, k, v, g, beta, initial_state=pool, final_state=pool, state_slots=slots)

    eager, compiled = pool.clone(), pool.clone()
    with torch.no_grad():
        wanted = step(eager, **t)
        got = torch.compile(step, backend="aot_eager", fullgraph=True)(compiled, **t)
    assert torch.equal(got, wanted) and torch.equal(compiled, eager)
    assert torch.equal(eager[1:3], pool[1:3]) and not torch.equal(eager, pool)


def test_refused():
    t = draw()
    for name, x in t.items():
        with pytest.raises(ValueError, match=f"^{name}: got a tensor on meta; wanted one on the cpu"):
            rapt.torch.delta_rule(**t | {name: x.to("meta")})
    with pytest.raises(TypeError, match="^v: got numpy.ndarray; wanted a tensor"):
        rapt.torch.delta_rule(**t | {"v": t["v"].numpy()})
    training = t | {"q": t["q"].requires_grad_()}
    for name in ("out", "final_state"):
        made = {"out": torch.empty(2, 9, 4, 12), "final_state": torch.empty(2, 4, 8, 12)}[name]
        with pytest.raises(ValueError, match=f"^{name}: got a tensor with inputs that require grad"):
            rapt.torch.delta_rule(**training, **{name: made})
    with pytest.raises(ValueError, match="^threads: got 1 with gradients"):
        rapt.torch.delta_rule(**training, threads=1)
    with torch.no_grad():
        assert not rapt.torch.delta_rule(**training, threads=1, isa=rapt.info()["isas"][-1]).requires_grad
    with pytest.raises(ValueError, match="^k: got shape"):
        rapt.torch.delta_rule(**training | {"k": t["k"][:, 1:]})
