"""rapt.transformers.Cache on a GPU, with the one call before attention: the tokens of eager attention, and steps that take no other way."""

import copy

import pytest
import torch

transformers = pytest.importorskip("transformers")

import rapt  # noqa: E402
import rapt.transformers  # noqa: E402

if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)
if not any(entry["backend"] == "cuda" for entry in rapt.info()["entries"]):
    pytest.skip(rapt.info()["backends"][1]["missing"], allow_module_level=True)

import test_mla_models  # noqa: E402
from rapt import _model_cache, _refusals  # noqa: E402
from test_model_rotary import OPTIONS, WINDOW, calls, logits, model_of, prompt  # noqa: E402, F401
from transformers import DynamicCache  # noqa: E402

Cache = rapt.transformers.Cache
DEVICE = "cuda"
LAYERS = 2

pytestmark = pytest.mark.usefixtures("seeded")
# Not in bf16, for which PyTorch has the heads that no tensor-core kernel takes.
no_fallbacks = pytest.mark.usefixtures("without_fallbacks")


@pytest.fixture
def checked(monkeypatch):
    """For each append of keys, or of codes, that is not one call of LayerMemory's, its name."""
    made = []

    def counted(name):
        method = getattr(_model_cache._InPlace, name)
        return lambda self, *given: made.append(name) or method(self, *given)

    for name in ("append_to", "append_codes"):
        monkeypatch.setattr(_model_cache._InPlace, name, counted(name))
    return made


def on_gpu(inputs):
    return {name: tensor.to(DEVICE) for name, tensor in inputs.items()}


def tokens(b, n, seed=7):
    return torch.randint(2, 97, (b, n), generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def steps(model, ids, cache):
    """Logits of tokens that come one by one."""
    with torch.no_grad():
        return torch.cat([model(token, past_key_values=cache).logits for token in ids.split(1, 1)], 1)


@no_fallbacks
@pytest.mark.parametrize("padding", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("family", ["Llama", "Qwen3 yarn", "Olmo2", "GPTNeoX"])
def test_tokens_are_those_of_eager_attention(family, padding, calls, checked):
    """Each layer makes one call in each step, which also appends, except with the prompt, where there is no memory yet."""
    model = model_of(family).to(DEVICE)
    inputs = on_gpu(prompt() if padding else {"input_ids": prompt()["input_ids"]})
    got = model.generate(**inputs, **OPTIONS)
    assert [cached for cached, _ in calls] == [False] * LAYERS + [True] * 11 * LAYERS
    assert checked == ["append_to"] * 2 * LAYERS
    calls.clear()
    model.set_attn_implementation("eager")
    wanted = model.generate(**inputs, **OPTIONS, past_key_values=DynamicCache(config=model.config))
    assert torch.equal(got, wanted) and not calls
    assert len(set(got[:, 11:].flatten().tolist())) > 3


@pytest.mark.parametrize("family", ["Llama", "Qwen3 yarn"])
def test_bfloat16_is_no_further_from_float32(family, calls, checked):
    """With heads of 64, which tensor cores take. Rounded once, where the model's own code rounds after each step."""
    exact, ours, theirs = (
        logits(model, Cache(model.config))
        for model in (
            model_of(family, attention, dtype, head_dim=64).to(DEVICE)
            for attention, dtype in (("rapt_own", torch.float32), ("rapt", torch.bfloat16), ("rapt_own", torch.bfloat16))
        )
    )
    assert [cached for cached, _ in calls] == [False] * LAYERS + [True] * 2 * LAYERS and len(checked) == 3 * 2 * LAYERS
    assert ours.isfinite().all() and 0 < (ours - exact).norm() < 1.2 * (theirs - exact).norm()


@no_fallbacks
@pytest.mark.parametrize("attention", ["rapt", "rapt_own"])
@pytest.mark.parametrize("kv_dtype", ["i8", "i4x2", "f8e4m3"])
@pytest.mark.parametrize("family", ["Llama", "Qwen3 yarn"])
def test_quantised_caches(family, kv_dtype, attention, calls, checked):
    """Logits are those of the CPU, up to half of what quantisation changes: a number halfway between two codes may become either."""
    model = model_of(family, attention)
    wanted, plain = logits(model, Cache(model.config, kv_dtype=kv_dtype)), logits(model, Cache(model.config))
    calls.clear(), checked.clear()
    model.to(DEVICE)
    cache = Cache(model.config, kv_dtype=kv_dtype)
    got = logits(model, cache).cpu()
    assert 0 < (plain - wanted).norm() and (got - wanted).norm() < 0.5 * (plain - wanted).norm()
    assert checked == ["append_codes"] * LAYERS and all(layer.layer_memory.rows == 11 for layer in cache.layers)
    assert [cached for cached, _ in calls] == ([False] * LAYERS + [True] * 2 * LAYERS if attention == "rapt" else [])


@no_fallbacks
@pytest.mark.parametrize("length", [3, 11])
@pytest.mark.parametrize("family", ["Mistral", "Gemma3"])
def test_windows(family, length, calls, checked):
    """Tokens are those of eager attention for several windows. They move to the beginning of their memory once in a window."""
    model, ids = model_of(family).to(DEVICE), tokens(2, length)
    options = OPTIONS | {"max_new_tokens": 40}
    got = model.generate(ids, **options)
    assert len(calls) == 40 * LAYERS and sum(cached for cached, _ in calls) >= 30 * LAYERS
    assert len(checked) <= 2 * LAYERS * (2 + 40 // (WINDOW["sliding_window"] - 1))
    model.set_attn_implementation("eager")
    assert torch.equal(got, model.generate(ids, **options, past_key_values=DynamicCache(config=model.config)))


def test_quantised_windows(checked):
    """Logits of many steps are those of one forward over all tokens."""
    model, ids = model_of("Mistral").to(DEVICE), tokens(2, 40)
    got = steps(model, ids, Cache(model.config, kv_dtype="i8"))
    assert len(checked) <= LAYERS * (2 + 40 // (WINDOW["sliding_window"] - 1))
    with torch.no_grad():
        wanted, plain = (model(ids, past_key_values=Cache(model.config, kv_dtype=kv_dtype)).logits for kv_dtype in ("i8", None))
    assert 0 < (plain - wanted).norm() and (got - wanted).norm() < 0.5 * (plain - wanted).norm()


def cropped(cache, ids):
    cache.crop(-3)
    return cache, ids[:, :-3]


def reordered(cache, ids):
    beams = torch.tensor([1, 0]).to(DEVICE)
    cache.reorder_cache(beams)
    return cache, ids[beams]


def repeated(cache, ids):
    cache.batch_repeat_interleave(2)
    return cache, ids.repeat_interleave(2, 0)


def selected(cache, ids):
    chosen = torch.tensor([1]).to(DEVICE)
    cache.batch_select_indices(chosen)
    return cache, ids[chosen]


def copied(cache, ids):
    return copy.deepcopy(cache), ids


def forked(cache, ids):
    return cache.fork(2), ids.repeat_interleave(2, 0)


def forked_and_reordered(cache, ids):
    cache, ids = forked(cache, ids)
    beams = torch.tensor([3, 0, 2, 1]).to(DEVICE)  # which no part serves as it lies
    cache.reorder_cache(beams)
    return cache, ids[beams]


def forked_and_selected(cache, ids):
    cache, ids = forked(cache, ids)
    chosen = torch.tensor([0, 3, 2]).to(DEVICE)
    cache.batch_select_indices(chosen)
    return cache, ids[chosen]


CHANGES = [cropped, reordered, repeated, selected, copied, forked, forked_and_reordered, forked_and_selected]


@no_fallbacks
@pytest.mark.parametrize("kv_dtype", [None, "i8"])
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize("family", ["Llama", "Qwen3 yarn"])
def test_steps_go_on_from_a_changed_cache(family, change, kv_dtype, calls, checked):
    """Logits are those of a prompt that holds all of it. Codes may differ where a number lies halfway between two."""
    model, ids = model_of(family).to(DEVICE), tokens(2, 9)
    cache = Cache(model.config, kv_dtype=kv_dtype)
    with torch.no_grad():
        model(ids, past_key_values=cache)
    cache, ids = change(cache, ids)
    new = tokens(ids.shape[0], 4, seed=8)
    got = [steps(model, new[:, :1], cache)]  # which may make new memory
    calls.clear(), checked.clear()
    got.append(steps(model, new[:, 1:2], cache))
    assert calls == [(True, family != "Llama")] * LAYERS and not checked
    got.append(steps(model, new[:, 2:], cache))
    with torch.no_grad():
        wanted = model(torch.cat((ids, new), 1), past_key_values=Cache(model.config, kv_dtype=kv_dtype)).logits[:, -4:]
    if kv_dtype is None:
        torch.testing.assert_close(torch.cat(got, 1), wanted, rtol=1e-4, atol=1e-4)
    else:
        assert (torch.cat(got, 1) - wanted).norm() < 0.02 * wanted.norm()


@no_fallbacks
@pytest.mark.parametrize("kv_dtype", [None, "i8"])
def test_memory_grows_as_often_as_the_length_doubles(kv_dtype, calls, checked):
    model, ids = model_of("Qwen3 yarn").to(DEVICE), tokens(2, 70)
    got = steps(model, ids, Cache(model.config, kv_dtype=kv_dtype))
    # Room for 2, 6, 14, 30, 62 and 126 tokens; keys and values of a plain cache are appended one by one there.
    assert len(checked) == 6 * LAYERS * (2 if kv_dtype is None else 1)
    assert sum(cached for cached, _ in calls) == (70 - 6) * LAYERS and len(calls) == 70 * LAYERS
    with torch.no_grad():
        wanted = model(ids, past_key_values=Cache(model.config, kv_dtype=kv_dtype)).logits
    if kv_dtype is None:
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)
    else:
        assert (got - wanted).norm() < 0.02 * wanted.norm()


@no_fallbacks
@pytest.mark.parametrize("kv_dtype", [None, "i8"])
def test_latents(kv_dtype, checked):
    """DeepSeek's layers do not fuse, and append latents and rotary parts in one call."""
    eager, ours = (model.to(DEVICE) for model in test_mla_models.models("deepseek_v3"))
    cache, ids = Cache(ours.config, kv_dtype=kv_dtype), test_mla_models.prompt(False)["input_ids"].to(DEVICE)
    with torch.no_grad():
        got = torch.cat([ours(part, past_key_values=cache).logits for part in ids.split((12, 1, 1, 7), 1)], 1)
        wanted = eager(ids).logits
    layers = test_mla_models.SIZES["num_hidden_layers"]
    assert checked == (["append_codes"] * layers if kv_dtype else ["append_to"] * 2 * layers)
    error = (got - wanted).square().mean().sqrt() / wanted.std()
    assert 1e-4 < error < 0.2 if kv_dtype else error < 1e-4


@no_fallbacks
@pytest.mark.parametrize("kv_dtype", [None, "i8"])
def test_forks_of_latents(kv_dtype):
    model = test_mla_models.models("deepseek_v3")[1].to(DEVICE)
    cache, ids = Cache(model.config, kv_dtype=kv_dtype), test_mla_models.prompt(False)["input_ids"].to(DEVICE)
    with torch.no_grad():
        model(ids[:, :12], past_key_values=cache)
        fork, alone = cache.fork(2), copy.deepcopy(cache)
        for part in ids[:, 12:].split((1, 4, 1, 3), 1):
            wanted = model(part, past_key_values=alone).logits.repeat_interleave(2, 0)
            got = model(part.repeat_interleave(2, 0), past_key_values=fork).logits
            torch.testing.assert_close(got, wanted, rtol=0, atol=2e-4)


@no_fallbacks
def test_inference_mode_and_memory_made_outside_of_it():
    """Memory that was made in inference mode is left when it ends, and memory made before it is written there."""
    model, ids = model_of("Llama").to(DEVICE), tokens(2, 12)
    cache, got = Cache(model.config), []
    for i, mode in enumerate((torch.no_grad, torch.inference_mode, torch.inference_mode, torch.no_grad)):
        with mode():
            got.append(model(ids[:, 3 * i : 3 * i + 3], past_key_values=cache).logits)
    with torch.no_grad():
        wanted = model(ids).logits
        torch.testing.assert_close(torch.cat([x.clone() for x in got], 1), wanted, rtol=1e-4, atol=1e-4)


@no_fallbacks
@pytest.mark.parametrize("kv_dtype", [None, "i8"])
def test_a_side_stream(kv_dtype, calls):
    """Calls of the extension are queued behind a kernel that keeps a stream busy."""
    model, ids = model_of("Qwen3 yarn").to(DEVICE), tokens(2, 11)

    def run(stream):
        cache, made = Cache(model.config, kv_dtype=kv_dtype), []
        with torch.no_grad():
            token = model(ids, past_key_values=cache).logits[:, -1:].argmax(-1)
            torch.cuda.synchronize()
            with torch.cuda.stream(stream):
                for _ in range(8):
                    torch.cuda._sleep(10_000_000)  # some milliseconds
                    token = model(token, past_key_values=cache).logits[:, -1:].argmax(-1)
                    made.append(token)
            torch.cuda.synchronize()
        return torch.cat(made, 1)

    wanted = run(torch.cuda.current_stream())
    assert torch.equal(run(torch.cuda.Stream()), wanted) and len(calls) == 2 * 9 * LAYERS


@no_fallbacks
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("kv_dtype", [None, "i8"])
def test_another_gpu_than_the_current_one(kv_dtype, calls, checked):
    model, ids = model_of("Qwen3 yarn"), prompt()["input_ids"]
    with torch.cuda.device(0):
        cache = Cache(model.config, kv_dtype=kv_dtype)
        wanted = logits(model.to("cuda:0"), Cache(model.config, kv_dtype=kv_dtype))
        calls.clear(), checked.clear()
        got = logits(model.to("cuda:1"), cache)
    assert got.device == cache.layers[0].keys.device == torch.device("cuda:1") and ids.shape[1] == cache.get_seq_length()
    assert [cached for cached, _ in calls] == [False] * LAYERS + [True] * 2 * LAYERS
    assert len(checked) == LAYERS * (2 if kv_dtype is None else 1)
    torch.testing.assert_close(got.cpu(), wanted.cpu(), rtol=1e-4, atol=1e-4)


def test_without_kernels_for_the_gpu_pytorch_appends(calls, monkeypatch):
    """As where rapt is installed without its CUDA backend."""
    model, inputs = model_of("Qwen3 yarn").to(DEVICE), on_gpu(prompt())
    wanted = model.generate(**inputs, **OPTIONS)
    calls.clear()
    monkeypatch.setattr(_refusals, "cuda_runs", lambda operation: False)
    got = model.generate(**inputs, **OPTIONS, return_dict_in_generate=True)
    assert torch.equal(got.sequences, wanted) and not calls
    assert all(layer.layer_memory is None and layer.memory for layer in got.past_key_values.layers)
