"""rapt's attention in tiny models of transformers' types: right, refused, or said not to be in use, and never wrong in silence.

    python -m pytest python/tests/test_model_sweep.py --all-models -rs      # every type by both names; skipped ones with the reason
"""

import pytest
import torch

pytest.importorskip("transformers")

import model_sweep  # noqa: E402
import rapt.transformers  # noqa: E402
from transformers import AttentionInterface  # noqa: E402

rapt.transformers.register()

# What is tested without --all-models, of each mechanism one at least.
EXPECTED = {
    "bert": "right",
    "llama": "right",
    "qwen3": "right",
    "mistral": "right",  # a sliding window
    "gemma2": "right",  # softcap, not for sdpa
    "gemma3_text": "right",
    "gpt_oss": "right",  # sinks
    "modernbert": "right",  # a window to both sides, which layers count with the row
    "t5gemma": "right",  # and without
    "inkling2_text": "right",  # a sink for every row, and a bias
    "llama4_text": "right",  # chunks
    "phimoe": "right",  # a window in the mask that layers do not know of
    "paligemma": "right",  # layers that call themselves bidirectional by the config, under a causal mask
    "aimv2": "right",  # and always
    "nllb-moe": "right",  # no flag of causality: for eager attention only
    "deepseek_v4": "right",  # a mask that layers extend
    "hy_v4": "right",  # indexers, and masks of numbers over latents
    "deepseek_v32": "right",  # sparse attention by indices
    "t5": "right",
    "whisper": "right",
    "vit": "right",
    "clip": "right",
    "mpnet": "refused",
    "roformer": "refused",
    "bloom": "refused",
    "falcon": "refused",
    "gptj": "refused",
    "git": "refused",
    "mamba": "said so",
}

# By "rapt_flash": those of above, too, and what differs.
EXPECTED_OF_SEQUENCES = {
    "bert": "right",
    "llama": "right",
    "mistral": "right",
    "gemma2": "right",
    "gpt_oss": "right",
    "modernbert": "right",  # a window to both sides, which layers count with the row
    "t5gemma": "right",  # and without
    "paligemma": "right",
    "qwen2_vl": "right",  # layers of several kinds
    "vit": "right",
    "whisper": "right",
    "hrm_text": "refused",  # by transformers, as its config says that tokens of the prompt see each other
    "t5": "refused",
    "phimoe": "refused",
    "bloom": "refused",
    "mamba": "refused",
}


def pytest_generate_tests(metafunc):
    if "model_type" in metafunc.fixturenames and not metafunc.definition.get_closest_marker("parametrize"):
        every = metafunc.config.getoption("--all-models")
        chosen = EXPECTED if metafunc.function is test_type else EXPECTED_OF_SEQUENCES
        metafunc.parametrize("model_type", model_sweep.model_types() if every else chosen)


def check(model_type, name, expected):
    outcome = model_sweep.classify(model_type, name)
    if outcome.kind == "skipped" and model_type not in expected:
        pytest.skip(f"{model_type}: {outcome.detail}")
    assert outcome.kind in ("right", "refused", "said so"), str(outcome)
    assert outcome.kind == expected.get(model_type, outcome.kind), str(outcome)
    if outcome.kind == "refused":
        assert "wanted" in outcome.detail or "is not supported when" in outcome.detail


def test_type(model_type):
    check(model_type, "rapt", EXPECTED)


def test_type_without_padding(model_type):
    check(model_type, "rapt_flash", EXPECTED_OF_SEQUENCES)


@pytest.mark.parametrize("model_type", ["bert", "llama", "mistral", "gemma2", "gemma3_text", "t5", "bart", "vit"])
def test_bfloat16(model_type):
    """No further from float32 than eager attention in bfloat16, but for a margin: both round."""
    make = model_sweep.maker(model_type)
    inputs = model_sweep.make_inputs(make("eager"), "left")
    real = inputs["attention_mask"].bool() if "attention_mask" in inputs else None
    halves = {name: t.bfloat16() if t.is_floating_point() else t for name, t in inputs.items()}
    exact = model_sweep.run(make("eager"), inputs)
    theirs, ours = (model_sweep.run(make(name).bfloat16(), halves) for name in ("eager", "rapt"))
    error = model_sweep.difference(ours, exact, real)
    assert error <= 1.5 * model_sweep.difference(theirs, exact, real) + 1e-2
    assert error < 0.2


def spoil(monkeypatch, change):
    """Puts change(attention_mask, keywords), which gives what to use for them, before rapt's attention function."""
    for name in ("rapt", "rapt|whole_masks"):

        def spoiled(module, query, key, value, attention_mask, forward=AttentionInterface._global_mapping[name], **kwargs):
            mask, kwargs = change(attention_mask, kwargs)
            return forward(module, query, key, value, mask, **kwargs)

        monkeypatch.setitem(AttentionInterface._global_mapping, name, spoiled)


SPOILED = [
    ("bert", ["attention_mask"], {}, {"left", "right"}),
    ("llama", ["attention_mask"], {}, {"left", "steps left", "packed"}),  # behind the padding, right is causal
    ("llama", [], {"is_causal": False}, {"whole", "steps"}),
    ("mistral", ["sliding_window"], {}, {"whole", "steps"}),
    ("gemma2", ["softcap"], {}, {"whole", "left", "steps"}),
    ("gpt_oss", ["s_aux"], {}, {"whole", "left", "steps"}),
    ("inkling2_text", ["sinks"], {}, {"whole", "left", "steps"}),
    ("t5", ["position_bias"], {}, {"whole", "left", "steps"}),
    ("llama4_text", ["attention_mask"], {"is_causal": True}, {"whole", "steps"}),
    ("gemma3_text", ["attention_mask"], {"is_causal": True}, {"left", "packed"}),
    ("paligemma", ["attention_mask"], {"is_causal": True}, {"left", "prefix"}),
    ("deepseek_v32", ["indices"], {}, {"whole"}),
]


@pytest.mark.parametrize("model_type, names, changed, found_by", SPOILED)
def test_what_is_wrong_is_found(model_type, names, changed, found_by, monkeypatch):
    def change(mask, kwargs):
        kept = {name: given for name, given in kwargs.items() if name not in names}
        return None if "attention_mask" in names else mask, kept | changed

    spoil(monkeypatch, change)
    outcome = model_sweep.classify(model_type)
    assert outcome.kind == "wrong"
    assert found_by <= {name for name, error in outcome.errors.items() if error > model_sweep.TOLERANCE}, str(outcome)


def test_a_wrong_mask_is_found(monkeypatch):
    """One key more than the mask has, of 11."""
    spoil(monkeypatch, lambda mask, kwargs: (None if mask is None else mask | mask.roll(1, -1), kwargs))
    assert model_sweep.classify("bert").kind == "wrong"
    assert model_sweep.classify("qwen3").kind == "wrong"


def test_silence_is_found(monkeypatch):
    monkeypatch.setattr(rapt.transformers, "_own_attention", lambda *_: "")
    outcome = model_sweep.classify("mpnet")
    assert outcome.kind in ("said so", "wrong")
    monkeypatch.setattr(rapt.transformers, "_say_if_unused", lambda *_: None)
    assert model_sweep.classify("mamba").kind == "silent"
