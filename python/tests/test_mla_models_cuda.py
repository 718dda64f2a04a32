"""transformers' models with latent attention on a GPU: steps read the rows of the cache, lists where an indexer chose them."""

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

if not rapt._refusals.cuda_decodes(torch.bfloat16, 576, 512):
    pytest.skip("no kernel for one row over latents, which Hopper has", allow_module_level=True)

from kernel_calls import kernel_calls  # noqa: E402
from test_mla_models import MODELS, SIZES, SPARSE, models, prompt  # noqa: E402
from test_transformers import pair  # noqa: E402

LAYERS = SIZES["num_hidden_layers"]

pytestmark = pytest.mark.usefixtures("seeded", "without_fallbacks")


def on_gpu(inputs):
    return {name: tensor.cuda() for name, tensor in inputs.items()}


def latent_calls(monkeypatch):
    """Collects, of each layer's call that may read latents, whether it did."""
    calls, attend = [], rapt._model_latent.attend

    def attending(*given):
        out = attend(*given)
        calls.append(out is not None)
        return out

    monkeypatch.setattr(rapt._model_latent, "attend", attending)
    return calls


@pytest.mark.parametrize("padding", (False, True))
@pytest.mark.parametrize("name", MODELS)
def test_greedy_tokens(name, padding, monkeypatch):
    eager, ours = (model.cuda() for model in models(name))
    inputs, latent = on_gpu(prompt(padding)), latent_calls(monkeypatch)
    options = {"max_new_tokens": 9, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    with kernel_calls() as kernel:
        got = ours.generate(**inputs, **options)
    wanted = eager.generate(**inputs, **options)
    assert torch.equal(got.sequences, wanted.sequences) and got.sequences[:, 21:].unique().numel() > 3
    torch.testing.assert_close(torch.stack(got.logits), torch.stack(wanted.logits), rtol=0, atol=1e-4)
    assert len(latent) == 9 * LAYERS and all(latent[LAYERS:])
    if name in SPARSE:
        assert kernel.masks[LAYERS:] == [None] * 8 * LAYERS


@pytest.mark.parametrize("name", ["deepseek_v3", "deepseek_v32"])
def test_heads_of_deepseek(name, monkeypatch):
    """In bf16, with the columns that tensor cores take. fp32 says how far off PyTorch's own attention is."""
    kind, more = MODELS[name]
    sizes = SIZES | more | {"num_attention_heads": 64, "num_key_value_heads": 64, "kv_lora_rank": 512, "qk_nope_head_dim": 128}
    sizes |= {"qk_rope_head_dim": 64, "v_head_dim": 128, "initializer_range": 0.05, "max_position_embeddings": 1024}
    sizes |= {"first_k_dense_replace": LAYERS}  # which experts a token goes to is up to rounding
    if name in SPARSE:  # and which keys an indexer chooses: all of them
        sizes |= {"index_head_dim": 128, "index_topk": 1024}
    eager, ours = pair(transformers.AutoModelForCausalLM, lambda: transformers.AutoConfig.for_model(kind, **copy.deepcopy(sizes)))
    exact = copy.deepcopy(eager)
    ids = torch.randint(2, 96, (2, 300)).cuda()
    latent, logits = latent_calls(monkeypatch), []
    with torch.no_grad():
        for model, dtype in ((exact, torch.float32), (eager, torch.bfloat16), (ours, torch.bfloat16)):
            model, cache = model.to("cuda", dtype), transformers.DynamicCache(config=model.config)
            logits.append(torch.cat([model(part, past_key_values=cache).logits for part in ids.split((297, 1, 2), 1)], 1).float())
    assert latent == [False] * LAYERS + [True] * 2 * LAYERS
    wanted, theirs, got = logits
    assert (got - wanted).norm() < 1.2 * (theirs - wanted).norm()


def test_lists_of_few_of_many_keys():
    """What an indexer did not choose is not read: NaN in those keys does not show."""
    layer = torch.nn.Module()
    q, k = torch.randn(1, 64, 3, 576).bfloat16().cuda(), torch.randn(1, 1, 500, 576).bfloat16().cuda()
    mask, indices = torch.ones(1, 1, 3, 500, dtype=torch.bool).cuda(), torch.randperm(500)[:64].cuda().expand(1, 3, 64)
    chosen = torch.zeros_like(mask).scatter(-1, indices[:, None], True)
    wanted, _ = rapt.transformers._attention_forward(layer, q, k, k[..., :512], chosen, scaling=0.04)
    k[0, 0, ~chosen[0, 0, 0]] = torch.nan
    with kernel_calls() as kernel:
        got, _ = rapt.transformers._attention_forward(layer, q, k, k[..., :512], mask, scaling=0.04, indices=indices)
    assert kernel.masks == [None]
    torch.testing.assert_close(got, wanted, rtol=0, atol=2e-2)
