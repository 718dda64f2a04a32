"""attn_implementation="rapt_flash": models without padding, packed, and in continuous batching, against eager ones."""

import inspect
from unittest import mock

import pytest
import torch

transformers = pytest.importorskip("transformers")

import model_sweep  # noqa: E402
import rapt  # noqa: E402
import rapt.torch  # noqa: E402
import rapt.transformers  # noqa: E402
import test_transformers  # noqa: E402
from rapt import _flash_attn, _flash_attn_cache, _model_flash, _model_serving  # noqa: E402
from test_transformers import CONFIGS, SIZES, prompt  # noqa: E402
from transformers import masking_utils  # noqa: E402
from transformers.generation.continuous_batching import PagedAttentionCache  # noqa: E402

rapt.transformers.register()
forward = rapt.transformers._attention_of_sequences
LENGTHS = (9, 3, 11)
pytestmark = pytest.mark.usefixtures("seeded", "without_fallbacks")


def pair(make, config):
    return test_transformers.pair(make, config, "rapt_flash")


def language_models(name):
    return pair(transformers.AutoModelForCausalLM, CONFIGS[name])


@pytest.fixture
def layouts():
    """What each call of attention over sequences got: borders, lengths and table."""
    seen = []
    attend, attend_now = _flash_attn.attend, _flash_attn_cache._attend_now

    def record(tensors, *options, **others):
        seen.append([None if x is None else tuple(x.shape) for x in tensors[5:9]])
        return attend(tensors, *options, **others)

    def record_now(q, k_cache, v_cache, k, v, lengths, table, *options):
        seen.append([None, None, tuple(lengths.shape), None if table is None else tuple(table.shape)])
        return attend_now(q, k_cache, v_cache, k, v, lengths, table, *options)

    with (
        mock.patch.object(_flash_attn, "attend", record),
        mock.patch.object(_flash_attn_cache, "attend", record),
        mock.patch.object(_flash_attn_cache, "_attend_now", record_now),
    ):
        yield seen


def close(got, wanted, atol=1e-4):
    torch.testing.assert_close(got, wanted, rtol=0, atol=atol)


@pytest.mark.parametrize("padding", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("name", CONFIGS)
def test_logits_and_tokens(name, padding, layouts):
    eager, ours = language_models(name)
    inputs = prompt(padding)
    with torch.no_grad():
        got, wanted = ours(**inputs).logits, eager(**inputs).logits
    assert layouts == [[(3,), (3,), None, None]] * (3 * padding)
    real = inputs["attention_mask"].bool()
    close(got[real], wanted[real])
    options = {"max_new_tokens": 6, "do_sample": False}
    assert torch.equal(ours.generate(**inputs, **options), eager.generate(**inputs, **options))


ENCODER = ("vocab_size", "hidden_size", "num_attention_heads", "num_hidden_layers", "initializer_range")
ENCODER = {key: SIZES[key] for key in ENCODER}
ENCODERS = {
    "bert": lambda: transformers.BertConfig(**ENCODER, intermediate_size=96),
    "modernbert": lambda: transformers.ModernBertConfig(
        **ENCODER, intermediate_size=96, pad_token_id=0, local_attention=6, global_attn_every_n_layers=2
    ),
}


@pytest.mark.parametrize("side", ["left", "right", "holes"])
@pytest.mark.parametrize("name", ENCODERS)
def test_padded_encoders(name, side, layouts):
    eager, ours = pair(transformers.AutoModel, ENCODERS[name])
    ids, shown = torch.randint(2, 96, (2, 11)), torch.ones(2, 11, dtype=torch.long)
    shown[0, {"left": slice(None, 4), "right": slice(-4, None), "holes": slice(3, 5)}[side]] = 0
    with torch.no_grad():
        got, wanted = (model(input_ids=ids, attention_mask=shown)[0] for model in (ours, eager))
    close(got[shown.bool()], wanted[shown.bool()])
    windows = name == "modernbert"
    lengths = [None, None, (2,), None] if side == "right" else [(3,), (3,), None, None]
    expected = [[(3,), (3,), None, None] if windows and i == 1 else lengths for i in range(3)]
    if windows and side == "holes":  # whose distances count them: a whole mask
        del expected[1]
    assert layouts == expected


def test_keys_of_another_text():
    """Rows have no padding where keys have, though both are as many."""
    sizes = {"encoder_layers": 1, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
    sizes |= {"encoder_ffn_dim": 96, "decoder_ffn_dim": 96, "d_model": 64, "vocab_size": 96, "init_std": 0.2}
    eager, ours = pair(transformers.BartModel, lambda: transformers.BartConfig(**sizes))
    ids, shown = torch.randint(3, 96, (2, 11)), torch.ones(2, 11, dtype=torch.long)
    for hidden in (slice(None, 4), slice(-4, None)):
        shown[:], shown[0, hidden] = 1, 0
        for others in (torch.randint(3, 96, (2, 11)), torch.randint(3, 96, (2, 5))):
            inputs = {"input_ids": ids, "attention_mask": shown, "decoder_input_ids": others}
            with torch.no_grad():
                close(ours(**inputs)[0], eager(**inputs)[0])


def packed():
    ids = torch.randint(2, 96, (1, sum(LENGTHS)))
    borders = torch.tensor([0, *LENGTHS]).cumsum(0).int()
    positions = torch.cat([torch.arange(n) for n in LENGTHS])[None]
    explicit = {"cu_seq_lens_q": borders, "cu_seq_lens_k": borders, "max_length_q": 11, "max_length_k": 11}
    return ids, {"position_ids": positions}, explicit


@pytest.mark.parametrize("name", [*CONFIGS, "bert"])
def test_packed(name, layouts):
    ids, positions, explicit = packed()
    if name == "bert":  # whose layers see no positions
        eager, ours = pair(transformers.BertForMaskedLM, ENCODERS["bert"])
        ways = [positions | explicit]
    else:
        eager, ours = language_models(name)
        ways = [positions | {"use_cache": False}, positions, positions | explicit]
    with torch.no_grad():
        wanted = torch.cat([eager(input_ids=part).logits for part in ids.split(LENGTHS, 1)], 1)
        for way in ways:
            close(ours(input_ids=ids, **way).logits, wanted)
    assert layouts == [[(4,), (4,), None, None]] * (3 * len(ways))


def test_packed_rows_of_a_batch(layouts):
    eager, ours = language_models("mistral")
    ids, positions = torch.randint(2, 96, (2, 12)), torch.stack((torch.arange(12) % 9, torch.arange(12) % 4))
    with torch.no_grad():
        close(*(model(input_ids=ids, position_ids=positions, use_cache=False).logits for model in (ours, eager)))
    assert layouts == [[(6,), (6,), None, None]] * 3


@pytest.mark.parametrize("name", CONFIGS)
def test_gradients_of_packed_sequences(name):
    eager, ours = language_models(name)
    ids, positions, explicit = packed()
    labels = ids.clone()
    labels[0, torch.tensor([0, *LENGTHS[:-1]]).cumsum(0)] = -100  # no sequence predicts the next one
    ours(input_ids=ids, labels=labels, use_cache=False, **positions, **explicit).loss.backward()
    parts, targets = ids.split(LENGTHS, 1), labels.split(LENGTHS, 1)
    for part, target in zip(parts, targets):
        count = sum(len(n[0]) - 1 for n in parts)
        loss = eager(input_ids=part, labels=target).loss * (part.shape[1] - 1) / count
        loss.backward()
    for got, wanted in zip(ours.parameters(), eager.parameters()):
        if wanted.grad is not None:  # an expert that no token has chosen has none
            torch.testing.assert_close(got.grad, wanted.grad, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("padding", [False, True], ids=["whole", "padded"])
def test_gradients_of_padded_batches(padding):
    eager, ours = language_models("gemma2")
    inputs = prompt(padding)
    labels = inputs["input_ids"].masked_fill(~inputs["attention_mask"].bool(), -100)
    labels[:, 4] = -100  # the last row of padding predicts it, and sees nothing
    for model in (eager, ours):
        model(**inputs, labels=labels, use_cache=False).loss.backward()
    for got, wanted in zip(ours.parameters(), eager.parameters()):
        torch.testing.assert_close(got.grad, wanted.grad, rtol=1e-3, atol=1e-4)


def test_float64_and_graphs():
    """Calls that are left to masks."""
    eager, ours = language_models("mistral")
    ids, shown = torch.randint(2, 96, (2, 7)), torch.ones(2, 7, dtype=torch.long)
    shown[0, 5:] = 0
    inputs, real = {"input_ids": ids, "attention_mask": shown}, shown.bool()
    with torch.no_grad(), pytest.warns(rapt.torch.FallbackWarning, match="float64"):
        close(ours.double()(**inputs).logits[real], eager.double()(**inputs).logits[real], 1e-5)
    eager, ours = eager.float(), ours.float()
    compiled = torch.compile(ours, backend="eager", fullgraph=True)
    with torch.no_grad():
        close(compiled(**inputs, use_cache=False).logits[real], eager(**inputs).logits[real])
        ids, positions, explicit = packed()
        inputs = {"input_ids": ids, "use_cache": False} | positions
        close(compiled(**inputs, **explicit).logits, eager(**inputs).logits)


@pytest.mark.parametrize("padded", [False, True])
def test_quantised_caches(padded):
    """A cache of codes gives what it gives "rapt", whose masks it takes."""
    _, model = language_models("llama")
    inputs = prompt(padded)
    results = []
    for name in ("rapt", "rapt_flash"):
        model.set_attn_implementation(name)
        cache = rapt.transformers.Cache(model.config, kv_dtype="i8")
        with torch.no_grad():
            results.append(model.generate(**inputs, past_key_values=cache, max_new_tokens=5, do_sample=False))
    assert torch.equal(*results)


def in_batches(model, prompts, **options):
    settings = {"num_blocks": 96, "max_batch_tokens": 48, "page_size": 8} | options
    results = model.generate_batch(
        prompts,
        generation_config=generation(),
        continuous_batching_config=transformers.ContinuousBatchingConfig(**settings),
        progress_bar=False,
    )
    assert all(result.error is None for result in results.values())
    return {tuple(result.prompt_ids): result.generated_tokens for result in results.values()}


def generation():
    return transformers.GenerationConfig(max_new_tokens=5, do_sample=False, eos_token_id=-1, pad_token_id=0)


def one_at_a_time(model, prompts):
    wanted = {}
    for ids in prompts:
        wanted[tuple(ids)] = model.generate(torch.tensor([ids]), generation_config=generation())[0, len(ids) :].tolist()
    return wanted


@pytest.mark.parametrize("name", CONFIGS)
def test_continuous_batching(name, layouts):
    """Prompts of very different lengths, the longest in chunks; pages are read where transformers' allocators of all
    layers know them, and else the rows that its cache hands out."""
    eager, ours = language_models(name)
    prompts = [torch.randint(2, 96, (n,)).tolist() for n in (60, 3, 17, 1)]
    got = in_batches(ours, prompts)
    assert got == one_at_a_time(eager, prompts)
    paged = sum(table is not None for *_, table in layouts)
    assert (paged > 0) == (name == "llama") and paged < len(layouts)
    assert all(borders is not None or table is not None for borders, _, _, table in layouts)


def test_shared_prefixes(layouts):
    eager, ours = language_models("llama")
    prefix = torch.randint(2, 96, (24,)).tolist()
    prompts = [prefix + torch.randint(2, 96, (n,)).tolist() for n in (2, 5, 9)]
    shared = []
    search = PagedAttentionCache.search_prefix_match

    def count(*args):
        shared.append(search(*args))
        return shared[-1]

    with mock.patch.object(PagedAttentionCache, "search_prefix_match", count):
        assert in_batches(ours, prompts, max_batch_tokens=30) == one_at_a_time(eager, prompts)
    assert max(shared) >= 16


def test_a_packed_row_has_the_bits_of_its_sequence_alone():
    layer = torch.nn.Module()
    q, k, v = (torch.randn(1, h, sum(LENGTHS), 16) for h in (4, 2, 2))
    _, _, explicit = packed()
    options = {"sliding_window": 5, "softcap": 3.0}
    out, _ = forward(layer, q, k, v, None, **options, **explicit)
    parts = zip(*(x.split(LENGTHS, 2) for x in (q, k, v)))
    assert torch.equal(out, torch.cat([forward(layer, *part, None, **options)[0] for part in parts], 1))


def test_masks_that_are_not_recognised():
    """An image's tokens see one another, and a text in chunks has another pattern than a window."""
    config = transformers.MistralConfig(**SIZES, sliding_window=4)
    config._attn_implementation = "rapt_flash"
    cache = {list(inspect.signature(masking_utils.create_causal_mask).parameters)[3]: None}
    arguments = {"config": config, "inputs_embeds": torch.zeros(2, 6, 8), "attention_mask": None} | cache
    assert masking_utils.create_causal_mask(**arguments) is None
    assert masking_utils.create_sliding_window_causal_mask(**arguments) is None
    image = torch.tensor([[-1, 0, 0, 0, -1, -1]] * 2)
    for make, options in [
        (masking_utils.create_causal_mask, {"block_sequence_ids": image}),
        (masking_utils.create_causal_mask, {"or_mask_function": lambda b, h, q, k: k == 5}),
        (masking_utils.create_causal_mask, {"and_mask_function": lambda b, h, q, k: k != 2}),
        (masking_utils.create_sliding_window_causal_mask, {"block_sequence_ids": image}),
    ]:
        got = make(**arguments, **options)
        config._attn_implementation = "sdpa"
        wanted = make(**arguments, **options)
        config._attn_implementation = "rapt_flash"
        assert torch.equal(got, wanted)
    positions = torch.tensor([[0, 1, 2, 0, 1, 2], [0, 1, 2, 3, 4, 0]])
    borders = masking_utils.create_causal_mask(**arguments, position_ids=positions)
    assert borders.tolist() == [0, 3, 6, 11, 12]


def test_refusals():
    layer, (q, k, v) = torch.nn.Module(), (torch.randn(1, 2, 9, 16) for _ in range(3))
    two, table = torch.tensor([0, 4, 9]), torch.zeros(1, 2, dtype=torch.int32)
    pages = {"block_table": table, "cu_seq_lens_k": two, "k_cache": q, "v_cache": q}
    sequences = {"cu_seq_lens_q": two, "cu_seq_lens_k": two}
    for mask, keywords, error, message in [
        (None, {"block_indices": two}, TypeError, "block_indices: .*; wanted"),
        (None, {"output_attentions": True}, NotImplementedError, "output_attentions: got True; wanted"),
        (None, {"cache": transformers.DynamicCache()}, TypeError, "cache: got DynamicCache; wanted the Paged"),
        (torch.ones(1, 9).bool(), sequences, ValueError, "cu_seq_lens_q: got it with a mask of 2 dim"),
        (torch.ones(1, 1, 9, 9).bool(), pages, ValueError, "block_table: got it with a mask of 4 dim"),
        (None, sequences | {"position_bias": q}, NotImplementedError, "cu_seq_lens_q: .* position_bias"),
    ]:
        with pytest.raises(error, match=message):
            forward(layer, q, k, v, mask, **keywords)
    with pytest.raises(ValueError, match="cu_seq_lens_k: got None for 4 queries and 9 keys"):
        forward(layer, q[:, :, :4], k, v, None, cu_seq_lens_q=two)


@pytest.mark.parametrize(
    "model_type, message",
    [
        ("t5", 'which transformers does not let do without masks; wanted "rapt"'),
        ("phimoe", 'whose layers leave causality or windows to their masks; wanted "rapt"'),
        ("bloom", "which computes attention by itself"),
    ],
)
def test_refused_models(model_type, message):
    outcome = model_sweep.classify(model_type, "rapt_flash")
    assert outcome.kind == "refused" and message in outcome.detail


def test_kernels_of_their_own():
    class Sparse(transformers.LlamaForCausalLM):
        _compatible_flash_implementations = ["MiniMaxAI/msa"]

    with pytest.raises(ValueError, match="whose layers call functions of 'MiniMaxAI/msa'"):
        Sparse._from_config(CONFIGS["llama"](), attn_implementation="rapt_flash")


def test_switching():
    _, ours = language_models("llama")
    inputs = prompt(True)
    before = _model_flash.calls
    with torch.no_grad():
        for name in ("eager", "sdpa", "rapt"):
            ours.set_attn_implementation(name)
            assert ours.config._attn_implementation == name
            ours(**prompt(False))
        assert _model_flash.calls == before
        ours.set_attn_implementation("rapt_flash")
        ours(**inputs)
    assert _model_flash.calls == before + 3
    with pytest.raises(ValueError, match="rapt_flush"):
        ours.set_attn_implementation("rapt_flush")


def test_what_is_replaced_in_transformers():
    """Says which of the functions that rapt answers has changed. See rapt._model_serving."""
    names = {name: list(inspect.signature(function).parameters) for name, function in _model_serving._theirs.items()}
    assert names["imports"][0] == "implementation", "modeling_flash_attention_utils._lazy_imports"
    check = ["self", "attn_implementation", "is_init_check"]
    assert names["check"][:3] == check, "PreTrainedModel._check_and_adjust_attn_implementation"
    pages = ["config", "cb_config", "user_requested"]
    assert names["pages"] == pages, "continuous_batching.initialization.ensure_decode_fast_path_is_available"
    functions, _ = _model_serving.utils.lazy_import_flash_attention("rapt_flash")
    assert functions[1] is rapt.flash_attn.flash_attn_varlen_func
