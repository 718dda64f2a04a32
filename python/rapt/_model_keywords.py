"""What models of transformers hand to attention besides tensors and numbers."""

from __future__ import annotations

from typing import Any

from torch import Tensor

# What models hand on that attention does not depend on, or that has gone into queries, keys and masks before.
_IRRELEVANT = frozenset(
    {
        "cache_position",
        "deterministic",  # of flash attention's backward
        "grid_thw",
        "layer_idx",
        "logits_indices",  # of continuous batching
        "logits_processor_args",
        "max_length_k",
        "max_length_q",
        "num_items_in_batch",
        "output_hidden_states",
        "output_router_logits",
        "position_ids",
        "return_dict",
        "seq_idx",
        "token_type_ids",
        "use_cache",
    }
)


def check(kwargs: dict[str, Any], mask: Tensor | None) -> None:
    """Refuses keywords that may change the result: attention as the model means it is another than rapt would compute."""
    if kwargs.keys() <= _IRRELEVANT:
        return
    for name, value in kwargs.items():
        if value is None or value is False or name in _IRRELEVANT:
            continue
        if name == "cache":
            raise NotImplementedError('cache: got that of continuous batching; wanted "rapt_flash" for it')
        if name == "output_attentions":
            raise NotImplementedError('output_attentions: got True; wanted attn_implementation="eager" for weights')
        if name in ("cu_seq_lens_q", "cu_seq_lens_k"):
            if mask is not None or value.numel() <= 2:
                continue
            raise ValueError(f"{name}: got sequences that no mask keeps apart; wanted rapt_flash, or position_ids and use_cache=False where the model's masks know them")
        raise TypeError(f'{name}: got a keyword that rapt\'s attention does not know; wanted attn_implementation="eager"')
