#!/usr/bin/env python3
"""A block of Kimi Linear on the CPU: Kimi Delta Attention between short convolutions and a gated norm, run and trained.

    pip install '.[torch]'
    python python/examples/kimi_linear_block.py          # or: ... --heads 32 --size 128 --hidden 2304 --prompt 1024

The block reads a prompt in one call, then goes on token by token from what it keeps: the last inputs of the convolutions and a
state of fixed size for each head, which is updated in place. Its outputs are those of reading the whole text at once. Then it takes
steps of training towards saying what the token before was, by rapt's gradients. The layers are those of flash-linear-attention's
KimiDeltaAttention (Kimi Linear, 2025), of random weights.
"""

import argparse
import sys

import rapt.torch
import torch
from torch import Tensor, nn
from torch.nn import functional


class Cache:
    """What a block keeps of the tokens it has read."""

    def __init__(self) -> None:
        self.inputs: dict[str, Tensor] = {}  # the last of each convolution, [b, channels, width - 1]
        self.state: Tensor | None = None  # [b, h, V, K]


class ShortConvolution(nn.Conv1d):
    """A filter for each channel, over the last tokens; then SiLU."""

    def __init__(self, channels: int, width: int = 4) -> None:
        super().__init__(channels, channels, width, groups=channels, bias=False)

    def forward(self, x: Tensor, cache: Cache | None = None, name: str = "") -> Tensor:
        x = x.mT
        before = x.new_zeros(*x.shape[:2], self.kernel_size[0] - 1)
        if cache is not None:
            before = cache.inputs.get(name, before)
        x = torch.cat((before, x), -1)
        if cache is not None:
            cache.inputs[name] = x[..., 1 - self.kernel_size[0] :]
        return functional.silu(super().forward(x)).mT


class KimiDeltaAttention(nn.Module):
    def __init__(self, hidden: int, heads: int, size: int) -> None:
        super().__init__()
        self.heads, self.size, channels = heads, size, heads * size
        self.project = nn.ModuleDict({name: nn.Linear(hidden, channels, bias=False) for name in "qkv"})
        self.convolve = nn.ModuleDict({name: ShortConvolution(channels) for name in "qkv"})
        self.decay = nn.Sequential(nn.Linear(hidden, size, bias=False), nn.Linear(size, channels, bias=False))
        self.beta = nn.Linear(hidden, heads, bias=False)
        self.gate = nn.Sequential(nn.Linear(hidden, size, bias=False), nn.Linear(size, channels))
        self.norm = nn.RMSNorm(size)
        self.out = nn.Linear(channels, hidden, bias=False)
        self.A_log = nn.Parameter(torch.empty(heads).uniform_(1, 16).log())
        self.dt_bias = nn.Parameter(torch.empty(channels).uniform_(-7, -2))

    def forward(self, x: Tensor, cache: Cache | None = None) -> Tensor:
        split = (self.heads, self.size)
        q, k, v = (self.convolve[name](self.project[name](x), cache, name).unflatten(-1, split) for name in "qkv")
        g, beta = self.decay(x).unflatten(-1, split), self.beta(x)
        if cache is not None and cache.state is not None and not torch.is_grad_enabled():
            # In place: a token of decoding moves the states through memory once.
            attended = rapt.torch.delta_rule(
                q, k, v, g, beta, initial_state=cache.state, final_state=cache.state, state_v_first=True, l2norm_qk=True,
                beta_sigmoid=True, gate=True, a_log=self.A_log, dt_bias=self.dt_bias.view(split)
            )  # fmt: skip
        else:
            attended, state = rapt.torch.chunk_kda(
                q, k, v, g, beta, A_log=self.A_log, dt_bias=self.dt_bias, use_qk_l2norm_in_kernel=True,
                use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True, state_v_first=True,
                initial_state=None if cache is None else cache.state, output_final_state=cache is not None
            )  # fmt: skip
            if cache is not None:
                cache.state = state
        return self.out((self.norm(attended) * self.gate(x).unflatten(-1, split).sigmoid()).flatten(-2))


class Block(nn.Module):
    def __init__(self, hidden: int, heads: int, size: int) -> None:
        super().__init__()
        self.attention, self.norms = KimiDeltaAttention(hidden, heads, size), nn.ModuleList(nn.RMSNorm(hidden) for _ in "12")
        self.mlp = nn.Sequential(nn.Linear(hidden, 2 * hidden), nn.SiLU(), nn.Linear(2 * hidden, hidden))

    def forward(self, x: Tensor, cache: Cache | None = None) -> Tensor:
        x = x + self.attention(self.norms[0](x), cache)
        return x + self.mlp(self.norms[1](x))


def train(block: Block, x: Tensor, steps: int) -> list[float]:
    """The loss before each step."""
    optimiser, losses = torch.optim.AdamW(block.parameters(), 2e-3), []
    for _ in range(steps):
        optimiser.zero_grad()
        loss = (block(x[:, 1:]) - x[:, :-1]).square().mean()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    return losses


def main(arguments: list[str] | None = None) -> float:
    """The largest difference between the outputs of both ways, relative to the largest output."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("hidden", 256), ("heads", 4), ("size", 64), ("prompt", 200), ("steps", 20), ("batch", 2), ("train", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    block = Block(options.hidden, options.heads, options.size)
    x = torch.randn(options.batch, options.prompt + options.steps, options.hidden)
    with torch.no_grad():
        whole = block(x)
        cache = Cache()
        outs = [block(x[:, : options.prompt], cache)]
        outs += [block(x[:, t : t + 1], cache) for t in range(options.prompt, x.shape[1])]
    difference = ((torch.cat(outs, 1) - whole).abs().max() / whole.abs().max()).item()
    print(f"largest difference: {difference:.1e} of the largest output")
    print("losses of training:", *(f"{loss:.4f}" for loss in train(block, x, options.train)))
    return difference


if __name__ == "__main__":
    sys.exit(main() > 1e-5)
