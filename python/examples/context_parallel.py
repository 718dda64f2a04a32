#!/usr/bin/env python3
"""Train a block of a model on one long sequence that is spread over processes, in two ways.

    pip install '.[torch]'
    torchrun --nproc-per-node 2 python/examples/context_parallel.py    # or: ... --tokens 8192 --method ring_attention

First the block calls a function of rapt.distributed. Then it calls PyTorch's scaled_dot_product_attention, which
PyTorch's context_parallel and rapt.torch.enabled() spread over the processes. Loss and gradients are compared with
those of one process.
"""

import argparse

import rapt.distributed
import rapt.torch
import torch
import torch.distributed as dist
import torch.distributed.nn  # before there is a group, which it would keep: gloo's threads would crash as Python ends
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel
from torch.nn import functional


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


class Block(nn.Module):
    def __init__(self, size: int = 64, heads: int = 8, key_heads: int = 4) -> None:
        super().__init__()
        self.heads, self.key_heads = heads, key_heads
        self.qkv, self.out = nn.Linear(size, size // heads * (heads + 2 * key_heads)), nn.Linear(size, size)

    def forward(self, x: Tensor, attention=causal_attention) -> Tensor:
        qkv = self.qkv(x).unflatten(-1, (self.heads + 2 * self.key_heads, -1)).transpose(1, 2)  # [b, heads, s, d]
        q, k, v = qkv.split((self.heads, self.key_heads, self.key_heads), 1)
        return x + self.out(attention(q, k, v).transpose(1, 2).flatten(2))


def sum_over_ranks(block: nn.Module, loss: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Each process has the mean over its part of the tokens. The parts are equally long."""
    found = [loss.detach(), *(p.grad for p in block.parameters())]
    for x in found:
        dist.all_reduce(x)
        x /= dist.get_world_size()
    return found[0], found[1:]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--method", default="all_gather_attention", help="or ring_attention, ulysses_attention")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)  # the same weights and tokens on every rank
    block, x, wanted = Block(), torch.randn(1, args.tokens, 64), torch.randn(1, args.tokens, 64)

    with rapt.torch.enabled():
        loss = functional.mse_loss(block(x), wanted)
        loss.backward()
    alone = [loss.detach(), *(p.grad for p in block.parameters())]
    block.zero_grad()

    # 1. By a function: each rank has a part of the tokens, and everything but attention is as before.
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return getattr(rapt.distributed, args.method)(q, k, v, causal=True, balanced=True)

    own_x, own_wanted = (rapt.distributed.shard_sequence(t, 1, balanced=True) for t in (x, wanted))
    loss = functional.mse_loss(block(own_x, attention), own_wanted)
    loss.backward()
    compare(args.method, sum_over_ranks(block, loss), alone)
    block.zero_grad()

    # 2. By PyTorch's context_parallel, which cuts the buffers while its block is open.
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    with rapt.torch.enabled(), context_parallel(mesh, buffers=[x, wanted], buffer_seq_dims=[1, 1]):
        loss = functional.mse_loss(block(x), wanted)
        loss.backward()
    compare("context_parallel", sum_over_ranks(block, loss), alone)
    dist.destroy_process_group()


def compare(name: str, got: tuple[Tensor, list[Tensor]], alone: list[Tensor]) -> None:
    pairs = list(zip([got[0], *got[1]], alone))
    difference = max(((a - b).norm() / b.norm()).item() for a, b in pairs)
    assert difference < 1e-4, difference
    if dist.get_rank() == 0:
        loss, ranks = got[0].item(), dist.get_world_size()
        print(f"{name}: loss {loss:.6f} on {ranks} processes, largest difference {difference:.1e}")


if __name__ == "__main__":
    main()
