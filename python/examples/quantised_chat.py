"""A chat whose keys and values are kept as 8-bit codes, and read once: each turn goes on from the cache of the turns before.

    python python/examples/quantised_chat.py [--turns N] [--tokens N]

The model has random weights, and what it says is numbers. It prints the tokens read and made in each turn, and what the cache takes.
"""

from __future__ import annotations

import argparse

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import rapt.transformers


def chat(model, turns, tokens, cache):
    """The conversation [1, n] after so many turns."""
    text = torch.empty((1, 0), dtype=torch.long)
    for turn in range(turns):
        asked = torch.randint(3, model.config.vocab_size, (1, 12), generator=torch.Generator().manual_seed(turn))
        text = torch.cat((text, asked), 1)
        known = cache.get_seq_length()  # of the turns before: generate() reads what comes after
        text = model.generate(
            text, attention_mask=torch.ones_like(text), past_key_values=cache, max_new_tokens=tokens, do_sample=False, pad_token_id=0
        )
        read = text.shape[1] - tokens - known
        print(f"turn {turn + 1}: {read} tokens read, {known} kept, {tokens} made; {cache.nbytes / 1024:.1f} KiB")
    return text


def main(arguments: list[str] | None = None) -> float:
    """The conversation's memory as a share of what the model's own type would take."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=16, help="made in each turn")
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    rapt.transformers.register()
    sizes = {"num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64}
    config = LlamaConfig(vocab_size=512, hidden_size=256, intermediate_size=512, eos_token_id=None, **sizes)
    model = LlamaForCausalLM._from_config(config, attn_implementation="rapt").bfloat16().eval()
    small, whole = rapt.transformers.Cache(config, kv_dtype="i8"), rapt.transformers.Cache(config)
    text = chat(model, options.turns, options.tokens, small)
    with torch.no_grad():
        model(text[:, : small.get_seq_length()], past_key_values=whole)
    print(f"as 8-bit codes {small.nbytes} bytes, as bfloat16 {whole.nbytes}")
    return small.nbytes / whole.nbytes


if __name__ == "__main__":
    main()
