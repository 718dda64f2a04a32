"""rapt.transformers.Cache: what DynamicCache does, in memory that is not copied for every token."""

import copy
import io
import random

import pytest
import torch

transformers = pytest.importorskip("transformers")

import rapt.transformers  # noqa: E402
import test_mla_models  # noqa: E402
from test_delta_rule_models import linear_model  # noqa: E402
from test_transformers import CONFIGS, SIZES, models, pair, prompt  # noqa: E402
from transformers import DynamicCache  # noqa: E402
from transformers.cache_utils import (  # noqa: E402
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
)

rapt.transformers.register()
Cache = rapt.transformers.Cache

pytestmark = pytest.mark.usefixtures("seeded")


def caches(*layers, kv_dtype=None):
    """The same layers as transformers has them, and appending in place."""
    wanted, got = DynamicCache(), DynamicCache()
    for cache in (wanted, got):
        cache.layer_class_to_replicate = None
        cache.layers = [make() for make in layers]
    rapt._model_cache.write_in_place(got, kv_dtype=kv_dtype)
    assert all(isinstance(layer, rapt._model_cache._InPlace) for layer in got.layers)
    return wanted, got


def assert_same(got, wanted, equal=torch.equal):
    assert got.get_seq_length() == wanted.get_seq_length()
    for mine, theirs in zip(got.layers, wanted.layers):
        assert mine.get_mask_sizes(3) == theirs.get_mask_sizes(3)
        for name in ("keys", "values", "indexer_keys"):
            a, b = getattr(mine, name, None), getattr(theirs, name, None)
            assert (a is None) == (b is None)
            assert a is None or (a.dtype == b.dtype and (torch.equal if name == "indexer_keys" else equal)(b, a))


LAYERS = {
    "full": DynamicLayer,
    "window of 1": lambda: DynamicSlidingWindowLayer(sliding_window=1),
    "window of 6": lambda: DynamicSlidingWindowLayer(sliding_window=6),
    "indexed": DynamicIndexedLayer,
    "hybrid": LinearAttentionAndFullAttentionLayer,
}


@pytest.mark.parametrize(("kind", "recording"), [*((kind, False) for kind in LAYERS), ("window of 1", True), ("window of 6", True)])
@pytest.mark.parametrize("seed", range(4))
def test_random_calls_do_what_dynamic_caches_do(kind, recording, seed):
    draw = random.Random(f"{kind} {recording} {seed}")
    types = draw.choice([(torch.float32, torch.float32), (torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)])
    random_calls(caches(LAYERS[kind]), kind, recording, draw, (8, 5), types, torch.equal)


def random_calls(both, kind, recording, draw, sizes, types, equal):
    """On transformers' cache and on ours, which have to be the same by `equal` after each."""
    batch = 2
    if recording:
        for cache in both:
            cache.activate_past_recording()
    for _ in range(60):
        call = draw.choice(["update"] * 5 + ["crop", "reorder", "repeat", "select", "deepcopy", "file", "reset"])
        length = both[0].get_seq_length()
        if call == "update":
            n = draw.choice([1, 1, 1, 2, 9])
            new = [torch.randn(batch, 2, n, d).to(dtype) for d, dtype in zip(sizes, types)]
            with torch.inference_mode() if draw.random() < 0.3 else torch.no_grad():
                states = [cache.update(*new, 0) for cache in both]
                assert all(equal(a, b) for a, b in zip(*states))
                if kind == "indexed":
                    keys = torch.randn(batch, n, 4)
                    assert torch.equal(*(cache.update_indexer(keys, 0) for cache in both))
            if recording:
                for cache in both:
                    cache.crop(-min(n - 1, 1))
        elif length == 0:
            continue
        elif call == "crop" and kind in ("full", "indexed") and length > 1:
            for cache in both:
                cache.crop(-1 if length < 4 else -3)
        elif call == "reorder":
            beams = torch.tensor([draw.randrange(batch) for _ in range(batch)])
            with torch.no_grad() if draw.random() < 0.5 else torch.enable_grad():
                for cache in both:
                    cache.reorder_cache(beams)
        elif call == "repeat" and batch < 4:
            batch *= 2
            for cache in both:
                cache.batch_repeat_interleave(2)
        elif call == "select" and batch > 2:
            for cache in both:
                cache.batch_select_indices(torch.tensor([2, 0]))
            batch = 2
        elif call == "deepcopy":
            kept, both = both, tuple(copy.deepcopy(cache) for cache in both)
            new = [torch.full((batch, 2, 3, d), 9.0) for d in sizes]
            with torch.no_grad():
                kept[1].update(*new, 0)  # is of no concern to the copy
        elif call == "file":
            file = io.BytesIO()
            torch.save(both[1], file)
            file.seek(0)
            both = both[0], torch.load(file, weights_only=False)
            assert isinstance(both[1].layers[0], rapt._model_cache._InPlace)
        elif call == "reset" and kind != "hybrid":
            for cache in both:
                cache.reset()
        assert_same(both[1], both[0], equal)


@pytest.mark.parametrize("kind", ["full", "window of 6", "indexed"])
def test_memory_is_taken_anew_as_often_as_the_length_doubles(kind):
    _, cache = caches(LAYERS[kind])
    places = set()
    with torch.no_grad():
        for _ in range(200):
            keys, _ = cache.update(torch.randn(1, 2, 1, 8), torch.randn(1, 2, 1, 8), 0)
            places.add(keys.untyped_storage().data_ptr())
            if kind == "indexed":
                cache.update_indexer(torch.randn(1, 1, 4), 0)
    assert len(places) <= (4 if kind == "window of 6" else 9)
    memory = cache.layers[0].memory["keys"]
    assert memory.shape[-2] <= (12 if kind == "window of 6" else 400)


@pytest.mark.parametrize("kv_dtype", [None, "i8"])
def test_windows_are_moved_once_in_so_many_tokens_as_they_have(kv_dtype):
    """In place, between the two halves of their memory: no step but these copies old rows."""
    _, cache = caches(lambda: DynamicSlidingWindowLayer(sliding_window=17), kv_dtype=kv_dtype)
    layer, moves, before = cache.layers[0], 0, None
    with torch.no_grad():
        cache.update(torch.randn(1, 2, 300, 8), torch.randn(1, 2, 300, 8), 0)
        for step in range(200):
            cache.update(torch.randn(1, 2, 1, 8), torch.randn(1, 2, 1, 8), 0)
            place = (layer.keys if kv_dtype is None else layer.keys.codes).data_ptr()
            moves += before is not None and place < before
            before = place
            memory = layer.memory["keys"]
            assert memory.shape[-2] == 2 * 17 and layer.keys.shape[-2] == 16
    assert moves <= 200 / 16


def test_max_length_is_where_memory_stops_growing():
    cache = Cache(transformers.LlamaConfig(**SIZES), max_length=50)
    with torch.no_grad():
        cache.update(torch.randn(1, 2, 40, 8), torch.randn(1, 2, 40, 8), 0)
        assert cache.layers[0].memory["keys"].shape[-2] == 50
        place = cache.layers[0].keys.data_ptr()
        for _ in range(10):
            cache.update(torch.randn(1, 2, 1, 8), torch.randn(1, 2, 1, 8), 0)
        assert cache.layers[0].keys.data_ptr() == place
        keys, _ = cache.update(torch.randn(1, 2, 1, 8), torch.randn(1, 2, 1, 8), 0)  # more than was said
        assert keys.shape[-2] == 51


@pytest.mark.parametrize("length", [0, -1, True, 2.5, "8"])
def test_max_length_must_be_a_number_of_tokens(length):
    with pytest.raises(ValueError, match="max_length: got .*; wanted None or a number of tokens, 1 or more"):
        Cache(max_length=length)


@pytest.mark.parametrize("config", ["llama", {}, torch.nn.Linear(1, 1)], ids=str)
def test_config_must_be_one(config):
    with pytest.raises(TypeError, match="config: got .*; wanted None or a model's config"):
        Cache(config)


@pytest.mark.parametrize(("kind", "rows"), [("full", 41), ("window of 6", 5)])
@pytest.mark.parametrize("tokens", [1, 0])
def test_files_and_copies_hold_what_is_there_and_no_room(kind, rows, tokens):
    _, cache = caches(LAYERS[kind])
    with torch.no_grad():
        cache.update(torch.randn(1, 2, 41 - tokens, 8), torch.randn(1, 2, 41 - tokens, 8), 0)
        if tokens:
            cache.update(torch.randn(1, 2, 1, 8), torch.randn(1, 2, 1, 8), 0)
    for layer in (copy.deepcopy(cache).layers[0], copy.copy(cache.layers[0])):
        assert layer.keys.untyped_storage().nbytes() == rows * 2 * 8 * 4
        assert torch.equal(layer.keys, cache.layers[0].keys)


def test_rows_of_the_cache_may_be_appended_to_it():
    both = DynamicCache(), Cache()
    with torch.no_grad():
        new = torch.randn(1, 2, 65, 8)
        for cache in both:
            keys, values = cache.update(new, new, 0)
            cache.crop(-35)
            cache.update(keys[..., 2:20, :], values[..., 2:20, :], 0)
    assert_same(both[1], both[0])


def test_inference_mode_now_and_then():
    both = caches(DynamicLayer)
    new, beams = torch.randn(2, 2, 3, 8), torch.tensor([1, 1])
    for cache in both:
        with torch.no_grad():
            cache.update(new, new, 0)
        with torch.inference_mode():
            cache.reorder_cache(beams)
            cache.reorder_cache(beams)
        with torch.no_grad():
            cache.reorder_cache(beams)
            cache.update(new, new, 0)
    assert_same(both[1], both[0])


def test_what_a_caller_does_to_its_tensors_later_is_of_no_concern():
    for kind in ("full", "window of 6"):
        _, cache = caches(LAYERS[kind])
        new = torch.ones(1, 2, 3, 8)
        with torch.no_grad():
            cache.update(new, new, 0)
            new.zero_()
            assert (cache.update(new, new, 0)[0][..., :3, :] == 1).all()


def test_where_gradients_are_recorded_nothing_is_written_over():
    cache = Cache()
    with torch.no_grad():
        cache.update(torch.randn(1, 1, 3, 4), torch.randn(1, 1, 3, 4), 0)
    new = torch.randn(1, 1, 1, 4, requires_grad=True)
    keys, values = cache.update(new, new, 0)
    cache.update(new, new, 0)
    (keys * values).sum().backward()
    assert torch.allclose(new.grad, 2 * new)


def test_other_types_are_as_with_dynamic_caches_and_other_shapes_are_refused():
    both = DynamicCache(), Cache()
    with torch.no_grad():
        for dtype in (torch.bfloat16, torch.bfloat16, torch.float32, torch.bfloat16):
            new = torch.randn(2, 2, 3, 8).to(dtype)
            for cache in both:
                cache.update(new, new, 0)
            assert_same(both[1], both[0])
        for shape in ((1, 2, 3, 8), (2, 1, 3, 8), (2, 2, 3, 1)):
            had, wanted = (rf"\[{b}, {h}, n, {d}\] on cpu" for b, h, _, d in ((2, 2, 3, 8), shape))
            message = f"^past_key_values: got a cache with keys of {had}; wanted this model's and batch's, {wanted}"
            with pytest.raises(ValueError, match=message):
                both[1].update(torch.randn(shape), torch.randn(shape), 0)
            assert_same(both[1], both[0])


def test_caches_of_models_with_fewer_layers_are_refused():
    config = transformers.LlamaConfig(num_hidden_layers=2)
    new = torch.randn(1, 2, 3, 8)
    with pytest.raises(ValueError, match="^past_key_values: got a cache of 2 layers in layer 2; wanted one of this model's config"):
        Cache(config).update(new, new, 2)


def appends(cache):
    return [isinstance(layer, rapt._model_cache._InPlace) and bool(layer.__dict__.get("memory")) for layer in cache.layers]


@pytest.mark.parametrize("padding", [False, True])
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize(
    "options", [{}, {"num_beams": 3}, {"prefill_chunk_size": 4}, {"num_return_sequences": 2, "num_beams": 2}], ids=str
)
def test_generate_makes_it_and_gives_the_tokens_of_eager_attention(name, padding, options):
    eager, ours = models(name)
    options = options | {"max_new_tokens": 20, "do_sample": False, "return_dict_in_generate": True}
    got, wanted = ours.generate(**prompt(padding), **options), eager.generate(**prompt(padding), **options)
    assert torch.equal(got.sequences, wanted.sequences)
    assert all(appends(got.past_key_values))
    assert not any(appends(wanted.past_key_values))


def test_generation_under_autocast():
    """Rotary embedding leaves keys of float32 beside values of bfloat16."""
    _, ours = models("llama")
    options = {"max_new_tokens": 12, "do_sample": False, "return_dict_in_generate": True}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        wanted = ours.generate(**prompt(True), **options, past_key_values=DynamicCache(config=ours.config))
        got = ours.generate(**prompt(True), **options)
    assert torch.equal(got.sequences, wanted.sequences)
    assert_same(got.past_key_values, wanted.past_key_values)


def test_another_library_may_wrap_the_function_that_makes_caches(monkeypatch):
    mixin = transformers.generation.utils.GenerationMixin
    inner = mixin._prepare_cache_for_generation
    monkeypatch.setattr(mixin, "_prepare_cache_for_generation", lambda self, *a, **k: inner(self, *a, **k))
    _, ours = models("llama")
    ours.generate(**prompt(False), max_new_tokens=2)


@pytest.mark.parametrize("name", [*CONFIGS, "deepseek_v3", "deepseek_v32"])
def test_assisted_generation_gives_the_same_tokens(name):
    eager, ours = of_any_kind(name)
    with torch.no_grad():
        assistant = copy.deepcopy(ours)
        for p in assistant.parameters():  # one that is often wrong
            p.add_(torch.randn_like(p) * 0.02)
    options = {"max_new_tokens": 20, "do_sample": False}
    ids = {"input_ids": prompt(False)["input_ids"][:1]}
    got = ours.generate(**ids, **options, assistant_model=assistant)
    assert torch.equal(got, eager.generate(**ids, **options))


def of_any_kind(name):
    """A model with eager attention and with rapt's: with windows, latents, indexers, linear attention."""
    if name in CONFIGS:
        return models(name)
    if name in test_mla_models.MODELS:
        return test_mla_models.models(name)
    ours, eager = (linear_model(name, attn_implementation=which).eval() for which in ("rapt", "eager"))
    eager.load_state_dict(ours.state_dict())
    return eager, ours


KINDS = [*CONFIGS, "deepseek_v3", "deepseek_v32", "qwen3_next", "olmo_hybrid"]


@pytest.mark.parametrize("name", KINDS)
def test_a_generation_that_was_killed_goes_on_from_its_file(name):
    eager, ours = of_any_kind(name)
    ids = torch.randint(3, 64, (2, 20))
    options = {"do_sample": False, "eos_token_id": -1, "pad_token_id": 0}
    wanted = eager.generate(ids, **options, max_new_tokens=15)
    cache = Cache(ours.config)
    first, file = ours.generate(ids, **options, max_new_tokens=6, past_key_values=cache), io.BytesIO()
    torch.save((first, cache), file)
    del cache
    file.seek(0)
    text, cache = torch.load(file, weights_only=False)
    got = ours.generate(text, attention_mask=torch.ones_like(text), **options, max_new_tokens=9, past_key_values=cache)
    assert torch.equal(got, wanted) and cache.get_seq_length() == 34


@pytest.mark.parametrize("name", ["deepseek_v3", "deepseek_v32", "qwen3_next", "olmo_hybrid"])
def test_padded_beams_of_all_kinds(name):
    eager, ours = of_any_kind(name)
    inputs = {key: x % 64 for key, x in prompt(True).items()}
    options = {"max_new_tokens": 10, "do_sample": False, "num_beams": 3, "eos_token_id": -1, "pad_token_id": 0}
    assert torch.equal(ours.generate(**inputs, **options), eager.generate(**inputs, **options))


@pytest.mark.parametrize("kind", ["qwen3_next", "olmo_hybrid"])
def test_models_with_linear_attention(kind):
    ours = linear_model(kind, attn_implementation="rapt").eval()
    eager = linear_model(kind, attn_implementation="eager").eval()
    eager.load_state_dict(ours.state_dict())
    tokens = torch.randint(3, 64, (2, 20))
    options = {"max_new_tokens": 12, "do_sample": False, "return_dict_in_generate": True, "num_beams": 2}
    got, wanted = ours.generate(tokens, **options), eager.generate(tokens, **options)
    assert torch.equal(got.sequences, wanted.sequences)
    assert any(appends(got.past_key_values))


def test_sparse_attention():
    sizes = SIZES | {"moe_intermediate_size": 32, "first_k_dense_replace": 3, "q_lora_rank": 24, "kv_lora_rank": 16}
    sizes |= {"qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16, "n_routed_experts": 2, "num_key_value_heads": 4}
    sizes |= {"index_topk": 6, "index_n_heads": 2, "index_head_dim": 16}
    eager, ours = pair(transformers.AutoModelForCausalLM, lambda: transformers.DeepseekV32Config(**sizes))
    options = {"max_new_tokens": 12, "do_sample": False, "return_dict_in_generate": True}
    got, wanted = ours.generate(**prompt(False), **options), eager.generate(**prompt(False), **options)
    assert torch.equal(got.sequences, wanted.sequences)
    assert {"keys", "values", "indexer_keys"} == got.past_key_values.layers[0].memory.keys()


def test_encoders_with_decoders():
    config = transformers.BartConfig(
        vocab_size=96, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2, decoder_attention_heads=2,
        encoder_ffn_dim=48, decoder_ffn_dim=48, max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=None,
        decoder_start_token_id=2, forced_eos_token_id=None, init_std=0.3,
    )  # fmt: skip
    eager, ours = pair(transformers.BartForConditionalGeneration, lambda: copy.deepcopy(config))
    options = {"max_new_tokens": 12, "do_sample": False, "return_dict_in_generate": True, "num_beams": 2}
    got, wanted = ours.generate(**prompt(True), **options), eager.generate(**prompt(True), **options)
    assert torch.equal(got.sequences, wanted.sequences)
    assert all(appends(got.past_key_values.self_attention_cache))
    assert not any(appends(got.past_key_values.cross_attention_cache))


def test_a_generation_goes_on_from_a_file_and_from_a_shared_prompt():
    eager, ours = models("mistral")
    ids = prompt(False)["input_ids"]
    options = {"do_sample": False, "return_dict_in_generate": True}
    whole = eager.generate(ids, max_new_tokens=16, **options).sequences
    begun = ours.generate(ids, max_new_tokens=7, **options, past_key_values=Cache(ours.config, max_length=32))
    file = io.BytesIO()
    torch.save(begun.past_key_values, file)
    file.seek(0)
    resumed = torch.load(file, weights_only=False)
    assert torch.equal(ours.generate(begun.sequences, max_new_tokens=9, **options, past_key_values=resumed).sequences, whole)

    shared = Cache(ours.config)
    with torch.no_grad():
        ours(ids[:1, :8], past_key_values=shared)
    for end in ([5, 6], [7, 8, 9]):
        text = torch.cat([ids[:1, :8], torch.tensor([end])], 1)
        got = ours.generate(text, max_new_tokens=8, **options, past_key_values=copy.deepcopy(shared)).sequences
        assert torch.equal(got, eager.generate(text, max_new_tokens=8, **options).sequences)
    assert shared.get_seq_length() == 8


def test_caches_that_the_user_gives_stay_as_they_are():
    _, ours = models("llama")
    options = {"max_new_tokens": 4, "do_sample": False, "return_dict_in_generate": True}
    given = DynamicCache(config=ours.config)
    ours.generate(**prompt(False), **options, past_key_values=given)
    assert not any(appends(given)) and given.get_seq_length() == 14
    ours.set_attn_implementation("sdpa")
    assert not any(appends(ours.generate(**prompt(False), **options).past_key_values))
    ours.set_attn_implementation("rapt")
    static = ours.generate(**prompt(False), **options, cache_implementation="static").past_key_values
    assert type(static) is transformers.StaticCache


def test_compiled_code_concatenates():
    _, ours = models("llama")
    ids = prompt(False)["input_ids"]
    cache, wanted = Cache(ours.config), Cache(ours.config)
    with torch.no_grad():
        ours(ids, past_key_values=cache)
        ours(ids, past_key_values=wanted)
        compiled = torch.compile(ours, backend="eager")
        memory = cache.layers[0].memory["keys"]
        for token in (3, 4, 5):
            step = torch.full((2, 1), token)
            got = compiled(step, past_key_values=cache).logits
            assert torch.allclose(got, ours(step, past_key_values=wanted).logits, atol=1e-5)
            assert cache.layers[0].keys.untyped_storage().data_ptr() != memory.untyped_storage().data_ptr()
