"""Long prompts in transformers' models: nothing of the size of all pairs of tokens is made, be there padding or packed sequences."""

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree

transformers = pytest.importorskip("transformers")

import rapt.transformers  # noqa: E402
from rapt._model_lazy import LazyTensor  # noqa: E402
from test_transformers import CONFIGS, SIZES, models  # noqa: E402

rapt.transformers.register()
pytestmark = pytest.mark.usefixtures("seeded", "without_fallbacks")
LENGTH = 96


class Largest(TorchFunctionMode):
    """Notes the most bytes that a function of PyTorch's has returned, masks that nobody reads aside."""

    bytes = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        made = func(*args, **kwargs or {})
        for x in _pytree.tree_leaves(made):
            if isinstance(x, torch.Tensor) and not isinstance(x, LazyTensor):
                self.bytes = max(self.bytes, x.untyped_storage().nbytes())
        return made


def padded(left, right, length=LENGTH):
    """Sequences with that much padding, as generate() counts their positions."""
    ids = torch.randint(2, 96, (len(left), length))
    mask = torch.ones_like(ids)
    for row, begin, end in zip(mask, left, right):
        row[:begin], row[length - end :] = 0, 0
    return {"input_ids": ids, "attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}


def in_chunks(model, inputs, chunk, cache=None):
    cache = rapt.transformers.Cache(model.config) if cache is None else cache
    logits = []
    for begin in range(0, LENGTH, chunk):
        part = {name: inputs[name][:, begin : begin + chunk] for name in ("input_ids", "position_ids")}
        part["attention_mask"] = inputs["attention_mask"][:, : begin + chunk]
        logits.append(model(**part, past_key_values=cache).logits)
    return torch.cat(logits, 1)


def test_a_mask_that_is_written_to(monkeypatch):
    """By code of a model's own, which hides one more key."""
    _, ours = models("llama")
    inputs = padded((0, 33), (0, 0))
    file = transformers.models.llama.modeling_llama
    make = file.create_causal_mask

    def hiding(*args, **kwargs):
        mask = make(*args, **kwargs)
        mask[..., 40] = False
        return mask

    monkeypatch.setattr(file, "create_causal_mask", hiding)
    with torch.no_grad():
        got = ours(**inputs).logits
        ours.set_attn_implementation("sdpa")
        wanted = ours(**inputs).logits
    shown = inputs["attention_mask"].bool()
    torch.testing.assert_close(got[shown], wanted[shown], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("chunk", [LENGTH, 40, 7])
@pytest.mark.parametrize(("left", "right"), [((0, 33), (0, 0)), ((0, 0), (50, 0)), ((0, 90), (60, 0))], ids=["left", "right", "both"])
@pytest.mark.parametrize("name", CONFIGS)
def test_padding(name, left, right, chunk, monkeypatch):
    eager, ours = models(name)
    inputs, made = padded(left, right), []
    whole = rapt.transformers._whole_mask
    monkeypatch.setattr(rapt.transformers, "_whole_mask", lambda **a: made.append(a) or whole(**a))
    with torch.no_grad():
        got, wanted = in_chunks(ours, inputs, chunk), eager(**inputs).logits
    real = inputs["attention_mask"].bool()
    torch.testing.assert_close(got[real], wanted[real], rtol=0, atol=2e-4)
    assert not made


def test_padding_over_codes(monkeypatch):
    """As if each sequence were alone."""
    _, ours = models("llama")
    monkeypatch.setattr(rapt.transformers, "_whole_mask", None)
    inputs = padded((0, 33), (20, 0))
    with torch.no_grad():
        got = in_chunks(ours, inputs, 40, rapt.transformers.Cache(ours.config, kv_dtype="i8"))
        for i, (begin, end) in enumerate(((0, LENGTH - 20), (33, LENGTH))):
            alone = ours(inputs["input_ids"][i : i + 1, begin:end], past_key_values=rapt.transformers.Cache(ours.config, kv_dtype="i8"))
            torch.testing.assert_close(got[i, begin:end], alone.logits[0], rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2"])
def test_packed_sequences(name, monkeypatch):
    """By positions that begin again: with "rapt", too, logits and gradients are those of eager attention with its mask."""
    eager, ours = models(name)
    monkeypatch.setattr(rapt.transformers, "_whole_mask", None)
    ids = torch.randint(2, 96, (1, LENGTH))
    positions = torch.cat([torch.arange(n) for n in (30, 1, 45, 20)])[None]
    losses = [model(ids, position_ids=positions, use_cache=False, labels=ids) for model in (ours, eager)]
    torch.testing.assert_close(losses[0].logits, losses[1].logits, rtol=0, atol=2e-4)
    for made in losses:
        made.loss.backward()
    for got, wanted in zip(ours.parameters(), eager.parameters()):
        if wanted.grad is not None:
            assert (got.grad - wanted.grad).norm() <= 1e-4 * wanted.grad.norm() + 1e-6


def one_layer():
    sizes = SIZES | {"num_hidden_layers": 1, "vocab_size": 32, "max_position_embeddings": 1 << 20}
    return transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**sizes), attn_implementation="rapt").eval()


CASES = [(what, chunk) for what in ("whole", "left", "right", "i8") for chunk in (4096, 512)] + [("packed", 4096)]


@pytest.mark.parametrize(("what", "chunk"), CASES)
def test_nothing_is_made_of_all_pairs(what, chunk):
    """The largest tensor is of the tokens' size: the room of the MLP's inner columns, twice."""
    model, length = one_layer(), 4096
    inputs = padded((9 * (what in ("left", "i8")), 0), (9 * (what == "right"), 0), length)
    cache = rapt.transformers.Cache(model.config, kv_dtype="i8" if what == "i8" else None)
    inputs |= {"input_ids": inputs["input_ids"] % 32, "logits_to_keep": 1}
    packed = {"input_ids": inputs["input_ids"][:1], "position_ids": torch.arange(length)[None] % 1000, "use_cache": False}
    if what == "packed":
        inputs = packed
    with torch.no_grad(), Largest() as largest:
        for begin in range(0, length, chunk):
            part = dict(inputs) if what == "packed" else inputs | {"past_key_values": cache}
            for name in ("input_ids", "position_ids"):
                part[name] = part[name][:, begin : begin + chunk]
            if "attention_mask" in part:
                part["attention_mask"] = part["attention_mask"][:, : begin + chunk]
            model(**part)
    assert 0 < largest.bytes <= 2 * 2 * length * 96 * 4 < length * length
    if what in ("left", "packed") and chunk == length:  # the check itself: PyTorch's attention has a mask of all pairs
        model.set_attn_implementation("sdpa")
        with torch.no_grad(), Largest() as largest:
            model(**inputs)
        assert largest.bytes >= length * length
