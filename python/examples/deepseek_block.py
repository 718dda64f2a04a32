#!/usr/bin/env python3
"""A block of DeepSeek-V3.2 on the CPU: latent attention to the keys that an indexer chooses, over a cache of latents.

    pip install '.[torch]'
    python python/examples/deepseek_block.py     # or: ... --hidden 7168 --heads 128 --rank 512 --q-rank 1536 --nope 128 --rope 64 \
                                                 #     --value 128 --index-heads 64 --index-size 128 --topk 2048 --prompt 4096 --batch 1

The block reads a prompt in one call, then goes on token by token. It keeps one row for each token (a latent and a rotary part, for
keys and values of all heads) and a key of the indexer. For each new token the indexer scores all keys, rapt.torch.index_topk selects the
best of them, and rapt.mla.attention attends to these rows in the absorbed form: nothing is expanded to heads. The same is done by
PyTorch's operators as the formulas are written, with all scores, a mask, and keys and values of every head, and compared. Weights
are random, and the layers those of DeepSeek's inference code, without its quantisation.
"""

import argparse
import sys
import time

import rapt.mla
import rapt.torch
import torch
from torch import Tensor, nn


def rotate(x: Tensor, first: int, interleaved: bool) -> Tensor:
    """[b, s, heads, d] at positions from `first` on. Pairs are neighbours in attention, halves of the row in the indexer."""
    half = x.shape[-1] // 2
    angle = torch.arange(first, first + x.shape[1])[:, None] * 10000.0 ** (-torch.arange(half) / half)
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    a, b = (x[..., ::2], x[..., 1::2]) if interleaved else x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


class Cache:
    """What a block keeps of the tokens it has read."""

    def __init__(self, batch: int, room: int, row: int, index_size: int) -> None:
        self.rows, self.index_keys = torch.zeros(batch, room, row), torch.zeros(batch, room, index_size)
        self.length = 0

    def append(self, rows: Tensor, index_keys: Tensor) -> tuple[Tensor, Tensor]:
        new = slice(self.length, self.length + rows.shape[1])
        self.rows[:, new], self.index_keys[:, new], self.length = rows, index_keys, new.stop
        return self.rows[:, : new.stop], self.index_keys[:, : new.stop]


class Indexer(nn.Module):
    def __init__(self, of: argparse.Namespace) -> None:
        super().__init__()
        self.heads, self.rope = of.index_heads, of.rope
        self.q = nn.Linear(of.q_rank, of.index_heads * of.index_size, bias=False)
        self.k = nn.Sequential(nn.Linear(of.hidden, of.index_size, bias=False), nn.LayerNorm(of.index_size))
        self.weights = nn.Linear(of.hidden, of.index_heads, bias=False)

    def forward(self, x: Tensor, q_latent: Tensor, first: int) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [b, s, heads, d], keys [b, s, d], and how much each head counts, [b, s, heads]."""
        q, k = self.q(q_latent).unflatten(-1, (self.heads, -1)), self.k(x)[:, :, None]
        q, k = (torch.cat((rotate(t[..., : self.rope], first, False), t[..., self.rope :]), -1) for t in (q, k))
        return q, k[:, :, 0], self.weights(x) * self.heads**-0.5


class SparseLatentAttention(nn.Module):
    def __init__(self, of: argparse.Namespace) -> None:
        super().__init__()
        self.of, self.indexer = of, Indexer(of)
        self.q_a = nn.Sequential(nn.Linear(of.hidden, of.q_rank, bias=False), nn.RMSNorm(of.q_rank))
        self.q_b = nn.Linear(of.q_rank, of.heads * (of.nope + of.rope), bias=False)
        self.kv_a, self.kv_norm = nn.Linear(of.hidden, of.rank + of.rope, bias=False), nn.RMSNorm(of.rank)
        self.kv_b = nn.Linear(of.rank, of.heads * (of.nope + of.value), bias=False)
        self.out = nn.Linear(of.heads * of.value, of.hidden, bias=False)

    def forward(self, x: Tensor, cache: Cache, plain: bool) -> Tensor:
        of, first = self.of, cache.length
        q_latent = self.q_a(x)
        q_nope, q_rope = self.q_b(q_latent).unflatten(-1, (of.heads, -1)).split((of.nope, of.rope), -1)
        latent, k_rope = self.kv_a(x).split((of.rank, of.rope), -1)
        rows = torch.cat((self.kv_norm(latent), rotate(k_rope[:, :, None], first, True)[:, :, 0]), -1)
        index_q, index_k, w = self.indexer(x, q_latent, first)
        rows, index_k = cache.append(rows, index_k)
        w_uk, w_uv = self.kv_b.weight.view(of.heads, -1, of.rank).split((of.nope, of.value), 1)
        attend = attend_plainly if plain else attend_by_rapt
        return self.out(attend(q_nope, rotate(q_rope, first, True), rows, w_uk, w_uv, index_q, index_k, w, of.topk).flatten(-2))


def attend_by_rapt(
    q_nope: Tensor, q_rope: Tensor, rows: Tensor, w_uk: Tensor, w_uv: Tensor, index_q: Tensor, index_k: Tensor, w: Tensor, topk: int
) -> Tensor:
    chosen = rapt.torch.index_topk(index_q, index_k, w, topk, align="bottom_right")
    return rapt.mla.attention(q_nope, q_rope, rows, w_uk, w_uv, indices=chosen)


def attend_plainly(
    q_nope: Tensor, q_rope: Tensor, rows: Tensor, w_uk: Tensor, w_uv: Tensor, index_q: Tensor, index_k: Tensor, w: Tensor, topk: int
) -> Tensor:
    (b, sq, heads, nope), sk, rank = q_nope.shape, rows.shape[1], w_uk.shape[2]
    hidden = torch.ones(sq, sk, dtype=torch.bool).triu(sk - sq + 1)
    products = torch.einsum("bqhd,bkd->bqhk", index_q, index_k).relu()
    scores = torch.einsum("bqhk,bqh->bqk", products, w) * index_q.shape[-1] ** -0.5
    best = scores.masked_fill(hidden, -torch.inf).sort(dim=-1, descending=True, stable=True).indices[..., :topk]
    hidden = hidden | torch.ones(b, sq, sk, dtype=torch.bool).scatter(-1, best, False)
    k = torch.einsum("bkc,hnc->bkhn", rows[..., :rank], w_uk)
    k = torch.cat((k, rows[:, :, None, rank:].expand(-1, -1, heads, -1)), -1)
    x = torch.einsum("bqhd,bkhd->bhqk", torch.cat((q_nope, q_rope), -1), k) * (nope + q_rope.shape[-1]) ** -0.5
    p = x.masked_fill(hidden[:, None], -torch.inf).softmax(-1)
    return torch.einsum("bhqk,bkhv->bqhv", p, torch.einsum("bkc,hvc->bkhv", rows[..., :rank], w_uv))


class Block(nn.Module):
    def __init__(self, of: argparse.Namespace) -> None:
        super().__init__()
        self.attention, self.norms = SparseLatentAttention(of), nn.ModuleList(nn.RMSNorm(of.hidden) for _ in "12")
        self.mlp = nn.Sequential(nn.Linear(of.hidden, 2 * of.hidden), nn.SiLU(), nn.Linear(2 * of.hidden, of.hidden))
        for layer in self.modules():
            if isinstance(layer, nn.Linear):  # all rows have numbers about 1, so that some keys weigh more than others
                nn.init.normal_(layer.weight, std=layer.in_features**-0.5)

    def forward(self, x: Tensor, cache: Cache, plain: bool = False) -> Tensor:
        x = x + self.attention(self.norms[0](x), cache, plain)
        return x + self.mlp(self.norms[1](x))


def read(block: Block, x: Tensor, of: argparse.Namespace, plain: bool) -> tuple[Tensor, float, float]:
    """The outputs of a prompt and of tokens one after another, the prompt's seconds, and those of a token."""
    cache = Cache(len(x), x.shape[1], of.rank + of.rope, of.index_size)
    begin = time.perf_counter()
    outs = [block(x[:, : of.prompt], cache, plain)]
    middle = time.perf_counter()
    outs += [block(x[:, t : t + 1], cache, plain) for t in range(of.prompt, x.shape[1])]
    return torch.cat(outs, 1), middle - begin, (time.perf_counter() - middle) / max(of.steps, 1)


def main(arguments: list[str] | None = None) -> float:
    """The largest difference between the outputs of both ways, relative to the most that the block adds to its input."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = {"hidden": 256, "heads": 8, "q-rank": 192, "rank": 128, "nope": 32, "rope": 16, "value": 32, "index-heads": 8}
    sizes |= {"index-size": 32, "topk": 64, "prompt": 500, "steps": 20, "batch": 2}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    of = parser.parse_args(arguments)
    torch.manual_seed(0)
    block, x = Block(of), torch.randn(of.batch, of.prompt + of.steps, of.hidden)
    with torch.no_grad():
        for plain in (False, True):
            read(block, x[:, : of.prompt + 1], of, plain)  # warms up
        ours, prompt, token = read(block, x, of, False)
        wanted, plain_prompt, plain_token = read(block, x, of, True)
    difference = ((ours - wanted).abs().max() / (wanted - x).abs().max()).item()
    print(f"largest difference: {difference:.1e} of the most that the block adds to its input")
    expanded = of.heads * (of.nope + of.rope + of.value)
    print(f"kept of a token: {of.rank + of.rope + of.index_size} numbers; keys and values of all heads are {expanded}")
    print(f"keys that the last token attends to: {min(of.topk, x.shape[1])} of {x.shape[1]}")
    print(f"ms of the prompt: rapt {prompt * 1e3:.1f}, plain {plain_prompt * 1e3:.1f}")
    print(f"ms of a token: rapt {token * 1e3:.2f}, plain {plain_token * 1e3:.2f}")
    return difference


if __name__ == "__main__":
    sys.exit(main() > 1e-5)
