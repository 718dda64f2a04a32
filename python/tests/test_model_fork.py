"""Forks of a rapt.transformers.Cache: sequences that begin alike, and keep the keys and values of that once."""

import copy
import io

import pytest
import torch

transformers = pytest.importorskip("transformers")

import rapt.transformers  # noqa: E402
import test_mla_models  # noqa: E402
from rapt import _model_fork  # noqa: E402
from rapt._model_cache_fork import ForkedLayer  # noqa: E402
from rapt._model_fork import SharedRows  # noqa: E402
from test_delta_rule_models import linear_model  # noqa: E402
from test_transformers import CONFIGS, models, prompt  # noqa: E402

rapt.transformers.register()
Cache = rapt.transformers.Cache

pytestmark = pytest.mark.usefixtures("seeded")


def both(name):
    return test_mla_models.models(name) if name in test_mla_models.MODELS else models(name)


def read(model, ids, **options):
    cache = Cache(model.config, **options)
    with torch.no_grad():
        model(ids, past_key_values=cache)
    return cache


@pytest.mark.parametrize("options", [{"do_sample": True}, {"num_beams": 3, "do_sample": False}], ids=str)
@pytest.mark.parametrize("name", [*CONFIGS, "deepseek_v3", "deepseek_v32"])
def test_sequences_from_one_prompt(name, options):
    """The same as by reading the prompt for each of them, with an attention mask that hides two tokens."""
    eager, ours = both(name)
    ids = prompt(False)["input_ids"][:1]
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    cache = Cache(ours.config)
    positions = (mask.cumsum(1) - 1).clamp(min=0)  # as generate() counts
    with torch.no_grad():
        ours(ids[:, :-1], attention_mask=mask[:, :-1], position_ids=positions[:, :-1], past_key_values=cache)
    options = options | {"max_new_tokens": 12, "num_return_sequences": 3, "attention_mask": mask}
    for _ in range(2):  # a fork leaves the cache as it is
        torch.manual_seed(1)
        wanted = eager.generate(ids, **options)
        torch.manual_seed(1)
        assert torch.equal(ours.generate(ids, **options, past_key_values=cache.fork(3)), wanted)
    assert wanted.unique(dim=0).shape[0] == 3


@pytest.mark.parametrize("kind", ["qwen3_next", "olmo_hybrid"])
def test_states_of_linear_attention_are_copied(kind):
    ours = linear_model(kind, attn_implementation="rapt").eval()
    ids = torch.randint(3, 64, (1, 20))
    cache = read(ours, ids[:, :-1])
    options = {"max_new_tokens": 8, "do_sample": False}
    wanted = ours.generate(ids, **options)
    for _ in range(2):
        got = ours.generate(ids, **options, num_return_sequences=1, past_key_values=cache.fork())
        assert torch.equal(got, wanted)
    assert any(isinstance(layer, ForkedLayer) for layer in cache.fork().layers)


@pytest.mark.parametrize("kv_dtype", [None, "i8"])
def test_a_tree_of_chats(kv_dtype):
    """System prompt, two chats of it, and two answers to one of them: each as if it had read all by itself."""
    _, ours = models("llama")
    system, one, other, answer = (torch.randint(2, 96, (1, n)) for n in (30, 5, 7, 4))
    root = read(ours, system, kv_dtype=kv_dtype)
    chats = [(root.fork(), one), (root.fork(), other)]
    with torch.no_grad():
        for cache, text in chats:
            ours(text, past_key_values=cache)
        leaf = chats[0][0].fork(2)
        got = ours(answer.expand(2, -1), past_key_values=leaf).logits
        root.crop(-1)
        ours(torch.tensor([[5, 6, 7]]), past_key_values=root)  # is of no concern to the others
        ours(answer, past_key_values=chats[0][0])
        got = got, ours(answer.expand(2, -1) + 1, past_key_values=leaf).logits
        alone = [ours(torch.cat((system, one, x), 1), past_key_values=Cache(ours.config, kv_dtype=kv_dtype)).logits for x in
                 (answer, torch.cat((answer, answer + 1), 1))]  # fmt: skip
    torch.testing.assert_close(got[0], alone[0][:, -4:].expand(2, -1, -1), rtol=0, atol=1e-4)
    torch.testing.assert_close(got[1], alone[1][:, -4:].expand(2, -1, -1), rtol=0, atol=1e-4)
    layer = leaf.layers[0]
    assert [part[0].shape[2] for part in layer.parts] == [30, 5] and layer.own.keys.shape[2] == 8 and leaf.get_seq_length() == 43


@pytest.mark.parametrize("kv_dtype", [None, "i8", "i4x2"])
def test_memory(kv_dtype):
    """16 sequences of a prompt of 900 tokens and 100 of their own: 2500 tokens in place of 16000."""
    cache = Cache(kv_dtype=kv_dtype)
    with torch.no_grad():
        cache.update(*torch.randn(2, 1, 2, 900, 32), 0)
        one, place = cache.nbytes, cache.layers[0].keys
        fork = cache.fork(16)
        fork.update(*torch.randn(2, 16, 2, 100, 32), 0)
    kept = fork.layers[0].keys.parts[0]
    assert kept is place and fork.nbytes * 900 == one * 2500


@pytest.mark.parametrize("kv_dtype", [None, "i8"])
def test_random_calls_do_what_copies_do(kv_dtype):
    """What a fork hands to attention is what a cache has that was copied for every sequence, whatever is done to both."""
    draw = torch.Generator().manual_seed(3)

    def number(n):
        return int(torch.randint(n, (), generator=draw))

    def whole(rows):
        if isinstance(rows, rapt._model_fork.SharedRows):
            parts = [part.repeat_interleave(rows.batch // part.shape[0], 0) for part in rows.parts]
            return torch.cat([torch.cat([x.float() for x in rapt._codes.parts_of(part)], -1) for part in parts], 2)
        return torch.cat([x.float() for x in rapt._codes.parts_of(rows)], -1)

    with torch.no_grad():
        plain = Cache(kv_dtype=kv_dtype)
        plain.update(*torch.randn(2, 2, 2, 9, 8, generator=draw), 0)
        fork, batch = plain.fork(2), 4
        plain = copy.deepcopy(plain)
        plain.batch_repeat_interleave(2)
        for _ in range(120):
            call = number(8)
            if call < 3:
                new = torch.randn(2, batch, 2, 1 + number(3), 8, generator=draw)
                fork.update(*new, 0), plain.update(*new, 0)
            elif call == 3 and plain.get_seq_length() > 3:
                n = -1 - number(3)
                fork.crop(n), plain.crop(n)
            elif call == 4:
                beams = torch.randint(batch, (batch,), generator=draw)
                fork.reorder_cache(beams), plain.reorder_cache(beams)
            elif call == 5 and batch <= 4:
                batch *= 2
                fork.batch_repeat_interleave(2), plain.batch_repeat_interleave(2)
            elif call == 6 and batch > 4:
                chosen, batch = torch.randperm(batch, generator=draw)[:4], 4
                fork.batch_select_indices(chosen), plain.batch_select_indices(chosen)
            elif call == 7 and number(3) == 0:
                if number(2):
                    fork, old = fork.fork(), fork
                    old.update(*torch.full((2, batch, 2, 5, 8), 9.0), 0)
                else:
                    file = io.BytesIO()
                    torch.save(fork, file)
                    file.seek(0)
                    fork = torch.load(file, weights_only=False)
            layer, other = fork.layers[0], plain.layers[0]
            assert fork.get_seq_length() == plain.get_seq_length() and layer.get_mask_sizes(3) == other.get_mask_sizes(3)
            assert torch.equal(whole(layer.keys), whole(other.keys)) and torch.equal(whole(layer.values), whole(other.values))


def test_what_forks_refuse():
    _, ours = models("llama")
    ids = prompt(False)["input_ids"][:1]
    cache = read(ours, ids[:, :-1])
    for n in (0, -1, True, 2.0):
        with pytest.raises(ValueError, match="n: got .*; wanted a number of sequences, 1 or more"):
            cache.fork(n)
    with pytest.raises(ValueError, match="past_key_values: got a fork .* where gradients are recorded"):
        ours(ids[:, -1:], past_key_values=cache.fork())
    with torch.no_grad(), pytest.raises(ValueError, match="keys: got 1 sequences; wanted 2, as the fork has"):
        ours(ids[:, -1:], past_key_values=cache.fork(2))
    fork = cache.fork()
    with pytest.raises(ValueError, match="crop: got 2; wanted 0 or less"):
        fork.layers[0].crop(2)
    rows = fork.layers[0].parts[0][0]
    with torch.no_grad(), pytest.raises(ValueError, match="values: got .*; wanted .*, as the fork has"):
        fork.layers[0].update(rows[:, :, :1].clone(), rows[:, :, :1, :-1].clone())
    assert fork.get_seq_length() == cache.get_seq_length()
    ours.set_attn_implementation("sdpa")
    with torch.no_grad(), pytest.raises(ValueError, match=r"past_key_values: got .* or a fork of one.*set_attn_implementation\("):
        ours(ids[:, -1:], past_key_values=cache.fork())


def test_reset_takes_any_batch():
    _, ours = models("llama")
    ids = prompt(False)["input_ids"]
    fork = read(ours, ids[:1]).fork(3)
    fork.reset()
    with torch.no_grad():
        assert torch.equal(ours(ids[:2], past_key_values=fork).logits, ours(ids[:2]).logits)


def test_a_sink_for_each_row():
    q, k, v = torch.randn(3, 4, 2, 8), torch.randn(3, 2, 9, 8), torch.randn(3, 2, 9, 8)
    k[:, :, :5], v[:, :, :5] = k[:1, :, :5], v[:1, :, :5]
    sinks = torch.randn(3, 4, 2, 1)
    parts = [SharedRows(3, (x[:1, :, :5], x[:, :, 5:])) for x in (k, v)]
    options = (None, None, sinks, True, -1, None, 0.3, 0.0)
    torch.testing.assert_close(_model_fork.forward(q, *parts, *options), _model_fork.forward(q, k, v, *options))


def test_a_fork_of_nothing_is_an_empty_cache():
    _, ours = models("llama")
    fork = Cache(ours.config).fork(3)
    ids = prompt(False)["input_ids"]
    with torch.no_grad():
        assert torch.equal(ours(ids, past_key_values=fork).logits, ours(ids, past_key_values=Cache(ours.config)).logits)
