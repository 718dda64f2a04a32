"""What transformers and its servers ask about flash attention, answered for "rapt_flash".

transformers knows flash attention's implementations by name, and has no place to add one. Three of its functions get an
answer for rapt's name, and are called for all others: the one that imports flash attention's functions
(sentence-transformers calls it, too), the one that replaces names that a class of models does not list (GPT-OSS), and
the one that lets continuous batching decode from its pages (on CUDA only). A test says which of them a new version has
changed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import PreTrainedModel
from transformers import modeling_flash_attention_utils as utils
from transformers.generation.continuous_batching import initialization
from transformers.generation.continuous_batching.cache import ATTN_TYPE_TO_ALLOCATOR, group_layers_by_attn_type

from rapt import flash_attn

_names: set[str] = set()
_base: Any = PreTrainedModel
_theirs: dict[str, Callable[..., Any]] = {}


def prepare(name: str) -> None:
    """Makes transformers take `name` for an implementation of flash attention that runs on CPUs."""
    _names.add(name)
    if not _theirs:
        _theirs.update(
            imports=utils._lazy_imports,
            check=_base._check_and_adjust_attn_implementation,
            pages=initialization.ensure_decode_fast_path_is_available,
        )
        utils._lazy_imports = _lazy_imports
        _base._check_and_adjust_attn_implementation = _check_and_adjust_attn_implementation
        initialization.ensure_decode_fast_path_is_available = _ensure_decode_fast_path_is_available


def _lazy_imports(implementation: str | None, *args: Any, **kwargs: Any) -> Any:
    if implementation not in _names:
        return _theirs["imports"](implementation, *args, **kwargs)
    functions = flash_attn.flash_attn_func, flash_attn.flash_attn_varlen_func, flash_attn.flash_attn_with_kvcache
    return (*functions, utils._pad_input, utils._unpad_input)


def _check_and_adjust_attn_implementation(
    self: Any, attn_implementation: str | None, is_init_check: bool = False, *args: Any, **kwargs: Any
) -> Any:
    if attn_implementation not in _names:
        return _theirs["check"](self, attn_implementation, is_init_check, *args, **kwargs)
    return self.get_correct_attn_implementation(attn_implementation, is_init_check)


def _ensure_decode_fast_path_is_available(config: Any, cb_config: Any, user_requested: bool) -> None:
    blocks = cb_config.max_blocks_per_request
    ours = config._attn_implementation in _names
    _theirs["pages"](config, cb_config, user_requested and not ours)
    if ours and all(ATTN_TYPE_TO_ALLOCATOR[kind].supports_block_table for kind in group_layers_by_attn_type(config)):
        cb_config.max_blocks_per_request = blocks


def why_not(cls: Any, tells: bool) -> str:
    """Why layers of a class of models cannot be asked for flash attention, "" if they can."""
    known = getattr(cls, "_compatible_flash_implementations", None)
    if not cls._supports_flash_attn:
        return "which transformers does not let do without masks"
    if known is not None and not any("flash" in name for name in known):
        return f"whose layers call functions of {', '.join(map(repr, known))}"
    return "" if tells else "whose layers leave causality or windows to their masks"


def main() -> None:
    """The command line of transformers with rapt registered. `transformers serve` itself takes a fixed list of names."""
    from transformers.cli.transformers import main as command
    from transformers.cli.serving.model_manager import ModelManager

    import rapt.transformers

    rapt.transformers.register()
    manager: Any = ModelManager
    validate = manager._validate_args

    def validate_others(self: Any) -> None:
        asked = self.attn_implementation
        self.attn_implementation = None if asked in rapt.transformers._registered else asked
        validate(self)
        self.attn_implementation = asked

    manager._validate_args = validate_others
    command()  # type: ignore[no-untyped-call]
