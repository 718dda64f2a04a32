#!/usr/bin/env python3
"""Train a small Llama on long documents: its weights are sharded by FSDP2, and each document is spread over processes.

    pip install '.[torch]' transformers
    torchrun --nproc-per-node 2 python/examples/finetune_context_parallel.py
    torchrun --nproc-per-node 4 python/examples/finetune_context_parallel.py --tokens 32768    # 2 documents at a time

The processes form a mesh of two dimensions. Along "cp", they have parts of one document, and rapt's attention exchanges
keys and values. Along "dp", they have different documents. FSDP2 shards weights, and averages gradients, over both. The
losses are compared with those of one process that reads all documents.
"""

import argparse
import copy

import rapt.distributed
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface, LlamaConfig, LlamaForCausalLM

METHODS = {name: getattr(rapt.distributed, name) for name in ("all_gather_attention", "ring_attention")}


def make_model(tokens: int) -> LlamaForCausalLM:
    torch.manual_seed(0)  # the same weights in every process
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 8, "num_key_value_heads": 4}
    sizes |= {"num_hidden_layers": 2, "vocab_size": 256, "max_position_embeddings": tokens}
    return LlamaForCausalLM(LlamaConfig(**sizes, attn_implementation="sdpa"))


def loss_of(model: nn.Module, ids: Tensor, labels: Tensor, positions: Tensor) -> Tensor:
    logits = model(input_ids=ids, position_ids=positions, use_cache=False).logits
    return functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def use_context_parallel(model: LlamaForCausalLM, mesh: DeviceMesh, method: str) -> None:
    def attention(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float, **_: object):
        out = METHODS[method](q, k, v, causal=True, balanced=True, scale=scaling, group=mesh["cp"].get_group())
        return out.transpose(1, 2), None

    AttentionInterface.register("context_parallel", attention)
    AttentionMaskInterface.register("context_parallel", lambda *args, **given: None)  # causal=True is the mask
    model.set_attn_implementation("context_parallel")


def train(model: nn.Module, steps: int, batch: tuple[Tensor, Tensor, Tensor], mesh: DeviceMesh | None) -> list[float]:
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-3), []
    for _ in range(steps):
        loss = loss_of(model, *batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss = loss.detach()
        if mesh is not None:  # each process has the mean over its part of the tokens, and all parts are equally long
            dist.all_reduce(loss)
            loss /= dist.get_world_size()
        losses.append(loss.item())
    return losses


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, default=2048, help="of a document; a multiple of 2 x --cp")
    parser.add_argument("--cp", type=int, default=2, help="the number of processes that share a document")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--method", default="ring_attention", choices=METHODS)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size() // args.cp, args.cp), mesh_dim_names=("dp", "cp"))

    documents = torch.randint(256, (mesh["dp"].size(), args.tokens), generator=torch.Generator().manual_seed(1))
    labels = documents.roll(-1, 1)  # the last label wraps around, so all parts have equal counts
    positions = torch.arange(args.tokens).expand_as(documents)
    model = make_model(args.tokens)
    alone = copy.deepcopy(model)

    use_context_parallel(model, mesh, args.method)
    shards = mesh["dp", "cp"]._flatten("all")  # PyTorch has no public name for it yet
    for layer in model.model.layers:
        fully_shard(layer, mesh=shards)
    fully_shard(model, mesh=shards)
    own = mesh["dp"].get_local_rank()
    batch = tuple(
        rapt.distributed.shard_sequence(x[own : own + 1], 1, balanced=True, group=mesh["cp"].get_group())
        for x in (documents, labels, positions)
    )
    losses = train(model, args.steps, batch, mesh)
    if dist.get_rank() == 0:
        wanted = train(alone, args.steps, (documents, labels, positions), None)
        held = sum(p.to_local().numel() for p in model.parameters()) / sum(p.numel() for p in alone.parameters())
        print(f"weights held by a process: {held:.0%}; tokens: {batch[0].shape[1]} of {args.tokens}")
        for step, (loss, one) in enumerate(zip(losses, wanted)):
            print(f"step {step}: loss {loss:.6f}, on one process {one:.6f}")
            assert abs(loss - one) <= 1e-4 * one
    dist.monitored_barrier()  # unlike barrier(), leaves no tensors to gloo's threads, which crash as Python ends
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
