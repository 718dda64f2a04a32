"""Layers of transformers' models that normalise, rotate and append in one call give the same tokens."""

import contextlib
import copy
import functools
import importlib
import inspect
import linecache
import pathlib
import re
import threading
from unittest import mock

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import rapt.transformers  # noqa: E402
from rapt import _core, _model_cache_place, _model_rotary  # noqa: E402
from rapt.transformers import Cache, fused  # noqa: E402
from transformers import DynamicCache  # noqa: E402

rapt.transformers.register()
rapt.transformers.register("rapt_own", fuse=False)

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2}
SIZES |= {"vocab_size": 97, "max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
HEADS, WINDOW = {"head_dim": 16}, {"sliding_window": 8}
LAYERS = {"layer_types": ["sliding_attention", "full_attention"]} | WINDOW
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


def rope(kind, **others):
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 1e4, **others}}


# Families, sizes, and the classes of their layers that rotate.
FAMILIES = {
    "Llama": ({}, "LlamaAttention"),
    "Llama without groups": ({"num_key_value_heads": 4}, "LlamaAttention"),
    "Llama linear": (rope("linear", factor=4.0), "LlamaAttention"),
    "Llama llama3": (
        rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32),
        "LlamaAttention",
    ),
    "Qwen3 yarn": (HEADS | rope("yarn", factor=4.0, original_max_position_embeddings=64), "Qwen3Attention"),
    "Mistral": (WINDOW, "MistralAttention"),
    "Mixtral": (EXPERTS, "MixtralAttention"),
    "Qwen2": ({}, "Qwen2Attention"),
    "Qwen3": (HEADS | LAYERS | {"use_sliding_window": True}, "Qwen3Attention"),
    "Qwen3Moe": (HEADS | EXPERTS, "Qwen3MoeAttention"),
    "Gemma": (HEADS, "GemmaAttention"),
    "Gemma2": (HEADS | LAYERS, "Gemma2Attention"),
    "Gemma3": (HEADS | LAYERS, "Gemma3Attention"),
    "Phi3": (WINDOW | rope("default", partial_rotary_factor=0.5), "Phi3Attention"),
    "GPTNeoX": (rope("default", partial_rotary_factor=0.5), "GPTNeoXAttention"),
    "Glm": (HEADS | rope("default", partial_rotary_factor=0.5), "GlmAttention"),
    "Glm4Moe": (HEADS | {"use_qk_norm": True, "n_routed_experts": 4, "first_k_dense_replace": 2}, "Glm4MoeAttention"),
    "Helium": (HEADS, "HeliumAttention"),
    "Ernie4_5": (HEADS, "Ernie4_5Attention"),
    "Cohere": ({"use_qk_norm": True}, "CohereAttention"),
    "Cohere2": (LAYERS, "Cohere2Attention"),
    "SmolLM3": ({"no_rope_layers": [1, 0]}, "SmolLM3Attention"),
    "Exaone4": (LAYERS, "Exaone4Attention"),
    "Olmo2": ({}, "Olmo2Attention"),
    "GptOss": (HEADS | EXPERTS | LAYERS, "GptOssAttention"),
    "Granite": ({}, "GraniteAttention"),
    "Ministral3": (
        HEADS | rope("yarn", factor=4.0, original_max_position_embeddings=16, llama_4_scaling_beta=0.1),
        "Ministral3Attention",
    ),
}
OPTIONS = {"max_new_tokens": 12, "do_sample": False}


def model_of(family, attention="rapt", dtype=torch.float32, **more):
    sizes, _ = FAMILIES[family]
    name = family.partition(" ")[0]
    config = getattr(transformers, "Gemma3TextConfig" if name == "Gemma3" else f"{name}Config")(**SIZES | sizes | more)
    torch.manual_seed(5)
    model = getattr(transformers, f"{name}ForCausalLM")._from_config(config, attn_implementation=attention).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() == 1:  # norms that matter
                p.add_(torch.randn_like(p) * 0.3)
            elif "embed" not in name:
                p.mul_(6)
    return model.to(dtype)


def prompt():
    ids = torch.randint(2, 97, (2, 11), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    return {"input_ids": ids, "attention_mask": mask}


@pytest.fixture
def calls(monkeypatch):
    """For each call of rotary_append_kv, whether it was given a cache and norms."""
    made = []

    class Counting:
        def __getattr__(self, name):
            return getattr(_core, name)

        def rotary_append_kv(self, *given):
            _core.rotary_append_kv(*given)
            made.append((given[3] is not None, given[10] is not None))

    for module in (_model_rotary, _model_cache_place):
        monkeypatch.setattr(module, "_core", Counting())
    return made


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_those_of_eager_attention(family, calls):
    model = model_of(family)
    assert fused(model) == {FAMILIES[family][1]: "rapt"}
    got = model.generate(**prompt(), **OPTIONS)
    rotating = {"SmolLM3": 1, "Cohere2": 1, "Exaone4": 1}.get(family, 2)
    # The first call makes the cache, and a window moves in its memory now and then.
    assert len(calls) == 12 * rotating and sum(cached for cached, _ in calls) >= 8 * rotating
    normed = family.startswith(("Qwen3", "Gemma3", "Glm4Moe", "Exaone4"))
    assert {norms for _, norms in calls} == {normed}
    calls.clear()
    model.set_attn_implementation("eager")
    assert (model.generate(**prompt(), **OPTIONS) == got).all() and not calls
    # Text that says little would not tell.
    assert len(set(got[:, 11:].flatten().tolist())) > 5


@pytest.mark.parametrize(
    "options", [{"prefill_chunk_size": 4}, {"num_beams": 3}, {"cache": "in place"}, {"cache": "dynamic"}], ids=str
)
@pytest.mark.parametrize("family", ["Llama", "Qwen3", "Gemma3"])
def test_ways_to_generate(family, options, calls):
    def generate(attention):
        model = model_of(family, attention)
        kinds = {"in place": Cache, "dynamic": DynamicCache}
        cache = {"past_key_values": kinds[options["cache"]](config=model.config)} if "cache" in options else options
        return model.generate(**prompt(), **OPTIONS, **cache)

    got, made = generate("rapt"), len(calls)
    assert made >= 24 and any(cached for cached, _ in calls) == (options.get("cache") != "dynamic")
    assert (generate("eager") == got).all() and len(calls) == made


@pytest.mark.parametrize("attention", ["rapt", "rapt_flash"])
def test_inference_mode_and_sequences_without_padding(attention, calls):
    model = model_of("Qwen3", attention)
    with torch.inference_mode():
        got = model.generate(**prompt(), **OPTIONS)
        assert len(calls) == 24
    assert (model_of("Qwen3", "eager").generate(**prompt(), **OPTIONS) == got).all()


def logits(model, cache, parts=(6, 4, 1)):
    ids, made = prompt()["input_ids"].to(model.device), []
    with torch.no_grad():
        for part in ids.split(parts, 1):
            made.append(model(part, past_key_values=cache).logits)
    return torch.cat(made, 1)


@pytest.mark.parametrize("kv_dtype", ["i8", "i4x2", "f8e4m3"])
@pytest.mark.parametrize("family", ["Llama", "Qwen3 yarn"])
def test_quantised_caches(family, kv_dtype, calls):
    """A number halfway between two codes may become either."""
    model = model_of(family)
    got = logits(model, Cache(model.config, kv_dtype=kv_dtype))
    assert sum(cached for cached, _ in calls) == 4 and len(calls) == 6
    plain = logits(model, Cache(model.config))
    model.set_attn_implementation("rapt_own")
    wanted = logits(model, Cache(model.config, kv_dtype=kv_dtype))
    assert 0 < (plain - wanted).norm() and (got - wanted).norm() < 0.5 * (plain - wanted).norm()


def test_forks(calls):
    model = model_of("Qwen3 yarn")
    cache = Cache(model.config)
    logits(model, cache)
    fork, copied = cache.fork(2), copy.deepcopy(cache)
    copied.batch_repeat_interleave(2)
    ids = torch.tensor([[5], [6], [7], [8]])
    with torch.no_grad():
        for _ in range(2):
            calls.clear()
            got = model(ids, past_key_values=fork).logits
            torch.testing.assert_close(got, model(ids, past_key_values=copied).logits, rtol=1e-4, atol=1e-4)
        assert [cached for cached, _ in calls] == [True] * 4


@pytest.mark.parametrize("family", ["Llama", "Qwen3", "Gemma3"])
def test_bfloat16_is_no_further_from_float32(family):
    """Rounded once, where the model's own code rounds after each step."""
    exact = logits(model_of(family), None, (11,))
    ours, theirs = (logits(model_of(family, name, torch.bfloat16), None, (11,)) for name in ("rapt", "rapt_own"))
    assert 0 < (ours - exact).norm() < 1.2 * (theirs - exact).norm()


@pytest.mark.filterwarnings("ignore")  # of traces
def test_gradients_and_compiled_code_are_the_models_own(calls):
    ours, theirs = model_of("Qwen3 yarn"), model_of("Qwen3 yarn", "rapt_own")
    for model in (ours, theirs):
        model(**prompt(), labels=prompt()["input_ids"]).loss.backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(ours.parameters(), theirs.parameters()))
    ours.requires_grad_(False)  # which a trace wants
    ids = prompt()["input_ids"]
    with torch.no_grad():
        compiled = torch.compile(ours, backend="eager", fullgraph=True)(ids, use_cache=False).logits
        traced = torch.jit.trace(lambda ids: ours(ids, use_cache=False).logits, ids, check_trace=False)(ids)
        for got in (compiled, traced):
            torch.testing.assert_close(got, theirs(ids).logits, rtol=1e-4, atol=1e-4)
    assert not calls


def test_other_attention_runs_the_models_own_code(calls, monkeypatch):
    model, alike = model_of("Qwen3"), model_of("Qwen3", "rapt_own")
    assert fused(alike) == {"Qwen3Attention": "its attention is another, or has fuse=False"}
    theirs, seen = type(model.model.layers[0].self_attn).forward.__wrapped__, []
    assert theirs.__module__ == "transformers.models.qwen3.modeling_qwen3" and theirs.__code__.co_name == "forward"
    rotate = theirs.__globals__["apply_rotary_pos_emb"]
    monkeypatch.setitem(theirs.__globals__, "apply_rotary_pos_emb", lambda *args: seen.append(1) or rotate(*args))
    wanted = logits(alike, None)
    assert not calls and len(seen) == 6
    # A function that somebody has put in place of the model's is called, with rapt's attention too.
    assert torch.equal(logits(model, None), wanted) and len(seen) == 12 and not calls
    monkeypatch.undo()
    model.set_attn_implementation("sdpa")
    model(**prompt())
    assert fused(model) == {"Qwen3Attention": "its attention is another, or has fuse=False"}


def test_a_name_may_stop_fusing(calls):
    rapt.transformers.register("rapt_both")
    model = model_of("Llama", "rapt_both")
    logits(model, None)
    made = len(calls)
    rapt.transformers.register("rapt_both", fuse=False)
    logits(model, None)
    assert made == len(calls) == 6 and fused(model) == {"LlamaAttention": "its attention is another, or has fuse=False"}


@pytest.mark.parametrize("change", ["hook", "global hook", "forward", "weight", "module", "class"])
def test_norms_that_are_more_than_norms_are_called(change, calls):
    model, wanted, seen = model_of("Qwen3"), logits(model_of("Qwen3", "rapt_own"), None), []
    with contextlib.ExitStack() as undo:
        if change == "global hook":
            handle = torch.nn.modules.module.register_module_forward_hook(lambda m, *_: seen.append(m))
            undo.callback(handle.remove)
        if change == "class":
            kind = type(model.model.layers[0].self_attn.q_norm)
            logits(model, None), calls.clear()  # the class is known before it changes
            known = kind.forward
            by_class = functools.wraps(known)(lambda self, x: seen.append(self) or known(self, x))
            undo.enter_context(mock.patch.object(kind, "forward", by_class))
        for layer in model.model.layers:
            norm = layer.self_attn.q_norm
            if change == "hook":
                norm.register_forward_hook(lambda m, *_: seen.append(m))
            elif change == "forward":
                norm.forward = lambda x, forward=norm.forward: seen.append(norm) or forward(x)
            elif change == "weight":
                torch.nn.utils.parametrize.register_parametrization(norm, "weight", torch.nn.Identity())
            elif change == "module":
                layer.self_attn.q_norm = torch.nn.Sequential(norm)
        torch.testing.assert_close(logits(model, None), wanted, rtol=1e-4, atol=1e-4)
    assert calls == [(False, False)] * 6  # rotation alone
    assert change in ("weight", "module") or len(seen) >= 6


def test_a_decorated_forward_stays():
    model = model_of("Qwen2")
    kind = type(model.model.layers[0].self_attn)

    class Decorated(kind):
        @functools.wraps(kind.forward.__wrapped__)
        def forward(self, *args, **kwargs):
            return kind.forward(self, *args, **kwargs)

    for layer in model.model.layers:
        layer.self_attn.__class__ = Decorated
    assert fused(model) == {"Decorated": "its forward is decorated"}


def test_threads_may_make_models_at_once(monkeypatch):
    """All see the same class with the new forward, whoever has made it."""
    model = model_of("Qwen2")
    kind = type(model.model.layers[0].self_attn)
    monkeypatch.setattr(kind, "forward", kind.forward.__wrapped__)
    _model_rotary._ours.cache_clear()
    together, rewritten = threading.Barrier(2), _model_rotary.rewritten
    monkeypatch.setattr(_model_rotary, "rewritten", lambda *given: [together.wait(60), rewritten(*given)][1])
    threads = [threading.Thread(target=_model_rotary.prepare, args=(model,)) for _ in range(2)]
    [thread.start() for thread in threads], [thread.join() for thread in threads]
    assert fused(model) == {"Qwen2Attention": "rapt"}


def test_functions_that_are_modules(calls, monkeypatch):
    """The package `kernels`, if installed, makes modules of functions that rotate, and may replace their forward."""
    model = model_of("Qwen2", "rapt_own")
    kind = type(model.model.layers[0].self_attn)
    theirs = inspect.unwrap(kind.forward)
    func = theirs.__globals__["apply_rotary_pos_emb"]

    class Func(torch.nn.Module):
        def forward(self, *args, **kwargs):
            return func(*args, **kwargs)

    wanted, module, seen = logits(model, None), Func(), []
    monkeypatch.setattr(kind, "forward", theirs)
    monkeypatch.setitem(theirs.__globals__, "apply_rotary_pos_emb", module)
    _model_rotary._ours.cache_clear()
    model = model_of("Qwen2")
    assert fused(model) == {"Qwen2Attention": "rapt"}
    torch.testing.assert_close(logits(model, None), wanted, rtol=1e-4, atol=1e-4)
    assert len(calls) == 6
    module.forward = lambda *args: seen.append(1) or func(*args)
    assert torch.equal(logits(model, None), wanted) and len(seen) == len(calls) == 6
    _model_rotary._ours.cache_clear()


def test_what_is_not_known_stays():
    config = transformers.NanoChatConfig(**SIZES)
    model = transformers.NanoChatForCausalLM._from_config(config, attn_implementation="rapt")
    assert fused(model) == {"NanoChatAttention": "it rotates in another way"}
    assert not hasattr(type(model.model.layers[0].self_attn).forward, "rapt_rotary")
    config = transformers.PersimmonConfig(**SIZES)
    model = transformers.PersimmonForCausalLM._from_config(config, attn_implementation="rapt")
    assert fused(model) == {"PersimmonAttention": "it does not append what it has rotated"}
    model = model_of("Llama")
    layer = model.model.layers[1].self_attn
    layer.forward = lambda *args, **kwargs: type(layer).forward(layer, *args, **kwargs)
    assert fused(model) == {"LlamaAttention": "its forward was replaced"}
    with pytest.raises(TypeError, match="^model: got int"):
        fused(3)


@pytest.mark.parametrize(
    "old, new, reason",
    [
        ("past_key_values is not None", "past_key_values is None", "its source has changed"),
        ("(q * cos) + (", "(q * cos) - (", "it rotates in another way"),
    ],
)
def test_a_file_that_is_newer_than_its_module(monkeypatch, old, new, reason):
    """The names and constants of an edited file may be those of the code that runs."""
    theirs = inspect.unwrap(transformers.models.qwen2.modeling_qwen2.Qwen2Attention.forward)
    text = pathlib.Path(inspect.getsourcefile(theirs)).read_text()
    assert old in text
    for source, wanted in ((text, None), (text.replace(old, new), reason)):
        entry = len(source), None, source.splitlines(True), theirs.__code__.co_filename  # None: the file itself is not asked
        monkeypatch.setitem(linecache.cache, theirs.__code__.co_filename, entry)
        made = _model_rotary.rewritten(theirs, set(), lambda: False, lambda *given: None)
        assert (made if isinstance(made, str) else None) == wanted


def test_classes_in_the_guide_are_known():
    """Layers that a new version of transformers writes in another way run their own code: the guide must say so."""
    guide = (pathlib.Path(__file__).parents[2] / "docs/guide/python/transformers.md").read_text()
    (section,) = re.findall(r"## One call before attention\n(.*?)\n## ", guide, re.DOTALL)
    (line,) = [line for line in section.splitlines() if line.startswith("| fused |")]
    types = re.findall(r"`(\w+)`", line)
    assert len(types) > 20
    for model_type in types:
        module = importlib.import_module(f"transformers.models.{model_type}.modeling_{model_type}")
        layers = [x for x in vars(module).values() if isinstance(x, type) and x.__module__ == module.__name__]
        layers = [x for x in layers if issubclass(x, torch.nn.Module) and _model_rotary._forward_of(x) is not None]
        found = {x.__name__: _model_rotary._ours(_model_rotary._forward_of(x)) for x in layers}
        said = f"transformers {transformers.__version__}, {model_type}: {found}"
        assert found and not any(isinstance(x, str) for x in found.values()), said


@pytest.mark.parametrize(
    "name, fuse, error, message",
    [
        ("sdpa", True, ValueError, 'name: got "sdpa"; wanted a new one'),
        ("eager", True, ValueError, 'name: got "eager"; wanted a new one'),
        ("", True, ValueError, 'name: got ""; wanted a new one'),
        (1, True, TypeError, "name: got 1; wanted a str"),
        ("rapt", None, TypeError, "fuse: got None; wanted True or False"),
    ],
)
def test_refused_registrations(name, fuse, error, message):
    theirs = transformers.AttentionInterface()["sdpa"]
    with pytest.raises(error, match=message):
        rapt.transformers.register(name, fuse=fuse)
    assert transformers.AttentionInterface()["sdpa"] is theirs
