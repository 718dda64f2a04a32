"""Training on packed sequences under "rapt_flash" gives the weights that training on each sequence by itself gives."""

import copy

import pytest
import torch

transformers = pytest.importorskip("transformers")

import rapt.transformers  # noqa: E402
from rapt import _model_flash  # noqa: E402

rapt.transformers.register()

SIZES = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
STEPS = [(7, 1, 12, 4), (5, 9, 2)]  # lengths of sequences


def two_models():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SIZES, num_key_value_heads=2, attention_dropout=0.0)
    theirs = transformers.LlamaForCausalLM._from_config(config, attn_implementation="eager").train()
    ours = copy.deepcopy(theirs)
    ours.set_attn_implementation("rapt_flash")
    return theirs, ours


def loss_alone(model, sequences):
    """The mean over all tokens that have one before them."""
    total, count = 0.0, 0
    for ids in sequences:
        logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1]
        total = total + torch.nn.functional.cross_entropy(logits, ids[1:], reduction="sum")
        count += len(ids) - 1
    return total / count


@pytest.mark.parametrize("borders", [True, False], ids=["cu_seq_lens", "position_ids"])
def test_packed_steps_are_steps_of_separate_sequences(borders):
    theirs, ours = two_models()
    pack = transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=borders)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4) for model in (theirs, ours)]
    before = {name: p.detach().clone() for name, p in ours.named_parameters()}
    generator = torch.Generator().manual_seed(1)
    for lengths in STEPS:
        sequences = [torch.randint(96, (n,), generator=generator) for n in lengths]
        batch = pack([{"input_ids": ids.tolist(), "labels": ids.tolist()} for ids in sequences])
        assert batch["input_ids"].shape == (1, sum(lengths)) and ("cu_seq_lens_q" in batch) == borders
        calls = _model_flash.calls
        losses = loss_alone(theirs, sequences), ours(**batch, use_cache=False).loss
        assert _model_flash.calls == calls + SIZES["num_hidden_layers"]
        torch.testing.assert_close(losses[1], losses[0], rtol=1e-5, atol=1e-5)
        for loss, optimizer in zip(losses, optimizers):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    for (name, wanted), got in zip(theirs.named_parameters(), ours.parameters()):
        moved = (wanted - before[name]).abs().max()
        assert moved > 1e-3, name
        assert (got - wanted).abs().max() < 1e-2 * moved, name


def test_a_mixed_up_batch_is_found():
    """That the comparison above would notice sequences that see each other."""
    theirs, ours = two_models()
    ids = torch.randint(96, (12,), generator=torch.Generator().manual_seed(2))
    mixed = ours(input_ids=ids[None], labels=ids[None].masked_fill(torch.arange(12) == 5, -100), use_cache=False).loss
    apart = loss_alone(theirs, [ids[:5], ids[5:]])
    assert (mixed - apart).abs() > 1e-4
