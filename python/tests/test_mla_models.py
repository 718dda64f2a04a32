"""transformers' models with latent attention, dense and sparse, by rapt against their own eager attention."""

import copy
import functools

import pytest
import torch

transformers = pytest.importorskip("transformers")

import rapt  # noqa: E402
import rapt.transformers  # noqa: E402
import test_transformers  # noqa: E402
from kernel_calls import backward_calls, kernel_calls  # noqa: E402
from test_transformers import pair  # noqa: E402

rapt.transformers.register()
forward = rapt.transformers._attention_forward

SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
    "initializer_range": 0.2,  # scores that differ from key to key
}
INDEXER = {"index_n_heads": 4, "index_head_dim": 16, "index_topk": 6}
MODELS = {
    "deepseek_v2": ("deepseek_v2", {}),
    "deepseek_v3": ("deepseek_v3", {}),
    "deepseek_v3 with YaRN": (
        "deepseek_v3",
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 1.0,
                             "original_max_position_embeddings": 32}},
    ),
    "deepseek_v32": ("deepseek_v32", INDEXER),
    "glm_moe_dsa": ("glm_moe_dsa", INDEXER | {"indexer_types": ["full", "shared", "full"]}),
}  # fmt: skip
SPARSE = ("deepseek_v32", "glm_moe_dsa")


pytestmark = pytest.mark.usefixtures("seeded", "without_fallbacks")


prompt = functools.partial(test_transformers.prompt, length=21, pads=5)


def models(name):
    kind, more = MODELS[name]
    return pair(transformers.AutoModelForCausalLM, lambda: transformers.AutoConfig.for_model(kind, **copy.deepcopy(SIZES | more)))


@pytest.mark.parametrize("padding", (False, True))
@pytest.mark.parametrize("name", MODELS)
def test_logits(name, padding):
    eager, ours = models(name)
    inputs = prompt(padding)
    with torch.no_grad(), kernel_calls() as kernel:
        got, wanted = ours(**inputs).logits, eager(**inputs).logits
    assert kernel.call_count == SIZES["num_hidden_layers"]
    real = inputs["attention_mask"].bool()
    torch.testing.assert_close(got[real], wanted[real], rtol=0, atol=1e-4)


@pytest.mark.parametrize("padding", (False, True))
@pytest.mark.parametrize("name", MODELS)
def test_greedy_tokens(name, padding):
    """A prompt, then token by token over the cache: the sparse ones attend to the keys on lists then."""
    eager, ours = models(name)
    options = {"max_new_tokens": 9, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    with kernel_calls() as kernel:
        got = ours.generate(**prompt(padding), **options)
    wanted = eager.generate(**prompt(padding), **options)
    assert (got.sequences == wanted.sequences).all() and got.sequences[:, 21:].unique().numel() > 3
    torch.testing.assert_close(torch.stack(got.logits), torch.stack(wanted.logits), rtol=0, atol=1e-4)
    layers = SIZES["num_hidden_layers"]
    by_mask = layers if not padding or name in SPARSE else 0  # the prompt; steps attend to latents
    assert (kernel.eager, kernel.by_python) == (by_mask, 9 * layers - by_mask)
    if name in SPARSE:
        assert kernel.masks[layers:] == [None] * 8 * layers


def calls_of_matrix(model, monkeypatch):
    """Collects how many latents a layer multiplies by the matrix of all heads' keys and values, in each call."""
    counts, theirs = [], torch.nn.Linear.forward
    projections = {layer.self_attn.kv_b_proj for layer in model.model.layers}

    def forward(self, x):
        if self in projections:
            counts.append(x.shape[2])
        return theirs(self, x)

    monkeypatch.setattr(torch.nn.Linear, "forward", forward)  # one of a layer's own would be called, whatever it does
    return counts


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"prefill_chunk_size": 8}], ids=str)
def test_caches_keep_latents_and_steps_read_them_as_they_lie(name, options, monkeypatch):
    eager, ours = models(name)
    cache, counts = rapt.transformers.Cache(ours.config), calls_of_matrix(ours, monkeypatch)
    options = options | {"max_new_tokens": 9, "do_sample": False}
    got = ours.generate(**prompt(True), **options, past_key_values=cache)
    assert torch.equal(got, eager.generate(**prompt(True), **options)) and 0 < len(counts) <= 3 * SIZES["num_hidden_layers"]
    for layer in cache.layers:
        rows = rapt._model_latent._joined(layer.keys, layer.values)
        in_place = name not in SPARSE or "num_beams" not in options  # beams of layers with indexers are copied
        assert (rows.data_ptr() == layer.keys.data_ptr()) is in_place and rows.shape[-1] == 40
    b = got.shape[0] * options.get("num_beams", 1)
    assert cache.nbytes == SIZES["num_hidden_layers"] * b * 29 * (32 + 8) * 4  # of heads it would be 4 * (16 + 8 + 12)


@pytest.mark.parametrize(("kv_dtype", "of_a_row", "most"), [("i8", 32 + 4, 0.2), ("f8e4m3", 32 + 4, 0.4), ("i4x2", 16 + 4, 0.8)])
@pytest.mark.parametrize("name", MODELS)
def test_quantised_latents(name, kv_dtype, of_a_row, most):
    """Their rotary parts stay as they are. Errors against fp32 are relative to the standard deviation of logits."""
    eager, ours = models(name)
    if name in SPARSE:  # which keys an indexer chooses is up to rounding: all of them
        for layer in (*eager.model.layers, *ours.model.layers):
            if layer.self_attn.indexer is not None:
                layer.self_attn.indexer.index_topk = 64
    cache, ids = rapt.transformers.Cache(ours.config, kv_dtype=kv_dtype), prompt(False)["input_ids"]
    with torch.no_grad():
        got = [ours(part, past_key_values=cache).logits for part in ids.split((12, 1, 1, 7), 1)]
        wanted = eager(ids).logits
    assert cache.nbytes == SIZES["num_hidden_layers"] * 2 * 21 * (of_a_row + 8 * 4)
    error = (torch.cat(got, 1) - wanted).square().mean().sqrt() / wanted.std()
    assert 1e-4 < error < most


def test_quantised_latents_want_the_config():
    _, ours = models("deepseek_v3")
    with pytest.raises(ValueError, match="linear of its rows.* layers themselves compute with cached rows a Cache without either"):
        ours.generate(**prompt(False), max_new_tokens=2, past_key_values=rapt.transformers.Cache(kv_dtype="i8"))


def test_what_is_not_known_is_expanded(monkeypatch):
    """Projections with hooks or of other types, layers whose method is another, gradients, autocast."""
    eager, ours = models("deepseek_v3")
    options = {"max_new_tokens": 5, "do_sample": False}
    wanted = eager.generate(**prompt(False), **options)
    latent = []
    attend = rapt._model_latent.attend
    monkeypatch.setattr(rapt._model_latent, "attend", lambda *a: latent.append(attend(*a)) or latent[-1])

    def steps_over_latents():
        latent.clear()
        assert torch.equal(ours.generate(**prompt(False), **options), wanted)
        return sum(x is not None for x in latent)

    assert steps_over_latents() == 4 * 3
    projection = ours.model.layers[1].self_attn.kv_b_proj
    hook = projection.register_forward_hook(lambda *_: None)
    assert steps_over_latents() == 4 * 2
    hook.remove()
    projection.bias = torch.nn.Parameter(torch.zeros(projection.out_features))
    assert steps_over_latents() == 4 * 2
    projection.bias = None
    projection.forward = type(projection).forward.__get__(projection)  # as accelerate replaces it
    assert steps_over_latents() == 4 * 2
    del projection.forward
    ours(**prompt(False))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        latent.clear()
        ours(**prompt(False))
    assert not latent

    class Other(type(ours.model.layers[0].self_attn)):
        def expand_kv(self, kv_nope, k_rot):
            k, v = super().expand_kv(kv_nope, k_rot)
            return k, v + 1

    kind = Other.__mro__[1].expand_kv
    assert not rapt._model_latent._is_known(Other.expand_kv) and rapt._model_latent._is_known(kind.__wrapped__)


def test_code_between_a_layers_method_and_its_attention_sees_tensors():
    _, ours = models("deepseek_v3")
    layer = ours.model.layers[0].self_attn
    latent, rope = torch.randn(2, 1, 5, 32), torch.randn(2, 1, 5, 8)
    wanted = type(layer).expand_kv.__wrapped__(layer, latent, rope)
    with torch.no_grad():
        got = layer.expand_kv(latent, rope)
        assert all(isinstance(x, rapt._model_lazy.LazyTensor) and (x.shape, x.dtype) == (y.shape, y.dtype) for x, y in zip(got, wanted))
        assert all(torch.equal(x + 0, y) and torch.equal(torch.cat((y, x)), torch.cat((y, y))) for x, y in zip(got, wanted))


@pytest.mark.parametrize("name", MODELS)
def test_prefill_in_two_parts(name):
    eager, ours = models(name)
    ids = prompt(False)["input_ids"]
    with torch.no_grad():
        wanted = eager(input_ids=ids).logits
        cache = transformers.DynamicCache(config=ours.config)
        got = [ours(input_ids=part, past_key_values=cache, use_cache=True).logits for part in ids.split((12, 9), 1)]
    torch.testing.assert_close(torch.cat(got, 1), wanted, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", MODELS)
def test_a_step_of_training(name):
    """All gradients, and the loss after the step."""
    losses, gradients = [], []
    ids = prompt(False)["input_ids"]
    with backward_calls() as calls:
        for model in models(name):
            optimiser = torch.optim.SGD(model.train().parameters(), 0.1)
            losses.append([])
            for _ in range(2):
                optimiser.zero_grad()
                loss = model(input_ids=ids, labels=ids).loss
                loss.backward()
                losses[-1].append(loss.item())
                if len(losses[-1]) == 1:
                    gradients.append({key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None})
                optimiser.step()
    assert calls.count == 2 * SIZES["num_hidden_layers"]
    assert gradients[0].keys() == gradients[1].keys() and len(gradients[0]) > 30
    for key, wanted in gradients[0].items():
        assert (gradients[1][key] - wanted).norm() <= 1e-4 * wanted.norm() + 1e-7, key
    assert losses[0] == pytest.approx(losses[1], rel=1e-4) and losses[1][1] < losses[1][0]


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("hk", (4, 2))
def test_lists_give_what_a_mask_gives(dtype, hk):
    """Where an indexer saw fewer keys than it was to choose, its list has hidden ones. NaN in a key that nobody chose stays there."""
    layer = torch.nn.Module()
    q, k, v = (torch.randn(2, h, n, d).to(dtype) for h, n, d in ((4, 3, 24), (hk, 60, 24), (hk, 60, 12)))
    mask = torch.rand(2, 1, 3, 60) < 0.8
    mask[1, 0, 2] = False
    indices = torch.rand(2, 3, 60).argsort(-1)[..., :8].int()
    unread = torch.ones(2, 60, dtype=torch.bool).scatter(1, indices.flatten(1).long(), False)
    sinks = torch.randn(4)
    dense = mask & torch.zeros(2, 3, 60, dtype=torch.bool).scatter(-1, indices.long(), True)[:, None]
    wanted, _ = forward(layer, q, k, v, dense, scaling=0.3, sinks=sinks)
    k.transpose(1, 2)[unread] = torch.nan
    with kernel_calls() as kernel:
        got, _ = forward(layer, q, k, v, mask, scaling=0.3, sinks=sinks, indices=indices)
    assert kernel.by_python == 1 and kernel.masks == [None] and not got[1, 2].any()
    torch.testing.assert_close(got, wanted, rtol=0, atol=2e-6 if dtype is torch.float32 else 2e-2)


def test_when_a_mask_is_taken():
    layer = torch.nn.Module()
    q, k = torch.randn(1, 2, 1, 16), torch.randn(1, 2, 60, 16)
    mask, indices = torch.ones(1, 1, 1, 60, dtype=torch.bool), torch.arange(5)[None, None]

    def by_lists(q=q, mask=mask, indices=indices, **options):
        with kernel_calls() as kernel:
            forward(layer, q, k, k, mask, indices=indices, **options)
        assert kernel.call_count == 1
        return kernel.masks == [None]

    assert by_lists()
    assert not by_lists(mask=mask.expand(1, 2, 1, 60))  # heads that need not see the same keys
    assert not by_lists(softcap=3.0) and not by_lists(dropout=0.5) and not by_lists(q=q.clone().requires_grad_())
    many = q.expand(1, 2, 60, 16), mask.expand(1, 1, 60, 60), indices.expand(1, 60, 5)
    assert not by_lists(*many) and by_lists(*many[:2], many[2][..., :3])
