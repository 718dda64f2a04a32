"""Tiny models of every type in transformers, and how rapt's attention fares in them against eager attention."""

import dataclasses
import inspect
import warnings

import torch
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import rapt.torch
import rapt.transformers

BATCH, LENGTH, VOCABULARY = 2, 11, 96
MAX_PARAMETERS = 100_000_000
TOLERANCE = 2e-3  # of the largest element, after a few layers in float32

# Sizes by the names that configs give to them.
NAMES = [
    (VOCABULARY, "vocab_size encoder_vocab_size decoder_vocab_size text_vocab_size vocab_size_per_layer_input entity_vocab_size"),
    (64, "hidden_size d_model n_embd dim embedding_size encoder_hidden_size decoder_hidden_size"),
    (96, "intermediate_size ffn_dim d_ff n_inner mlp_dim ffn_hidden_size moe_intermediate_size encoder_ffn_dim"),
    (96, "decoder_ffn_dim decoder_intermediate_size shared_expert_intermediate_size"),
    (2, "num_hidden_layers num_layers n_layer n_layers encoder_layers decoder_layers depth num_decoder_layers"),
    (2, "num_encoder_layers decoder_num_hidden_layers num_local_layers type_vocab_size"),
    (4, "num_attention_heads num_heads n_head n_heads encoder_attention_heads decoder_attention_heads"),
    (4, "encoder_num_attention_heads decoder_num_attention_heads num_experts num_local_experts n_routed_experts moe_num_experts"),
    (4, "sliding_window attention_chunk_size attention_window local_attention index_topk"),  # less than LENGTH
    (2, "num_key_value_heads encoder_num_key_value_heads decoder_num_key_value_heads"),
    (16, "head_dim d_kv v_head_dim qk_nope_head_dim attention_head_dim global_head_dim query_pre_attn_scalar"),
    (16, "hidden_size_per_layer_input entity_emb_size"),
    (8, "qk_rope_head_dim index_head_dim rotary_dim kv_lora_rank q_lora_rank o_lora_rank index_n_heads patch_size"),
    (256, "max_position_embeddings n_positions max_source_positions max_target_positions"),
    (1, "num_experts_per_tok moe_k n_group topk_group n_shared_experts encoder_num_hidden_layers num_dense_layers"),
    (32, "image_size spatial_size"),
    (1.0, "layer_scale_init_value layerscale_value initializer_factor"),
    (2.0, "attn_logit_softcapping attn_logit_softcap"),  # one that bends
    (0.0, "dropout attention_dropout hidden_dropout layerdrop encoder_layerdrop decoder_layerdrop"),
    (0, "pad_token_id"),
    (1, "bos_token_id decoder_start_token_id max_window_layers"),
    (2, "eos_token_id sep_token_id"),
    (False, "tie_word_embeddings"),
    (True, "use_sliding_window"),
]
SIZES = {name: size for size, names in NAMES for name in names.split()}
# Where the model wants sizes that fit each other, or has its own names for them.
SPECIAL = {
    **dict.fromkeys(
        ["qwen2_vl_text", "qwen2_5_vl_text", "paddleocr_vl_text", "glm_ocr_text", "glm4v_text", "glm_image_text"],
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}},
    ),
    **dict.fromkeys(
        ["swin", "donut-swin"],
        {"image_size": 56, "patch_size": 4, "embed_dim": 32, "depths": [1, 1], "num_heads": [2, 4], "window_size": 7},
    ),
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "bamba": {"attn_layer_indices": [1]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "mamba_d_state": 4},
    "longformer": {"attention_window": [4, 4]},
    "led": {"attention_window": [4, 4]},
}


# Sizes that a config may leave to others, where 0 or None means that there is no such part.
MAY_BE_ABSENT = {"n_inner", "q_lora_rank", "rotary_dim"}


class Skipped(Exception):
    """This type cannot be made tiny and run without knowing it."""


def fields_of(cls):
    return {f.name for f in dataclasses.fields(cls)} | set(inspect.signature(cls.__init__).parameters)


def tiny_config(cls):
    """A config with its sizes and those of its parts made small, with a layer of each kind that it has."""
    usual, names, changes = cls(), fields_of(cls), {}
    for name, size in SIZES.items():
        try:
            default = getattr(usual, name, None)
        except Exception:  # it varies from layer to layer
            continue
        if default is None:
            fits = name not in MAY_BE_ABSENT
        else:
            fits = isinstance(default, (bool, int, float)) and isinstance(default, bool) == isinstance(size, bool)
        if name in names and fits:
            changes[name] = size
    if "kv_lora_rank" in changes and "num_key_value_heads" in changes:
        changes["num_key_value_heads"] = changes["num_attention_heads"]
    kinds = {name: list(dict.fromkeys(v)) for name, v in vars(usual).items() if is_kinds(v)}
    layers = max([2, *(len(v) for v in kinds.values())])
    for name, values in kinds.items():
        changes[name] = (values * layers)[:layers]
    if kinds and "num_hidden_layers" in changes:
        changes["num_hidden_layers"] = layers
    rope = getattr(usual, "rope_parameters", None)
    if isinstance(rope, dict) and "mrope_section" in rope:
        half = int(changes.get("head_dim", 16) * rope.get("partial_rotary_factor", 1)) // 2
        changes["rope_parameters"] = rope | {"mrope_section": [half - half // 3 * 2, half // 3, half // 3]}
    for name in getattr(cls, "sub_configs", {}):
        part = getattr(usual, name, None)
        if part is not None and dataclasses.is_dataclass(part):
            changes[name] = tiny_config(type(part))
    changes |= SPECIAL.get(cls.model_type, {})
    return cls(**changes)


def is_kinds(value):
    """True of a list that says for each layer of which kind it is."""
    return isinstance(value, (list, tuple)) and len(value) > 3 and all(isinstance(kind, str) for kind in value)


MAPPINGS = ["MODEL_MAPPING"] + sorted(
    name for name in vars(modeling_auto) if name.startswith("MODEL_FOR_") and name.endswith("_MAPPING")
)


def model_class(config):
    for name in MAPPINGS:
        mapping = getattr(modeling_auto, name)
        if type(config) in mapping:
            found = mapping[type(config)]
            return found[0] if isinstance(found, (tuple, list)) else found
    raise Skipped("no class of models in the auto mappings")


def model_types():
    with_model = {key for name in MAPPINGS for key in getattr(modeling_auto, name + "_NAMES", {})}
    return sorted(name for name in CONFIG_MAPPING if name in with_model)


def randomize(model):
    """Weights for which attention differs from key to key and matters for the output."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if not p.is_floating_point():
                continue
            owner = model.get_submodule(name.rpartition(".")[0])
            if p.dim() == 1:
                if "sink" in name or not p.isfinite().all() or not p.any():
                    p.copy_(torch.randn(p.shape, generator=generator) * (1.0 if "sink" in name else 0.1))
            elif isinstance(owner, torch.nn.Embedding):
                p.copy_(torch.randn(p.shape, generator=generator))
            elif p.dim() == 2 or not p.isfinite().all() or not p.any():
                fan_in = max(p[0].numel(), 1)
                p.copy_(torch.randn(p.shape, generator=generator) * 1.5 * fan_in**-0.5)


def first(config, *names):
    parts = [config] + [getattr(config, p) for p in getattr(config, "sub_configs", {}) if getattr(config, p, None) is not None]
    for part in parts:
        for name in names:
            value = vars(part).get(name)
            if value is not None:
                return value
    return None


CHANNELS = ("num_channels", "in_channels", "in_chans")
MELS = ("input_feat_per_channel", "num_mel_bins", "feature_size", "input_channels", "n_mels", "feature_projection_input_dim")


def make_inputs(model, padding, other=False):
    """Inputs by the names and sizes in the model's config. other: of the other layout, or with images beside the text."""
    config, parameters = model.config, inspect.signature(model.forward).parameters
    generator = torch.Generator().manual_seed(1)
    inputs = {}

    def tokens():
        size = first(config.get_text_config(), "vocab_size") or VOCABULARY
        return torch.randint(3, min(size, VOCABULARY), (BATCH, LENGTH), generator=generator)

    def image(extra=()):
        size = first(config, "image_size", "img_size") or 32
        size = (size, size) if isinstance(size, int) else tuple(size)[-2:]
        channels = first(config, *CHANNELS) or 3
        return torch.randn(BATCH, *extra, channels, *size, generator=generator)

    if "grid_thw" in parameters:  # images of different sizes, packed
        rows = 16 + 32
        columns = (first(config, *CHANNELS) or 3) * first(config, "patch_size") ** 2
        columns *= first(config, "temporal_patch_size") or 1
        name = "hidden_states" if "hidden_states" in parameters else "pixel_values"
        return {name: torch.randn(rows, columns, generator=generator), "grid_thw": torch.tensor([[1, 4, 4], [1, 4, 8]])}
    main = model.main_input_name
    if "input_ids" in parameters:
        main = "input_ids"
    if main == "input_ids":
        inputs["input_ids"] = tokens()
    elif main == "pixel_values":
        frames = first(config, "num_frames")
        inputs["pixel_values"] = image((frames,) if frames and other else ())
    elif main == "pixel_values_videos":
        inputs["pixel_values_videos"] = image((first(config, "num_frames", "frames_per_clip") or 2,))
    elif main == "input_features":
        mels = first(config, *MELS) or 80
        rows = first(config, "max_source_positions")
        size = (mels, 2 * rows) if rows and other else (64, mels)
        inputs["input_features"] = torch.randn(BATCH, *size, generator=generator)
        if "input_features_mask" in parameters:
            inputs["input_features_mask"] = torch.ones(BATCH, size[0 if size[1] == mels else 1], dtype=torch.int64)
    elif main == "input_values":
        inputs["input_values"] = torch.randn(BATCH, 4000, generator=generator)
    else:
        raise Skipped(f"wants {main}")
    if "bbox" in parameters:
        inputs["bbox"] = torch.zeros(BATCH, LENGTH, 4, dtype=torch.int64)
    if "attention_mask" in parameters and main == "input_ids":
        inputs["attention_mask"] = torch.ones(BATCH, LENGTH, dtype=torch.int64)
        hidden = {"left": slice(0, 4), "right": slice(LENGTH - 4, None)}.get(padding)
        if hidden is not None:
            inputs["attention_mask"][0, hidden] = 0
            inputs["input_ids"][0, hidden] = getattr(config.get_text_config(), "pad_token_id", None) or 0
    if "decoder_input_ids" in parameters:
        inputs["decoder_input_ids"] = tokens()[:, :7]
    if main == "input_ids" and other:
        inputs["input_ids"][:, 6] = 2  # where texts end, whose state stands for all of them: in no row padding
        inputs["pixel_values"] = image()
    return inputs


def tensors(output, prefix=""):
    """All tensors of floats in a model's output, by name, but for caches and what only eager attention gives."""
    if isinstance(output, torch.Tensor):
        if output.is_floating_point():
            yield prefix, output
    elif isinstance(output, dict):
        for key, value in output.items():
            if key not in ("past_key_values", "mems", "cache_params", "attentions"):
                yield from tensors(value, f"{prefix}.{key}")
    elif isinstance(output, (tuple, list)):
        for i, value in enumerate(output):
            yield from tensors(value, f"{prefix}.{i}")


def difference(got, wanted, real):
    """The largest difference relative to the largest element; of rows that are no padding."""
    worst = 0.0
    got, wanted = dict(tensors(got)), dict(tensors(wanted))
    assert got.keys() == wanted.keys()
    for name, b in wanted.items():
        a = got[name]
        if real is not None and b.shape[:2] == real.shape:
            a, b = a[real], b[real]
        if b.numel() == 0:
            continue
        same = (a == b) | (a.isnan() & b.isnan())
        size = b.nan_to_num(0, 0, 0).abs().max().clamp(min=1e-3)
        error = (a.double() - b.double()).masked_fill(same, 0).abs().max() / size
        worst = max(worst, float(error.nan_to_num(torch.inf)))
    return worst


def run(model, inputs):
    torch.manual_seed(0)
    with torch.no_grad():
        return model(**inputs)


def run_in_steps(model, inputs, cache=None):
    """The logits or states of the first 4 tokens, two single ones, and the rest at once, with a cache."""
    name = "decoder_input_ids" if "decoder_input_ids" in inputs else "input_ids"
    ids, outs, start = inputs[name], [], 0
    for stop in (4, 5, 6, ids.shape[1]):
        step = inputs | {name: ids[:, start:stop], "use_cache": True}
        if name == "input_ids":
            step["attention_mask"] = inputs["attention_mask"][:, :stop]
        if cache is not None:
            step["past_key_values"] = cache
        output = run(model, step)
        cache = output["past_key_values"]
        outs.append(next(output[key] for key in ("logits", "last_hidden_state") if key in output))
        start = stop
    return {"steps": torch.cat(outs, 1)}


def run_in_place(model, inputs):
    """The same with a cache of rapt's."""
    return run_in_steps(model, inputs, rapt.transformers.Cache(model.config))


def run_packed(model, inputs):
    """Two sequences in each row, which only the positions tell."""
    positions = torch.cat([torch.arange(5), torch.arange(LENGTH - 5)]).expand(BATCH, -1)
    return run(model, {"input_ids": inputs["input_ids"], "position_ids": positions, "use_cache": False})


def run_prefixed(model, inputs):
    """With tokens of an image, which see each other in some models."""
    kinds = torch.zeros_like(inputs["input_ids"])
    kinds[:, 3:7] = 1
    return run(model, inputs | {"token_type_ids": kinds})


def maker(model_type):
    """A function that makes the model with the attention that it is given, and the same weights each time."""
    config = tiny_config(CONFIG_MAPPING[model_type])
    cls = model_class(config)
    with torch.device("meta"):
        size = sum(p.numel() for p in cls._from_config(tiny_config(CONFIG_MAPPING[model_type])).parameters())
    if size > MAX_PARAMETERS:
        raise Skipped(f"{size / 1e6:.0f} million parameters")

    def make(attention):
        torch.manual_seed(0)
        model = cls._from_config(tiny_config(CONFIG_MAPPING[model_type]), attn_implementation=attention).eval()
        randomize(model)
        return model

    return make


@dataclasses.dataclass
class Outcome:
    """kind: "right", "refused", "said so" (runs, without rapt, with a warning); or "skipped", where eager attention itself
    cannot be run; or "wrong", "silent", "error", which are failures. Errors are relative, by scenario."""

    kind: str
    detail: str = ""
    errors: dict = dataclasses.field(default_factory=dict)
    calls: int = 0

    def __str__(self):
        errors = " ".join(f"{name}={error:.1e}" for name, error in self.errors.items())
        return f"{self.kind}: {self.calls} calls {errors} {self.detail}"


def scenarios(model, other):
    """Names, paddings, and functions that run a model with inputs."""
    inputs, parameters = make_inputs(model, None, other), inspect.signature(model.forward).parameters
    yield "whole", None, run
    padded = "input_ids" in inputs and "attention_mask" in inputs
    if padded:
        yield "left", "left", run
        yield "right", "right", run
    if "past_key_values" in parameters and "decoder_input_ids" in inputs:
        yield "steps", "left" if padded else None, run_in_steps
    elif "past_key_values" in parameters and padded:
        yield "steps", None, run_in_steps
        yield "steps left", "left", run_in_steps
        yield "in place", "left", run_in_place
        if "position_ids" in parameters and not other:
            yield "packed", None, run_packed
        if "token_type_ids" in parameters:
            yield "prefix", "left", run_prefixed


def is_refusal(error):
    frame = error.__traceback__
    while frame.tb_next is not None:
        frame = frame.tb_next
    if "attn_implementation=" in str(error) and isinstance(error, ValueError):  # transformers' own, of a config
        return True
    return frame.tb_frame.f_globals.get("__name__") in ("rapt.transformers", "rapt._model_keywords", "rapt._model_flash")


def calls():
    return rapt.transformers._calls + rapt._model_flash.calls


def classify(model_type, name="rapt"):
    """The Outcome of a type with attention of this name."""
    try:
        make = maker(model_type)
        eager = make("eager")
        for other in (False, True):
            try:
                wanted = {"whole": run(eager, make_inputs(eager, None, other))}
                break
            except Exception:
                if other:
                    raise
        if not any(True for _ in tensors(wanted["whole"])):
            raise Skipped("gives no tensors")
        if all(t.isnan().all() for _, t in tensors(wanted["whole"])):
            raise Skipped("eager attention gives NaN")
    except Exception as error:
        return Outcome("skipped", f"{type(error).__name__}: {' '.join(str(error).split())[-150:]}")
    errors, before = {}, calls()
    rapt._refusals.warned.clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", rapt.torch.FallbackWarning)
        try:
            ours = make(name)
            for scenario, padding, how in scenarios(eager, other):
                inputs = make_inputs(eager, padding, other)
                if scenario not in wanted:
                    try:
                        wanted[scenario] = how(eager, inputs)
                    except Exception:
                        continue  # that is not for this type
                real = inputs["attention_mask"].bool() if padding else None
                errors[scenario] = difference(how(ours, inputs), wanted[scenario], real)
        except Exception as error:
            if is_refusal(error):
                return Outcome("refused", str(error))
            return Outcome("error", f"{type(error).__name__}: {str(error)[:300]}", errors)
    made = calls() - before
    said = [str(w.message) for w in caught if issubclass(w.category, rapt.torch.FallbackWarning)]
    if max(errors.values()) > TOLERANCE:
        kind = "wrong"
    elif made:
        kind = "right"
    else:
        kind = "said so" if said else "silent"
    return Outcome(kind, "; ".join(said), errors, made)
