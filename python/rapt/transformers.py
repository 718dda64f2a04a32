"""rapt's kernels in Hugging Face transformers models, on the CPU and, if rapt has its GPU backend, on GPUs.

    import rapt.transformers
    rapt.transformers.register()
    model = AutoModelForCausalLM.from_pretrained(..., attn_implementation="rapt")   # or model.set_attn_implementation("rapt")

register() registers an attention function and the function that makes its masks. KV heads are not repeated. Causal
masks and sliding windows are not materialised, and padding and packed sequences become lengths. Softcap, sinks,
position biases and the keys chosen by sparse attention are supported. Chunked attention and static caches arrive as
boolean masks. Rows of padding are 0. Latent attention reads the cache's latents.

attn_implementation="rapt_flash" computes sequences without padding, on the CPU. It removes padding from batches and
separates packed sequences (position_ids that restart, cu_seq_lens_q). transformers' continuous batching and
sentence-transformers run on it. `python -m rapt.transformers serve ...` is `transformers serve` with rapt registered.

Making a model that computes attention itself (Bloom, Falcon, GPT-J, MPNet) raises ValueError. Models that transformers
requires masks for get the whole masks of "eager". Unknown keywords of attention are errors. A model whose first forward
calls no attention gives a rapt.torch.FallbackWarning.

For models with rapt's attention, generate() makes a Cache, which is written in place, unless you pass a cache. Layers
with the gated delta rule (Qwen3-Next, Qwen3.5, Kimi Linear, OLMo Hybrid, ...) use rapt's on the CPU, and on a GPU
without gradients.

In most models, one call does the RMS norms of q and k, the rotary embedding and the append to the cache. fused(model)
lists the layers that make this call, and register(name, fuse=False) leaves the work to the model's own code.

Gradients and dropout are those of rapt.torch, with gradients of sinks and position biases. PyTorch computes float64,
and calls on other devices that rapt.torch leaves to it, with a rapt.torch.FallbackWarning. Attention weights are not
returned: use "eager" for output_attentions.

Raises ImportError on import if transformers is missing or older than 5.23.
"""

from __future__ import annotations

import inspect
import re
import sys
import warnings
from functools import cache
from typing import Any

from rapt._requirements import require

require("rapt.transformers", "torch", "transformers")
require("rapt.transformers", "transformers")

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling
from torch.nn import functional
from torch.nn.attention.bias import causal_lower_right
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import causal_mask_function, eager_mask, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from rapt import _core, _model_attention, _model_cache, _model_delta_rule, _model_flash, _model_fork, _model_keywords
from rapt import _model_latent, _model_masks, _model_rotary, _model_serving, _model_sparse, _refusals, _seed
from rapt import torch as rapt_torch
from rapt._codes import OnlyForRapt
from rapt._model_cache import Cache
from rapt._model_lazy import LazyTensor, materialized
from rapt._model_rotary import fused
from rapt._scalars import boolean

__all__ = ["Cache", "fused", "register"]

_WHOLE_MASKS = "|whole_masks"
_FLASH = "_flash"  # transformers and others look for "flash" in a name, and then give sequences without padding
_registered: dict[str, str] = {}  # what a config may hold, to the name that was asked for
_of_sequences: dict[str, str] = {}  # names for sequences without padding, to those for masks
_base: Any = PreTrainedModel
_choose = _base.get_correct_attn_implementation
_make_ready = _base.post_init


def register(name: str = "rapt", *, fuse: bool = True) -> None:
    """Makes attn_implementation=name, and name + "_flash" for sequences without padding, known to transformers.

    name            The name, default "rapt".
    fuse            True (default): layers whose code rapt knows do the norms of q and k, the rotary embedding and the
                    append to the cache in one call. False: by their own code.

    Afterwards, making a model (or a part of one) that computes attention itself with such a name raises ValueError, as
    does switching to it. A model whose first forward calls no attention gives a rapt.torch.FallbackWarning.

    Raises TypeError or ValueError, naming the argument, also for a name that somebody else has registered.
    """
    fuse = boolean("fuse", fuse)
    if not isinstance(name, str):
        raise TypeError(f"name: got {name!r}; wanted a str")
    if name in ("", "eager") or (name in ALL_ATTENTION_FUNCTIONS and name not in _registered):
        raise ValueError(f'name: got "{name}"; wanted a new one, such as "rapt"')
    AttentionInterface.register(name, _attention_forward)
    AttentionMaskInterface.register(name, _mask)
    AttentionInterface.register(name + _WHOLE_MASKS, _attention_with_whole_masks)
    AttentionMaskInterface.register(name + _WHOLE_MASKS, eager_mask)
    AttentionInterface.register(name + _FLASH, _attention_of_sequences)
    AttentionMaskInterface.register(name + _FLASH, _mask_of_sequences)
    _registered[name] = _registered[name + _WHOLE_MASKS] = name
    _registered[name + _FLASH] = name + _FLASH
    _of_sequences[name + _FLASH] = name
    change = _model_rotary.names.update if fuse else _model_rotary.names.difference_update
    change((name, name + _WHOLE_MASKS, name + _FLASH))
    _model_serving.prepare(name + _FLASH)
    # The one place where transformers asks a class of models what it can do; for names that are not its own it asks nothing.
    _base.get_correct_attn_implementation = _get_correct_attn_implementation
    _base.post_init = _post_init


def _attention_of_sequences(module: torch.nn.Module, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
    return _model_flash.forward(_attention_forward, module, *args, **kwargs)


def _mask_of_sequences(**arguments: Any) -> Tensor | None:
    mask = _model_masks.mask(**arguments)
    return _mask(**arguments) if mask is NotImplemented else mask


def _post_init(self: Any) -> None:
    """Its layers are there now, which they are not when the model is asked for its attention."""
    _make_ready(self)
    if self.config._attn_implementation in _registered:
        _prepare(self)


def _prepare(model: Any) -> None:
    """Its layers, for rapt's attention."""
    _model_delta_rule.choose(model, True)
    _model_latent.prepare(model, _registered)
    _model_rotary.prepare(model)


def _get_correct_attn_implementation(self: Any, requested_attention: str | None, is_init_check: bool = False) -> str:
    name = _registered.get(requested_attention or "")
    if name is None:
        chosen: str = _choose(self, requested_attention, is_init_check)
        _model_delta_rule.choose(self, False)
        return chosen
    cls: Any = type(self)
    config = self.config
    source = _source(cls)
    # Without a mask, layers must say what they mean: is_causal, as all do that may use sdpa or flash attention through the
    # interface, but for some that are always given masks of causality, and the window, which some leave to the mask.
    tells = cls._supports_sdpa or (cls._supports_flash_attn and cls._supports_attention_backend)
    tells &= _size(config, "sliding_window") is None or "sliding_window=" in source
    tells &= "causal_mask(" not in source or "is_causal = False" not in source or bool(_CAUSAL.search(source))
    reason, other = _own_attention(cls, source, name), "sdpa" if cls._supports_sdpa else "eager"
    if not reason and name in _of_sequences:
        reason, other = _model_serving.why_not(cls, tells), _of_sequences[name]
    if reason:
        raise ValueError(
            f'attn_implementation: got "{name}" for {cls.__name__}, {reason}; wanted "{other}", or where this is a part of '
            f'a model a dict of the others, such as {{"text_config": "{name}"}}'
        )
    _prepare(self)
    _make_caches_in_place()
    if _note_calls not in self._forward_pre_hooks.values():
        self.register_forward_pre_hook(_note_calls)
        self.register_forward_hook(_say_if_unused)
    return name if tells else name + _WHOLE_MASKS


def _make_caches_in_place() -> None:
    """Of generate(), for models with rapt's attention. Its module is there where a model is: importing it takes seconds."""
    global _prepare_cache
    module = sys.modules.get("transformers.generation.utils")
    if module is not None and _prepare_cache is None:
        _prepare_cache = module.GenerationMixin._prepare_cache_for_generation
        module.GenerationMixin._prepare_cache_for_generation = _prepare_cache_for_generation


_prepare_cache: Any = None


def _prepare_cache_for_generation(self: Any, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
    given = dict(model_kwargs)
    result = _prepare_cache(self, generation_config, model_kwargs, *args, **kwargs)
    if self.config.get_text_config(decoder=True)._attn_implementation in _registered:
        for name, new in model_kwargs.items():  # the name of caches differs from version to version
            if new is not given.get(name):
                _model_cache.prepare(new, self.config, generation_config.max_length)
    return result


def _size(config: Any, name: str) -> int | None:
    """A size in a config; None if there is none, -1 if it differs from layer to layer, which transformers answers by an error."""
    try:
        size: int | None = getattr(config, name, None)
    except RuntimeError:
        return -1
    return size


_CAUSAL = re.compile(r"\bself\.is_causal = (?!False)|\bis_causal=(?!self\.is_causal|False)")


@cache
def _source(cls: Any) -> str:
    """The modules of a class and its bases; "" for what has no source. Read as transformers reads it for
    set_attn_implementation: when it matters, a model has no layers yet."""
    sources = []
    for name in dict.fromkeys(c.__module__ for c in cls.__mro__ if issubclass(c, PreTrainedModel) and c is not PreTrainedModel):
        try:
            sources.append(inspect.getsource(sys.modules[name]))
        except (KeyError, OSError, TypeError):
            continue
    return "\n".join(sources)


def _own_attention(cls: Any, source: str, name: str) -> str:
    """Why models of this class do not come to _attention_forward, "" if they may."""
    for base in cls.__mro__:
        for table in list(vars(sys.modules.get(base.__module__, object)).values()):
            if isinstance(table, dict) and inspect.isclass(table.get("eager")) and name not in table:
                return f"whose layers know {', '.join(map(repr, table))} only"
    own = re.search(r"^class \w*Attention\w*\(nn\.Module\):", source, re.MULTILINE)
    return "which computes attention by itself" if own and "ALL_ATTENTION_FUNCTIONS" not in source else ""


_calls = 0


def _note_calls(model: Any, _: Any) -> None:
    if not torch.compiler.is_compiling():
        model._rapt_calls = _calls + _model_delta_rule.calls + _model_flash.calls


def _say_if_unused(model: Any, _: Any, __: Any) -> None:
    """Says that the first forward of a model called no attention, and goes with its hooks."""
    if torch.compiler.is_compiling():
        return
    for hooks in (model._forward_pre_hooks, model._forward_hooks):
        for key, hook in list(hooks.items()):
            if hook is _note_calls or hook is _say_if_unused:
                del hooks[key]
    unused = model.__dict__.pop("_rapt_calls", None) == _calls + _model_delta_rule.calls + _model_flash.calls
    if unused and model.config._attn_implementation in _registered:
        name = type(model.base_model).__name__  # a head is of no interest
        message = f"{name} ran without rapt's attention: its layers compute their own, or have none"
        if message not in _refusals.warned:
            warnings.warn(message, rapt_torch.FallbackWarning, stacklevel=3)
            _refusals.warned.add(message)


def _mask(**arguments: Any) -> Tensor | None:
    """What transformers gives to _attention_forward as attention_mask; its arguments are those of sdpa_mask. None stands
    for "causal, within the layer's sliding window, and query and keys end together", and "all" in layers that are not."""
    if _is_plainly_causal(**arguments):
        return None
    lazy = _model_masks.lazy_mask(_whole_mask, arguments)
    return _whole_mask(**arguments) if lazy is None else lazy


def _whole_mask(**arguments: Any) -> Tensor | None:
    # Its own reasons to leave a causal mask out are about PyTorch's alignment.
    mask: Tensor | None = sdpa_mask(**arguments | {"allow_is_causal_skip": False})
    return mask


def _is_plainly_causal(
    kv_length: int,
    q_length: int | None = None,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Any = causal_mask_function,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    config: Any = None,
    **_: Any,
) -> bool:
    # Versions before q_length had other means to say where rows sit; a tensor of an offset is a static cache's.
    if not allow_is_causal_skip or q_length is None or isinstance(q_offset, Tensor):
        return False
    if local_size is None:
        known = mask_function is causal_mask_function
    else:  # of a window, or of chunks
        known = _size(config, "sliding_window") == local_size and _size(config, "attention_chunk_size") is None
    if getattr(config, "use_bidirectional_attention", None):  # PaliGemma's layers say so, whatever the mask is
        return False
    if not known or q_offset + q_length != kv_offset + kv_length:
        return False
    if attention_mask is None:
        return True
    if _refusals.is_traced() or attention_mask.shape[-1] < kv_offset + kv_length:
        return False
    return bool(attention_mask[:, kv_offset : kv_offset + kv_length].all())


def _attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    sinks: Tensor | None = None,
    indices: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of [b, hq, n, d] with keys and values of hk heads, as [b, n, hq, dv]; the second result is no weights.

    s_aux and sinks are two names for one thing, of [hq] or, with a sink for every row, [b, hq, n, 1]. indices [b, n, any]
    are the keys that sparse attention (DeepSeek-V3.2) has chosen for each row, of those that the mask shows.
    """
    global _calls
    _model_keywords.check(kwargs, attention_mask)
    s_aux = sinks if s_aux is None else s_aux
    if isinstance(key, LazyTensor):
        is_causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
        if dropout == 0:
            is_lazy = isinstance(attention_mask, LazyTensor)
            mask, bias = (attention_mask, position_bias) if is_lazy else _mask_and_bias(attention_mask, position_bias)
            causal = is_causal and attention_mask is None
            out = _model_latent.attend(query, key.source, mask, bias, s_aux, indices, causal, sliding_window, softcap, scaling)
            if out is not None:
                _calls += 1
                return out, None
        key, value = materialized(key), materialized(value)
    if isinstance(attention_mask, LazyTensor):
        modified = position_bias is not None or indices is not None
        out = _model_flash.over_sequences(query, key, value, attention_mask, scaling, softcap, s_aux, dropout, modified)
        if out is not None:
            return out, None
        attention_mask = materialized(attention_mask)
    if indices is not None:
        modified = dropout != 0 or any(x is not None for x in (softcap, position_bias, sliding_window))
        if not modified and _model_sparse.takes(query, key, value, attention_mask, indices, s_aux):
            assert attention_mask is not None
            _calls += 1
            return _model_sparse.over_lists(query, key, value, attention_mask, indices, s_aux, scaling), None
        attention_mask = _model_sparse.masked(attention_mask, indices, key.shape[2])
    causal = attention_mask is None and bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    only_for_rapt = isinstance(key, OnlyForRapt)  # rows of a quantised or forked cache
    if not is_dynamo_compiling() and not only_for_rapt:
        _calls += 1
        done = _core.eager_attention(
            *(query, key, value, attention_mask, position_bias, s_aux),
            *(causal, sliding_window, softcap, scaling, dropout),
        )
        if done is not NotImplemented:
            return done, None
    n, m = query.shape[2], key.shape[2]  # tensors under torch.jit.trace, as what is made of them
    gqa = bool(query.shape[1] != key.shape[1])
    left = sliding_window - 1 if causal and sliding_window is not None and sliding_window < m else -1
    causal &= bool(n > 1)  # one row at the end sees all
    mask, bias = _mask_and_bias(attention_mask, position_bias)
    scale = float(query.shape[-1]) ** -0.5 if scaling is None else float(scaling)
    options = (mask, bias, s_aux, causal, left, softcap, scale)
    if only_for_rapt:
        _calls += 1
        seed = None if dropout == 0 else _seed.new_seed()
        return _model_fork.forward(query, key, value, *options, dropout, seed), None
    if left < 0 and softcap is None and s_aux is None and (mask is None or bias is None) and not (causal and n != m):
        inference = _refusals.is_eager(query, key, value, mask, bias) and not _refusals.needs_grad(query, key, value, bias)
        if not inference or dropout != 0 or _refusals.refusal(query, key, value, mask, gqa) or _refusals.preference(query, value):
            out = rapt_torch.scaled_dot_product_attention(
                query, key, value, bias if mask is None else mask, dropout, causal, scale=scale, enable_gqa=gqa
            )
            return out.transpose(1, 2).contiguous(), None
    reason = _refusals.refusal(query, key, value, None, gqa)
    if not reason and dropout != 0:
        reason = _refusals.dropout_refusal(query, dropout)
    plain = left < 0 and softcap is None and s_aux is None and mask is None and bias is None
    if plain and causal and _refusals.is_eager(query, key, value):  # rows at the end of more keys
        reason = reason or _refusals.preference(query, value) or _refusals.gradient_refusal(query, key, value, None)
        if reason:
            _refusals.warn(reason)
            out = functional.scaled_dot_product_attention(
                query, key, value, causal_lower_right(int(n), int(m)), dropout, scale=scale, enable_gqa=gqa
            )
            return out.transpose(1, 2).contiguous(), None
    if reason:
        _refusals.warn(reason)
        return _model_attention.composed(query, key, value, *options, dropout=dropout), None
    seed = None if dropout == 0 else _seed.new_seed()
    tensors = (query, key, value, mask, bias, s_aux)
    run: Any = _model_attention.operator
    if _refusals.is_eager(*tensors):
        grad = _refusals.needs_grad(*tensors)
        run = _model_attention.forward_with_gradients if grad else _model_attention.forward
    return run(query, key, value, *options, dropout, seed), None


def _attention_with_whole_masks(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """_attention_forward for models that are made for eager attention: there the mask says all, and None hides nothing."""
    return _attention_forward(module, query, key, value, attention_mask, **kwargs | {"is_causal": False})


def _mask_and_bias(mask: Tensor | None, bias: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """A boolean mask and a bias for transformers' mask of either kind and its position bias, of two dimensions or more."""
    mask, bias = (t if t is None else torch.atleast_2d(t) for t in (mask, bias))  # type: ignore[no-untyped-call]
    if mask is not None and mask.dtype is not torch.bool:
        bias = mask if bias is None else mask + bias
        mask = None
    return mask, bias


if __name__ == "__main__":
    _model_serving.main()
