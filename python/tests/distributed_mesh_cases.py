"""More cases for distributed_cases.py: heads along one dimension of a mesh, keys along the other."""

import functools
import itertools

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from distributed_cases import (
    OPTIONS,
    SIZES,
    SLOPES,
    attention_and_gradients,
    given,
    inputs,
    packed_and_gradients,
    parted,
    raises,
)
from rapt.distributed import all_gather_attention, ring_attention, shard_sequence, ulysses_attention, unshard_sequence

device = lambda: torch.get_default_device().type
ALONG_KEYS = (ring_attention, all_gather_attention)


def mesh_attention(rank, ranks):
    mesh = init_device_mesh(device(), (2, 2))
    for method, balanced in itertools.product(ALONG_KEYS, (False, True)):
        run = functools.partial(method, group=mesh)
        for name, options in OPTIONS.items():
            for size in SIZES.values() if name in ("causal", "full") else [SIZES["group"]]:
                attention_and_gradients(run, size, options, torch.float32, balanced)
        for size in (SIZES["group"], SIZES["one_head"]):  # which has fewer key heads than ranks
            attention_and_gradients(run, size, OPTIONS["causal"], torch.bfloat16, balanced)


def mesh_packed(rank, ranks):
    mesh, t = init_device_mesh(device(), (2, 2)), 96
    torch.manual_seed(5)
    whole = [torch.randn(t, heads, size) for heads, size in ((12, 16), (2, 16), (2, 24), (12, 24))]
    dlse, several = torch.randn(t, 12), [0, 5, 5, 24, 30, t - 1, t]
    with_alibi = {"causal": True, "window": (7, None), "alibi": SLOPES.to(dlse)}
    options = OPTIONS["causal"], with_alibi, OPTIONS["both_sides"]
    for method, some, balanced in itertools.product(ALONG_KEYS, options, (False, True)):
        packed_and_gradients(functools.partial(method, group=mesh), whole, dlse, some, several, balanced)


def meshes_of_one_row(rank, ranks):
    """A mesh of n x 1 ranks has the bits of the function alone, one of 1 x n those of Ulysses."""
    of_keys, of_heads = (init_device_mesh(device(), shape) for shape in ((ranks, 1), (1, ranks)))
    pairs = [(method, method, of_keys) for method in ALONG_KEYS]
    pairs += [(method, ulysses_attention, of_heads) for method in ALONG_KEYS]
    for dtype, name, balanced in itertools.product((torch.float32, torch.bfloat16), ("causal", "sinks"), (False, True)):
        for method, alone, mesh in pairs:
            runs = []
            for run in (functools.partial(method, group=mesh), alone):
                *mine, dout, dlse = parted(SIZES["group"], dtype, balanced)
                got = run(*mine, balanced=balanced, return_lse=True, **given(OPTIONS[name], 12, 96, 96))
                part = lambda x: shard_sequence(x, 2, balanced=balanced)
                torch.autograd.backward(got, [part(dout), part(dlse)])
                runs.append([*got, *(x.grad for x in mine)])
            same = [torch.equal(x, y) for x, y in zip(*runs)]
            assert all(same), (method, alone, dtype, name, balanced, same)


def mesh_shards(rank, ranks):
    """Ranks hold the parts of a mesh in its order: also of two dimensions of three, whose ranks are some of all."""
    x, mesh = torch.arange(3 * 24 * 2).view(3, 24, 2), init_device_mesh(device(), (2, 2))
    three = init_device_mesh(device(), (2, 1, 2), mesh_dim_names=("data", "keys", "heads"))
    for balanced in (False, True):
        for group in (mesh, three["keys", "heads"], three["heads"]):
            part = shard_sequence(x, 1, balanced=balanced, group=group)
            assert torch.equal(unshard_sequence(part, 1, balanced=balanced, group=group), x)
        assert torch.equal(
            shard_sequence(x, 1, balanced=balanced, group=mesh), shard_sequence(x, 1, balanced=balanced)
        )
        q, k, v = inputs(12, 6, 48, 48, torch.float32)[:3]
        group, part = three["keys", "heads"], functools.partial(shard_sequence, dim=2, balanced=balanced)
        out = ring_attention(*(part(x, group=group) for x in (q, k, v)), causal=True, balanced=balanced, group=group)
        wanted = ulysses_attention(
            *(part(x, group=three["heads"].get_group()) for x in (q, k, v)),
            causal=True,
            balanced=balanced,
            group=three["heads"],
        )
        assert torch.equal(out, wanted)


def mesh_refuses(rank, ranks):
    mesh, last = init_device_mesh(device(), (2, 2)), rank == ranks - 1
    q, k, v = (shard_sequence(x, 2) for x in inputs(12, 6, 48, 48, torch.float32)[:3])
    for method in ALONG_KEYS:
        with raises(ValueError, "k: got 3 heads over 2 ranks; wanted a multiple or a divisor of 2, or"):
            method(q, k[:, :3], v[:, :3], group=mesh)
        with raises(ValueError, "q: got 9 heads over 2 ranks; wanted a multiple of 2"):
            method(q[:, :9], k[:, :3], v[:, :3], group=mesh)
        # The last two ranks compare their values. Each of the others is told by one of these.
        got = "causal: got False on rank 2 and True on rank 3"
        told = f"group: rank {rank + 2} refuses its arguments, and says why" if rank < 2 else got
        with raises(ValueError, told):
            method(q, k, v, causal=last, align=0, group=mesh)
        with raises(ValueError, "k: got shape" if last else "refuses its arguments, and says why"):
            method(q, k[0] if last else k, v, group=mesh)
        method(q, k, v, group=mesh)  # the groups are as they were
    with raises(ValueError, "group: got a mesh of 2 dimensions; wanted one dimension, or ring_attention"):
        ulysses_attention(q, k, v, group=mesh)
    with raises(ValueError, "group: got a mesh of 3 dimensions; wanted one or two of them"):
        ring_attention(q, k, v, group=init_device_mesh(device(), (2, 1, 2)))
    with raises(ValueError, "group: got a mesh whose ranks do not ascend"):
        ring_attention(q, k, v, group=DeviceMesh(device(), [[1, 0], [3, 2]]))


CASES = {
    2: {case.__name__: case for case in (meshes_of_one_row,)},
    4: {case.__name__: case for case in (mesh_attention, mesh_packed, mesh_shards, mesh_refuses)},
}
