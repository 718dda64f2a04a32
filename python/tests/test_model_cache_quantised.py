"""rapt.transformers.Cache with kv_dtype: keys and values as codes, which rapt's attention reads as they are."""

import copy
import random

import pytest
import torch

transformers = pytest.importorskip("transformers")

import rapt.transformers  # noqa: E402
from rapt._codes import KV_DTYPES  # noqa: E402
from test_delta_rule_models import linear_model  # noqa: E402
from test_model_cache import LAYERS, caches, random_calls  # noqa: E402
from test_transformers import CONFIGS, SIZES, models, prompt  # noqa: E402
from transformers import DynamicCache  # noqa: E402

rapt.transformers.register()
Cache = rapt.transformers.Cache
MOST = {"i8": 127, "i4x2": 7, "f8e4m3": 448, "f8e5m2": 57344}
FLOATS = {"f8e4m3": torch.float8_e4m3fn, "f8e5m2": torch.float8_e5m2}


pytestmark = pytest.mark.usefixtures("seeded", "without_fallbacks")


def groups_of(x, kv_dtype):
    """[..., groups, elements]: those that share a scale."""
    size = 32 if kv_dtype == "i4x2" and x.shape[-1] % 32 == 0 else x.shape[-1]
    return x.float().unflatten(-1, (-1, size))


def scales_of(x, kv_dtype):
    return groups_of(x, kv_dtype).abs().amax(-1, keepdim=True) / MOST[kv_dtype]


def rounded(x, kv_dtype):
    """The tensor as its codes and scales stand for it."""
    groups, scale = groups_of(x, kv_dtype), scales_of(x, kv_dtype)
    codes = groups / scale
    codes = codes.to(FLOATS[kv_dtype]).float() if kv_dtype in FLOATS else codes.round().clamp(-MOST[kv_dtype], MOST[kv_dtype])
    return torch.where(scale == 0, 0, codes * scale).flatten(-2).to(x.dtype)


def decoded(rows):
    """The numbers that codes stand for, float32 [b, hk, n, d]."""
    codes = rows.codes
    if rows.kv_dtype == "i4x2":
        codes = torch.stack((codes & 15, codes >> 4), -1).flatten(-2).float()
        codes = torch.where(codes > 7, codes - 16, codes)
    else:
        codes = codes.view(FLOATS.get(rows.kv_dtype, torch.int8)).float()
    return (codes.unflatten(-1, (rows.scale.shape[-1], -1)) * rows.scale[..., None]).flatten(-2)


def bound_of(x, kv_dtype):
    """What the guide says of |y - x|, and of fp32's rounding."""
    groups, scale = groups_of(x, kv_dtype), scales_of(x, kv_dtype)
    if kv_dtype in FLOATS:
        share, least = (16, 1024) if kv_dtype == "f8e4m3" else (8, 131072)
        bound = torch.maximum(groups.abs() / share, scale / least)
    else:
        bound = (scale / 2).expand_as(groups)
    return (bound + scale * MOST[kv_dtype] / 2**21).flatten(-2)


def same_rows(wanted, rows):
    """Whether these are the quantised ones of a tensor."""
    got = decoded(rows)
    return got.shape == wanted.shape and bool(((got - wanted.float()).abs() <= bound_of(wanted, rows.kv_dtype)).all())


class Rounding(DynamicCache):
    """DynamicCache of keys and values as codes stand for them."""

    def __init__(self, config, kv_dtype):
        super().__init__(config=config)
        self.kv_dtype = kv_dtype

    def update(self, keys, values, *args, **kwargs):
        return super().update(rounded(keys, self.kv_dtype), rounded(values, self.kv_dtype), *args, **kwargs)


@pytest.mark.parametrize(("kind", "recording"), [*((kind, False) for kind in LAYERS), ("window of 1", True), ("window of 6", True)])
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_random_calls_do_what_dynamic_caches_do(kind, kv_dtype, recording):
    draw = random.Random(f"{kind} {kv_dtype} {recording}")
    types = draw.choice([torch.float32, torch.bfloat16, torch.float16])
    random_calls(caches(LAYERS[kind], kv_dtype=kv_dtype), kind, recording, draw, (64, 12), (types, types), same_rows)


@pytest.mark.parametrize("padding", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("name", CONFIGS)
def test_logits_are_those_of_rounded_keys_and_values(name, kv_dtype, padding):
    """A prompt in two parts, then tokens. What is left is less than what rounding changes: fp32 may round a number halfway between
    two codes either way, and rows of later layers with it."""
    eager, ours = models(name)
    inputs = prompt(padding)
    ids, attended = inputs["input_ids"], inputs["attention_mask"]
    parts = [ids[:, :6], ids[:, 6:], *torch.randint(2, 96, (2, 10)).split(1, 1)]
    seen = torch.cat((attended, torch.ones(2, 10, dtype=torch.long)), 1)
    logits = []
    with torch.no_grad():
        for model, cache in (
            (ours, Cache(ours.config, kv_dtype=kv_dtype)),
            (eager, Rounding(eager.config, kv_dtype)),
            (eager, DynamicCache(config=eager.config)),
        ):
            found = []
            for part in parts:
                mask = seen[:, : cache.get_seq_length() + part.shape[1]]
                found.append(model(part, attention_mask=mask, past_key_values=cache).logits)
            logits.append(torch.cat(found, 1)[seen.bool()])
    got, wanted, plain = logits
    by_rounding = (plain - wanted).norm()
    assert by_rounding > 0.1 and (got - wanted).norm() < 0.5 * by_rounding


def assert_greedy(eager, made, inputs):
    """Tokens are as good as the best, by logits of rounded keys and values, but for what rounding changes. Two may be worse: a token
    that fp32 sends to another expert."""
    n, attended = inputs["input_ids"].shape[1], inputs["attention_mask"]
    mask = torch.cat((attended, attended.new_ones(len(made), made.shape[1] - n)), 1)
    with torch.no_grad():
        logits = eager(made, attention_mask=mask, past_key_values=Rounding(eager.config, "i8")).logits[:, n - 1 : -1]
    chosen = logits.gather(-1, made[:, n:, None])[..., 0]
    assert (logits.amax(-1) - chosen > 0.2).sum() <= 2 and logits.std(-1).min() > 0.5


@pytest.mark.parametrize("options", [{}, {"prefill_chunk_size": 4}], ids=str)
@pytest.mark.parametrize("name", CONFIGS)
def test_generate(name, options):
    eager, ours = models(name)
    cache = Cache(ours.config, kv_dtype="i8")
    made = ours.generate(**prompt(True), **options, max_new_tokens=12, do_sample=False, past_key_values=cache)
    assert_greedy(eager, made, prompt(True))


def test_assisted_generation():
    eager, ours = models("mistral")
    with torch.no_grad():
        assistant = copy.deepcopy(ours)
        for p in assistant.parameters():  # one that is often wrong
            p.add_(torch.randn_like(p) * 0.02)
    inputs, cache = {name: x[:1] for name, x in prompt(False).items()}, Cache(ours.config, kv_dtype="i8")
    made = ours.generate(**inputs, max_new_tokens=20, do_sample=False, past_key_values=cache, assistant_model=assistant)
    assert_greedy(eager, made, inputs)


BEAMS = {"max_new_tokens": 8, "do_sample": False, "num_beams": 3, "return_dict_in_generate": True, "output_scores": True}


@pytest.mark.parametrize("name", CONFIGS)
def test_beams_are_as_likely_as_those_of_rounded_keys_and_values(name):
    eager, ours = models(name)
    got = ours.generate(**prompt(True), **BEAMS, past_key_values=Cache(ours.config, kv_dtype="i8"))
    wanted = eager.generate(**prompt(True), **BEAMS, past_key_values=Rounding(eager.config, "i8"))
    torch.testing.assert_close(got.sequences_scores, wanted.sequences_scores, rtol=0, atol=0.02)


@pytest.mark.parametrize("kind", ["qwen3_next", "olmo_hybrid"])
def test_models_with_linear_attention(kind):
    ours = linear_model(kind, attn_implementation="rapt").eval()
    eager = linear_model(kind, attn_implementation="eager").eval()
    eager.load_state_dict(ours.state_dict())
    tokens, cache = torch.randint(3, 64, (2, 20)), Cache(ours.config, kv_dtype="i8")
    got = ours.generate(tokens, **BEAMS, past_key_values=cache)
    wanted = eager.generate(tokens, **BEAMS, past_key_values=Rounding(eager.config, "i8"))
    torch.testing.assert_close(got.sequences_scores, wanted.sequences_scores, rtol=0, atol=0.02)
    assert cache.nbytes == sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers if hasattr(layer, "keys")) > 0


@pytest.mark.parametrize(("kv_dtype", "of_a_row"), [("i8", 68), ("f8e4m3", 68), ("f8e5m2", 68), ("i4x2", 40), (None, 128)])
def test_memory_is_what_the_guide_says(kv_dtype, of_a_row):
    """A row of 64 columns, in bf16 without kv_dtype."""
    cache = Cache(transformers.LlamaConfig(**SIZES | {"num_hidden_layers": 2}), kv_dtype=kv_dtype)
    assert cache.nbytes == 0
    places = set()
    with torch.no_grad():
        for n in (7, *[1] * 93):
            for layer in range(2):
                rows, _ = cache.update(*torch.randn(2, 3, 2, n, 64).bfloat16(), layer)
            places.add((rows if kv_dtype is None else rows.codes).untyped_storage().data_ptr())
    assert cache.nbytes == 2 * 2 * 3 * 2 * 100 * of_a_row and len(places) <= 5
    assert all(memory.nbytes <= 2 * 3 * 2 * 100 * of_a_row for memory in cache.layers[1].memory.values())
    copied = copy.deepcopy(cache).layers[1].keys
    assert (copied if kv_dtype is None else copied.codes).untyped_storage().nbytes() <= 3 * 2 * 100 * of_a_row


def test_without_a_config():
    cache = Cache(max_length=50, kv_dtype="i8")
    with torch.no_grad():
        keys, _ = cache.update(*torch.randn(2, 1, 2, 40, 64), 1)
    assert keys.shape == (1, 2, 40, 64) and cache.layers[1].memory["keys"].shape[-2] == 50 and len(cache) == 2


@pytest.mark.parametrize("kv_dtype", ["int8", "i4", torch.int8, 8])
def test_kv_dtype_must_be_known(kv_dtype):
    with pytest.raises(ValueError, match="kv_dtype: got .*; wanted None, 'i4x2', 'i8', 'f8e4m3', 'f8e5m2'"):
        Cache(kv_dtype=kv_dtype)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_other_attention_says_what_to_set(attention):
    _, ours = models("llama")
    ours.set_attn_implementation(attention)
    with pytest.raises(ValueError, match=r'past_key_values: got .* kv_dtype.*; wanted model.set_attn_implementation\("rapt"\)'):
        ours.generate(**prompt(False), max_new_tokens=2, past_key_values=Cache(ours.config, kv_dtype="i8"))


def test_gradients_and_compiled_code_are_refused():
    _, ours = models("llama")
    cache, ids = Cache(ours.config, kv_dtype="i8"), prompt(False)["input_ids"]
    with pytest.raises(ValueError, match='kv_dtype="i8" where gradients are recorded.*; wanted eager calls under torch.no_grad'):
        ours(ids, past_key_values=cache)
    with torch.no_grad(), pytest.raises(Exception, match="or in compiled or traced code; wanted eager calls"):
        torch.compile(ours, backend="eager")(ids, past_key_values=cache)


def test_rows_that_do_not_fit_are_refused_by_name():
    cache = Cache(kv_dtype="i4x2")
    with torch.no_grad():
        with pytest.raises(ValueError, match='kv_dtype: got "i4x2" for heads of 5 columns; wanted an even number'):
            cache.update(*torch.randn(2, 1, 2, 3, 5), 0)
        cache = Cache(kv_dtype="i8")
        cache.update(*torch.randn(2, 1, 2, 3, 8), 0)
        for shape in ((2, 2, 1, 8), (1, 4, 1, 8), (1, 2, 1, 16)):
            with pytest.raises(ValueError, match=r"past_key_values: got a cache with keys of \[1, 2, n, 8\] on cpu"):
                cache.update(torch.randn(shape), torch.randn(shape), 0)
        with pytest.raises(TypeError, match="k_new: got .*float64"):
            cache.update(*torch.randn(2, 1, 2, 3, 8).double(), 0)
    assert cache.get_seq_length() == 3
