"""Models of transformers with layers of linear attention, by rapt and by transformers' own loops."""

import copy
import subprocess
import sys
import warnings

import pytest
import rapt
import rapt.torch
import torch
from autograd_reference import ratio
from rapt import _core

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


def test_which_calls_on_a_gpu_are_ours(monkeypatch):
    """flash-linear-attention keeps gradients, and prompts for which rapt has no kernel made for prompts."""
    from rapt import _model_delta_rule

    class OnGpu:
        is_cuda, requires_grad = True, False

        def __init__(self, shape, dtype):
            self.shape, self.ndim, self.dtype = shape, len(shape), dtype

    def entry(phase, **facts):
        return {"operation": "delta_rule", "phase": phase, "unusable": "", "dtypes": ["bf16"], "max_head_dim": 128} | facts

    def ours(tokens, has_fla, entries=("all", "prefill"), grad=False, dtype=torch.bfloat16, channels=True, head_dim=16):
        monkeypatch.setattr(_model_delta_rule, "_has_fla", lambda: has_fla)
        monkeypatch.setattr(rapt._refusals, "_cuda_entries", lambda: [entry(phase) for phase in entries])
        rapt._refusals.cuda_runs.cache_clear(), rapt._refusals.cuda_prefills.cache_clear()
        q, k = OnGpu((1, tokens, 2, head_dim), torch.bfloat16), OnGpu((1, tokens, 2, head_dim), dtype)
        g = OnGpu((1, tokens, 2, head_dim) if channels else (1, tokens, 2), dtype)
        return _model_delta_rule._runs_here(q, k, k, {"g": g, "beta": torch.ones(1, requires_grad=grad)})

    try:
        assert ours(1, True) and ours(1, False) and ours(70, False, channels=False) and ours(70, True)
        assert not ours(70, True, channels=False) and not ours(70, True, dtype=torch.float32)
        assert not ours(70, True, entries=("all", "decode")) and not ours(70, True, head_dim=256)
        assert not ours(70, False, entries=()) and not ours(1, True, grad=True)
    finally:
        rapt._refusals.cuda_runs.cache_clear(), rapt._refusals.cuda_prefills.cache_clear()


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
