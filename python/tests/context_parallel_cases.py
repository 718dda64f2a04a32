"""More cases for distributed_cases.py: PyTorch's context_parallel on CPUs, and a model that is trained over ranks."""

import contextlib
import itertools
import weakref

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

import rapt.torch
from distributed_cases import error, raises
from rapt import _context_parallel


def _mesh(ranks):
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", (ranks,))


@contextlib.contextmanager
def _parallel(mesh, *buffers, dim, rotate="allgather", balanced=True):
    from torch.distributed.tensor.experimental import context_parallel
    from torch.distributed.tensor.experimental._attention import set_rotate_method
    from torch.distributed.tensor.experimental._context_parallel import _cp_options

    set_rotate_method(rotate)
    _cp_options.enable_load_balance = balanced
    with context_parallel(mesh, buffers=list(buffers), buffer_seq_dims=[dim] * len(buffers)):
        yield


def context_parallel_attention(rank, ranks):
    from torch.distributed.tensor.experimental._context_parallel import context_parallel_unshard

    mesh = _mesh(ranks)
    torch.manual_seed(0)
    grid = itertools.product((True, False), (4, 2), ("allgather", "alltoall"), (True, False))
    for causal, key_heads, rotate, balanced in grid:
        q, k, v = torch.randn(2, 4, 64, 16), torch.randn(2, key_heads, 64, 16), torch.randn(2, key_heads, 64, 16)
        dout, options = torch.randn(2, 4, 64, 16), {"is_causal": causal, "enable_gqa": key_heads != 4}
        with rapt.torch.enabled():
            alone = [x.clone().requires_grad_() for x in (q, k, v)]
            wanted = functional.scaled_dot_product_attention(*alone, **options)
            wanted.backward(dout)
            parts = [x.clone() for x in (q, k, v, dout)]
            with _parallel(mesh, *parts, dim=2, rotate=rotate, balanced=balanced):
                mine = [x.clone().requires_grad_() for x in parts[:3]]
                out = functional.scaled_dot_product_attention(*mine, **options)
                assert type(out) is torch.Tensor and out.shape[2] == 64 // ranks
                out.backward(parts[3])
                got = context_parallel_unshard(mesh, [out.detach(), *(x.grad for x in mine)], [2] * 4)
        if rotate == "allgather":
            assert torch.equal(got[0], wanted), "not the bits of one process"
        assert max(error(x, y) for x, y in zip(got, [wanted, *(x.grad for x in alone)])) <= 4e-6


def context_parallel_refuses(rank, ranks):
    mesh, attention = _mesh(ranks), functional.scaled_dot_product_attention
    x = torch.randn(1, 2, 16 * ranks, 8)
    with rapt.torch.enabled():
        with _parallel(mesh, x, dim=2):
            attend = functional.scaled_dot_product_attention
            with raises(ValueError, "attn_mask: got one in a context_parallel block"):
                attend(x, x, x, torch.ones(1, 1, 16, 16, dtype=torch.bool))
            with raises(ValueError, "refuses its arguments" if rank else "attn_mask: got one"):  # on one rank
                attend(x, x, x, None if rank else torch.ones(1, 1, 16, 16, dtype=torch.bool))
            with raises(ValueError, "dropout_p: got one in a context_parallel block"):
                attend(x, x, x, dropout_p=0.5)
            with raises(ValueError, "key: got 1 heads; wanted query's 2"):
                attend(x, x[:, :1], x[:, :1])
            with raises(ValueError, "sk: got"):  # parts that ranks disagree on
                attend(x, x[:, :, 2 * rank :], x[:, :, 2 * rank :])
        with _parallel(mesh, long := torch.randn(1, 2, 16 * ranks + 1, 8), dim=2):
            attend = functional.scaled_dot_product_attention
            got = f"17 on rank 0 and 16 on rank {ranks - 1}"
            with raises(ValueError, f"sq: got {got}; wanted the same on every rank: pad"):
                attend(long, long, long, is_causal=True)
        assert functional.scaled_dot_product_attention is rapt.torch.scaled_dot_product_attention
        with _parallel(mesh, x.clone(), dim=2), raises(RuntimeError, "got switched off within a context_parallel"):
            rapt.torch._switch.check(on=False)
    assert functional.scaled_dot_product_attention is attention
    with _parallel(mesh, x.clone(), dim=2):
        with raises(RuntimeError, "got switched on within a context_parallel block"), rapt.torch.enabled():
            pass
        with raises(RuntimeError, "got switched on within a context_parallel block"):
            rapt.torch.enable()
    assert functional.scaled_dot_product_attention is attention and not rapt.torch._switch.blocks


def private_parts(rank, ranks):
    """What rapt._context_parallel uses of PyTorch: an error here says what a new version has changed."""
    from torch.distributed.tensor import DTensor, Shard
    from torch.distributed.tensor.experimental import _context_parallel as package
    from torch.distributed.tensor.experimental._context_parallel import _attention as private

    assert private.__name__ == _context_parallel._PRIVATE
    assert private.DTensor is DTensor and private.Shard is Shard
    assert isinstance(private._cp_options.enable_load_balance, bool) and package._cp_options is private._cp_options
    assert {"ALL_TO_ALL", "ALL_GATHER"} == {method.name for method in private._RotateMethod}
    mesh, x = _mesh(ranks), torch.zeros(1, 1, 2 * ranks, 8)
    spread = DTensor.from_local(x, mesh, [Shard(2)], run_check=False)
    assert not _context_parallel.replaced() and not _context_parallel.is_spread(spread)
    with _parallel(mesh, x, dim=2):
        assert functional.scaled_dot_product_attention in private._replaced_functions
        assert private._sdpa_handler in DTensor._op_dispatcher._custom_op_handlers.values()
        assert _context_parallel.replaced() and _context_parallel.is_spread(spread)
        assert not _context_parallel.is_spread(DTensor.from_local(x, mesh, [Shard(1)], run_check=False))
        assert not _context_parallel.is_spread(x)
    assert not _context_parallel.replaced() and not _context_parallel.is_spread(spread)


def context_parallel_does_not_hold_its_mesh(rank, ranks):
    """Or the threads of the mesh's groups would still run, after destroy_process_group(), as the program ends."""
    mesh, x = _mesh(ranks), torch.randn(1, 2, 16 * ranks, 8)
    with rapt.torch.enabled(), _parallel(mesh, x, dim=2):
        functional.scaled_dot_product_attention(x, x, x)
    alive = weakref.ref(mesh)
    del mesh
    assert alive() is None


class Block(nn.Module):
    """Llama's: RMS norms, rotary embedding, grouped query heads, SwiGLU."""

    def __init__(self, size=32, heads=4, key_heads=2):
        super().__init__()
        self.heads, self.key_heads, self.d = heads, key_heads, size // heads
        self.norms = nn.ModuleList(nn.RMSNorm(size) for _ in range(2))
        self.qkv = nn.Linear(size, (heads + 2 * key_heads) * self.d, bias=False)
        self.out, self.down = nn.Linear(size, size, bias=False), nn.Linear(2 * size, size, bias=False)
        self.gate_up = nn.Linear(size, 4 * size, bias=False)

    def rotated(self, x, positions):
        angles = positions[:, None, :, None] * 10000.0 ** (-torch.arange(0, self.d, 2) / self.d)
        a, b = x.chunk(2, -1)
        return torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), -1)

    def forward(self, x, positions):
        qkv = self.qkv(self.norms[0](x)).unflatten(-1, (-1, self.d)).transpose(1, 2)
        q, k, v = qkv.split((self.heads, self.key_heads, self.key_heads), 1)
        q, k = self.rotated(q, positions), self.rotated(k, positions)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        gate, up = self.gate_up(self.norms[1](x)).chunk(2, -1)
        return x + self.down(functional.silu(gate) * up)


class Llama(nn.Module):
    def __init__(self, words=50, size=32):
        super().__init__()
        self.embed, self.head = nn.Embedding(words, size), nn.Linear(size, words, bias=False)
        self.blocks, self.norm = nn.ModuleList(Block(size) for _ in range(2)), nn.RMSNorm(size)

    def forward(self, ids, labels, positions):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x, positions)
        return functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


def a_llama_trains_as_on_one_process(rank, ranks):
    """Loss and every gradient of two steps, within 1e-5 of one process's: fp32 rounding through two layers."""
    mesh = _mesh(ranks)
    for rotate in ("allgather", "alltoall"):
        torch.manual_seed(0)
        model, alone = Llama(), Llama()
        alone.load_state_dict(model.state_dict())
        optimizers = [torch.optim.SGD(m.parameters(), 0.1) for m in (model, alone)]
        for _ in range(2):
            ids = torch.randint(0, 50, (2, 24 * ranks))
            labels, positions = ids.roll(-1, 1), torch.arange(24 * ranks).expand(2, -1).clone()
            for optimizer in optimizers:
                optimizer.zero_grad()
            with rapt.torch.enabled():
                wanted = alone(ids, labels, positions)
                wanted.backward()
                with _parallel(mesh, ids, labels, positions, dim=1, rotate=rotate):
                    assert ids.shape == (2, 24)
                    loss = model(ids, labels, positions)
                    loss.backward()
            for x in (loss.detach(), *(p.grad for p in model.parameters())):
                dist.all_reduce(x)
                x /= ranks
            assert abs(loss.item() - wanted.item()) <= 1e-5 * wanted.item()
            grads = [(a.grad, b.grad) for a, b in zip(model.parameters(), alone.parameters())]
            assert max(error(a, b) for a, b in grads) <= 1e-5
            for optimizer in optimizers:
                optimizer.step()


_CASES = (private_parts, context_parallel_attention, context_parallel_refuses, context_parallel_does_not_hold_its_mesh)
CASES = {case.__name__: case for case in (*_CASES, a_llama_trains_as_on_one_process)}
