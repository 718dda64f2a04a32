"""What each rank of test_distributed.py runs. A case is a function of (rank, ranks) that raises if something is wrong.

All ranks run all cases in the same order.
"""

import contextlib
import functools
import itertools
import os
import time
import traceback
import weakref
from datetime import timedelta
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import rapt
from rapt import _distributed_ring
from rapt.distributed import all_gather_attention, ring_attention, shard_sequence, ulysses_attention, unshard_sequence

METHODS = (all_gather_attention, ring_attention, ulysses_attention)
SLOPES = torch.linspace(0.02, 0.5, 12)
SINKS = torch.linspace(-2, 2, 12)
OPTIONS = {
    "causal": {"causal": True},
    "full": {},
    "window": {"causal": True, "window": (20, None)},
    "both_sides": {"window": (9, 5)},
    "softcap": {"causal": True, "softcap": 5.0, "scale": 0.3},
    "alibi": {"causal": True, "alibi": SLOPES},
    "alibi_full": {"alibi": SLOPES},
    "sinks": {"causal": True, "sinks": SINKS},
}
# (query heads, key heads, queries, keys): lengths are multiples of 2 chunks of 2, 3 and 4 ranks. A part of FEW_ROWS
# alone would have another kernel, or other splits of the keys, than all rows.
SIZES = {"group": (12, 6, 96, 96), "one_head": (12, 1, 48, 48), "cross": (12, 4, 48, 120)}
FEW_ROWS = {"decode": (2, 2, 24, 24), "unsplit": (1, 1, 648, 4104), "split": (2, 1, 72, 4104)}


def inputs(hq, hk, sq, sk, dtype, b=2, d=16, dv=24):
    torch.manual_seed(sq + hk)
    shapes = (b, hq, sq, d), (b, hk, sk, d), (b, hk, sk, dv), (b, hq, sq, dv)
    return *(torch.randn(shape).to(dtype) for shape in shapes), torch.randn(b, hq, sq)


def given(options, hq, sq, sk):
    like = torch.empty(0)  # of the default device
    options = {name: x[:hq].to(like) if isinstance(x, torch.Tensor) else x for name, x in options.items()}
    return options | ({"align": "bottom_right"} if sq != sk else {})


def parted(size, dtype, balanced):
    q, k, v, dout, dlse = inputs(*size, dtype)
    return *(shard_sequence(x, 2, balanced=balanced).requires_grad_() for x in (q, k, v)), dout, dlse


def error(got, wanted):
    got, wanted = got.detach().float(), wanted.float()
    return ((got - wanted).norm() / wanted.norm().clamp(min=1e-3)).item()


def attention_and_gradients(method, size, options, dtype, balanced):
    options = given(options, size[0], size[2], size[3])
    q, k, v, dout, dlse = inputs(*size, dtype)
    out, lse = rapt.attention(q, k, v, return_lse=True, **options)
    wanted = rapt.attention_backward(dout, q, k, v, out, lse, dlse=dlse, **options)
    part = lambda x: shard_sequence(x, 2, balanced=balanced)
    mine = [part(x).requires_grad_() for x in (q, k, v)]
    got, sums = method(*mine, balanced=balanced, return_lse=True, **options)
    assert got.dtype is dtype and sums.dtype is torch.float32
    if method is all_gather_attention and out.is_cpu:
        assert torch.equal(got, part(out)) and torch.equal(sums, part(lse)), "not the bits of one process"
    torch.autograd.backward([got, sums], [part(dout), part(dlse)])
    # One rounding to the type, and in 16 bits those of weights and of out, which both sides have.
    bound = 1e-5 if dtype is torch.float32 else 4 * torch.finfo(dtype).eps
    pairs = [(got, out), (sums, lse), (mine[0].grad, wanted.dq), (mine[1].grad, wanted.dk), (mine[2].grad, wanted.dv)]
    errors = [error(x, part(y)) for x, y in pairs]
    assert all(x <= bound for x in errors), errors  # max() may pass over a NaN


def takes(method, size, ranks):
    hq, hk = size[:2]
    return method is not ulysses_attention or (hq % ranks == 0 and (hk % ranks == 0 or ranks % hk == 0))


def against_one_process(method, dtype, rank, ranks):
    for (name, options), balanced in itertools.product(OPTIONS.items(), (False, True)):
        if dtype is torch.float32 or name in ("causal", "full", "window"):
            for size in SIZES.values() if name in ("causal", "full") else [SIZES["group"]]:
                if takes(method, size, ranks):
                    attention_and_gradients(method, size, options, dtype, balanced)


def few_rows(rank, ranks):
    for size, causal, dtype in itertools.product(FEW_ROWS.values(), (False, True), (torch.float32, torch.bfloat16)):
        hq, hk, sq, sk = size
        q, k, v, _, _ = inputs(hq, hk, sq, sk, dtype, b=1)
        options = given({"causal": causal}, hq, sq, sk)
        out, lse = rapt.attention(q, k, v, return_lse=True, **options)
        for balanced in (False, True):
            part = lambda x: shard_sequence(x, 2, balanced=balanced)
            got, sums = all_gather_attention(part(q), part(k), part(v), balanced=balanced, return_lse=True, **options)
            assert torch.equal(got, part(out)) and torch.equal(sums, part(lse)), (size, causal, dtype, balanced)


def empty_rows(rank, ranks):
    """Rows before the first key, and NaN in keys that nobody sees."""
    q, k, v, _, _ = inputs(2, 1, 24, 24, torch.float32)
    k[:, :, -3:] = v[:, :, -3:] = torch.nan
    out, lse = rapt.attention(q, k, v, causal=True, align=-5, return_lse=True)
    assert out[:, :, :5].eq(0).all() and lse[:, :, :5].eq(-torch.inf).all() and out.isfinite().all()
    for method, balanced in itertools.product((all_gather_attention, ring_attention), (False, True)):
        part = lambda x: shard_sequence(x, 2, balanced=balanced)
        mine = [part(x).requires_grad_() for x in (q, k, v)]
        got, sums = method(*mine, causal=True, align=-5, balanced=balanced, return_lse=True)
        torch.testing.assert_close((got, sums), (part(out), part(lse)), rtol=1e-5, atol=1e-6)
        got.sum().backward()
        assert all(x.grad.isfinite().all() for x in mine)


def packed_and_gradients(method, inputs, dlse, given, inner, balanced, times=1):
    """Compares `times` calls with one process. Returns this rank's part of q, k and v."""
    part = lambda x: shard_sequence(x, 0, balanced=balanced)
    cu_seqlens = torch.tensor(inner)
    *some, dout = inputs
    alone = given | {"cu_seqlens_q": cu_seqlens, "cu_seqlens_k": cu_seqlens}
    alone |= {"align": "bottom_right"} if {"causal", "window", "alibi"} & given.keys() else {}
    out, lse = rapt.attention(*some, return_lse=True, **alone)
    grads = rapt.attention_backward(dout, *some, out, lse, dlse=dlse, **alone)
    runs = []
    for _ in range(times):
        mine = [part(x).requires_grad_() for x in some]
        got = method(*mine, cu_seqlens=cu_seqlens, balanced=balanced, return_lse=True, **given)
        torch.autograd.backward(got, [part(dout), part(dlse)])
        runs.append([*got, *(x.grad for x in mine)])
    assert all(x.is_contiguous() for x in got) and got[0].dtype is dout.dtype
    assert all(torch.equal(x, y) for x, y in zip(runs[0], runs[-1])), "not the same bits again"
    wanted = out, lse, grads.dq, grads.dk, grads.dv
    bound = 1e-5 if dout.dtype is torch.float32 else 4 * torch.finfo(dout.dtype).eps
    errors = [error(x, part(y)) for x, y in zip(runs[0], wanted)]
    assert all(x <= bound for x in errors), (errors, given, inner, dout.dtype, balanced)
    return mine


def packed(method, rank, ranks):
    """Sequences that begin and end anywhere, one process's results and gradients."""
    t = 24 * ranks
    hq, hk = 12, 6 if takes(method, (12, 6), ranks) else 1
    torch.manual_seed(4)
    whole = [torch.randn(t, heads, size) for heads, size in ((hq, 16), (hk, 16), (hk, 24))]
    dout, dlse = torch.randn(t, hq, 24), torch.randn(t, hq)
    slopes, sinks = (x.to(dout) for x in (SLOPES, SINKS))
    options = [OPTIONS["causal"], {"sinks": sinks}, OPTIONS["softcap"]]
    options.append({"causal": True, "window": (7, None), "alibi": slopes})
    options += [OPTIONS["both_sides"], {"alibi": slopes, "sinks": sinks}]
    short = [0, 0, *range(1, 20), *range(21, t, 2), t, t]
    several = [0, 5, 5, 24, 30, t - 1, t]
    grid = [*itertools.product(options[:2], ([0, t], several, [0, t - 3, t], short))]
    grid += [(given, several) for given in options[2:]]
    for (given, inner), balanced in itertools.product(grid, (False, True)):
        for dtype in (torch.float32, torch.bfloat16) if given is options[0] else (torch.float32,):
            some = [x.to(dtype) for x in (*whole, dout)]
            mine = packed_and_gradients(method, some, dlse, given, inner, balanced, 2 if inner is several else 1)
    cu_seqlens = torch.tensor(inner)
    with raises(ValueError, "align: got 0 with cu_seqlens"):
        method(*mine, cu_seqlens=cu_seqlens, align=0)
    with raises(ValueError, f"cu_seqlens: got offsets up to {t + 1}; wanted {t}"):
        method(*mine, cu_seqlens=torch.tensor([0, t + 1]))
    with raises(ValueError, "cu_seqlens: got a tensor with hash"):
        method(*mine, cu_seqlens=torch.tensor([0, 3 + (rank == 0), t]))
    cut = slice(0, -2) if rank == 0 else slice(None)
    with raises(ValueError, "sq: got 22 on rank 0 and 24 on rank 1; wanted the same on every rank: pad"):
        method(*(x[cut] for x in mine), cu_seqlens=torch.tensor([0, t - 2]))
    with raises(ValueError, "q: got 23 rows in a balanced part; wanted an even number"):
        method(*(x[1:] for x in mine), cu_seqlens=cu_seqlens, balanced=True)


def same_bits_again(rank, ranks):
    for method in METHODS:
        if not takes(method, SIZES["group"], ranks):
            continue
        runs = []
        for _ in range(2):
            *mine, dout, _ = parted(SIZES["group"], torch.bfloat16, True)
            out = method(*mine, causal=True, balanced=True)
            out.backward(shard_sequence(dout, 2, balanced=True))
            runs.append([out, *(x.grad for x in mine)])
        assert all(torch.equal(a, b) for a, b in zip(*runs))


def losses_that_differ(rank, ranks):
    """Of some ranks the loss depends on lse alone, or on out alone: they all take part in the same messages."""
    q, k, v, dout, dlse = inputs(12, 12, 48, 48, torch.float32)
    out, lse = rapt.attention(q, k, v, causal=True, return_lse=True)
    part = lambda x: shard_sequence(x, 2)
    uses_out, uses_lse = rank != 1, rank != 0
    own = torch.arange(48) // (48 // ranks)  # the rank of a row
    dout, dlse = dout * (own != 1)[:, None], dlse * (own != 0)
    wanted = rapt.attention_backward(dout, q, k, v, out, lse, dlse=dlse, causal=True)
    for method in METHODS:
        mine = [part(x).requires_grad_() for x in (q, k, v)]
        results = zip(method(*mine, causal=True, return_lse=True), (part(dout), part(dlse)), (uses_out, uses_lse))
        torch.autograd.backward(*zip(*((x, grad) for x, grad, uses in results if uses)))
        for x, grad in zip(mine, (wanted.dq, wanted.dk, wanted.dv)):
            assert error(x.grad, part(grad)) <= 1e-5


def no_second_derivatives(rank, ranks):
    for method in METHODS:
        *mine, _, _ = parted((12, 12, 48, 48), torch.float32, False)
        grads = torch.autograd.grad(method(*mine).square().sum(), mine, create_graph=True)
        with raises(RuntimeError, "once_differentiable"):
            grads[0].sum().backward()


def shards(rank, ranks):
    x = torch.arange(3 * 24 * 2).view(3, 24, 2)
    for balanced, dim in itertools.product((False, True), (1, -2)):
        part = shard_sequence(x, dim, balanced=balanced)
        assert part.shape == (3, 24 // ranks, 2) and part.is_contiguous()
        chunks = x.chunk(2 * ranks, 1)
        wanted = torch.cat((chunks[rank], chunks[2 * ranks - 1 - rank]), 1) if balanced else x.chunk(ranks, 1)[rank]
        assert torch.equal(part, wanted)
        assert torch.equal(unshard_sequence(part, dim, balanced=balanced), x)
    with raises(ValueError, f"x: got 23 rows along dimension 1; wanted a multiple of {2 * ranks}"):
        shard_sequence(torch.zeros(3, 23, 2), 1, balanced=True)


def ring_messages(rank, ranks):
    """Messages are under way before the kernel runs, and are no more than the keys need."""
    *mine, dout, _ = parted(SIZES["group"], torch.bfloat16, True)
    events, sent = [], []
    exchange, kernel, gradient = dist.batch_isend_irecv, _distributed_ring.forward, _distributed_ring.backward

    def batch(operations):
        events.append("send")
        sent.append(operations[0].tensor.nbytes)
        return exchange(operations)

    def called(run):
        return lambda *args, **given: events.append("kernel") or run(*args, **given)

    with (
        mock.patch.object(dist, "batch_isend_irecv", batch),
        mock.patch.object(_distributed_ring, "forward", called(kernel)),
        mock.patch.object(_distributed_ring, "backward", called(gradient)),
    ):
        out = ring_attention(*mine, causal=True, balanced=True)
        assert events == ["send", "kernel"] * (ranks - 1) + ["kernel"], events
        keys = mine[1].nbytes + mine[2].nbytes
        assert sent == [keys] * (ranks - 1)
        events.clear(), sent.clear()
        out.backward(shard_sequence(dout, 2, balanced=True))
        # With each block of keys the sums of its gradients go on, in float32, and home at last.
        assert events == ["send", "kernel", "send"] * (ranks - 1) + ["kernel", "send"], events
        assert sorted(sent) == sorted([keys] * (ranks - 1) + [2 * keys] * ranks)


def raises(kind, message):
    @contextlib.contextmanager
    def check():
        try:
            yield
        except kind as got:
            assert message in str(got), str(got)
        else:
            raise AssertionError(f"no error; wanted {message}")

    return check()


class NoNumber:
    def __float__(self):
        raise OSError("a number that cannot be read")


def disagreements(rank, ranks):
    last = rank == ranks - 1
    q, k, v = (shard_sequence(x, 2) for x in inputs(12, 12, 48, 48, torch.float32)[:3])
    for method in METHODS:
        cut = slice(0, -1) if last else slice(None)
        rows = 48 // ranks
        got = f"{rows} on rank 0 and {rows - 1} on rank {ranks - 1}"
        with raises(ValueError, f"sk: got {got}; wanted the same on every rank: pad"):
            method(q, k[:, :, cut], v[:, :, cut])
        with raises(ValueError, f"causal: got False on rank 0 and True on rank {ranks - 1}"):
            method(q, k, v, causal=last, align=0)
        with raises(ValueError, f"scale: got 0.5 on rank 0 and 0.25 on rank {ranks - 1}"):
            method(q, k, v, scale=0.25 if last else 0.5)
        for name in ("alibi", "sinks"):
            with raises(ValueError, f"{name}: got a tensor with hash"):
                method(q, k, v, **{name: SINKS.to(q) + last})
            with raises(ValueError, f"{name}: got None on rank 0 and a tensor with hash"):
                method(q, k, v, **{name: SINKS.to(q) if last else None})
        with raises(ValueError, "k: got shape" if last else f"group: rank {ranks - 1} refuses its arguments"):
            method(q, k[0] if last else k, v)
        with raises(TypeError if last else ValueError, "v: got torch.float16" if last else "refuses its arguments"):
            method(q, k, v.half() if last else v)
        with raises(ValueError, "return_lse: got False on rank 0 and True"):
            method(q, k, v, return_lse=last)
        with raises(OSError if last else ValueError, "a number" if last else "refuses its arguments"):
            method(q, k, v, scale=NoNumber() if last else None)
        with raises(ValueError, "requires_grad: got False on rank 0 and True"):
            method(q.clone().requires_grad_(last), k, v)
        torch.testing.assert_close(method(q, k, v).isfinite().all(), torch.tensor(True))  # the group is as it was
    with raises(ValueError, "method: got ring_attention on rank 0 and unshard_sequence on rank"):
        unshard_sequence(q, 2) if last else ring_attention(q, k, v)
    with raises(ValueError, "x.shape[2]: got"):
        unshard_sequence(q[:, :, :-1] if last else q, 2)


def refusals(rank, ranks):
    q, k, v = (shard_sequence(x, 2) for x in inputs(12, 4, 48, 48, torch.float32)[:3])
    for method in METHODS:
        with raises(ValueError, "q: got"):
            method(q[:, :, :1], k, v, balanced=True)
        with raises(ValueError, "align: got None"):
            method(q[:, :, :2], k, v, causal=True)
        with raises(ValueError, "alibi: got a tensor that requires grad"):
            method(q, k, v, alibi=torch.ones(12, requires_grad=True))
        with raises(ValueError, "window: got"):
            method(q, k, v, window=(-3, 0))
        for bad, name in (({"softcap": 1e-31}, "softcap"), ({"alibi": torch.ones(12, dtype=torch.int64)}, "alibi")):
            with raises((TypeError, ValueError), name):  # as kernels do, but before any message
                method(q, k, v, **bad)
        with raises(TypeError, "causal: got 1"):
            method(q, k, v, causal=1)
        with raises(TypeError, "group: got int"):
            method(q, k, v, group=3)
    with raises(ValueError, f"q: got 5 heads over {ranks} ranks"):
        ulysses_attention(*(x[:, :1].expand(-1, 5, -1, -1) for x in (q, k, v)))
    with raises(ValueError, "x: got a tensor that requires grad"):
        unshard_sequence(q.clone().requires_grad_(), 2)
    if ranks > 2:  # messages have global numbers
        group = dist.new_group([1, 2])
        if rank in (1, 2):
            with raises(ValueError, "causal: got False on rank 1 and True on rank 2"):
                ring_attention(q, k, v, causal=rank == 2, align=0, group=group)
    group = dist.new_group([0])
    if rank != 0:
        with raises(ValueError, "group: got a group without this process"):
            ring_attention(q, k, v, group=group)
    else:
        assert torch.equal(all_gather_attention(q, k, v, group=group), rapt.attention(q, k, v))


def results_do_not_hold_groups(rank, ranks):
    """Or a group's threads would still run, after destroy_process_group(), as the program ends."""
    parts = parted((12, 12, 48, 48), torch.float32, balanced=False)[:3]
    for method in METHODS:
        group = dist.new_group()
        out = method(*parts, group=group)
        alive = weakref.ref(group)
        dist.destroy_process_group(group)
        del group
        assert alive() is None
        with raises(ValueError, "group: got one that is destroyed"):
            out.sum().backward()


def nothing_hangs(rank, ranks):
    """If a rank does not call, or dies within a call, the others raise. The last case, as not all ranks survive it."""
    q, k, v = (shard_sequence(x, 2) for x in inputs(12, 4, 48, 48, torch.float32)[:3])
    groups = [dist.new_group(timeout=timedelta(seconds=2)) for _ in range(2)]
    last = rank == ranks - 1
    if not last:
        begin = time.monotonic()
        named = ", ".join(map(str, range(ranks)))
        with raises(RuntimeError, f"ring_attention: rank {rank} lost another rank of its group (ranks {named})"):
            ring_attention(q, k, v, group=groups[0])
        assert time.monotonic() - begin < 30
    dist.barrier()
    if ranks == 4:  # over a mesh, also the rank that shares no dimension with the last
        ids = ((0, 2), (1, 3), (0, 1), (2, 3))
        sides = [dist.new_group(list(some), timeout=timedelta(seconds=2)) for some in ids]
        own, places = [sides[rank % 2], sides[2 + rank // 2]], torch.arange(4).view(2, 2)
        mesh = DeviceMesh.from_group(own, q.device.type, mesh=places, mesh_dim_names=("keys", "heads"))
        if not last:
            with raises(RuntimeError, "rapt.distributed.ring_attention: rank"):
                ring_attention(q, k, v, group=mesh)
        dist.barrier()
    dies = mock.patch.object(_distributed_ring, "forward", lambda *args, **given: os._exit(0))
    with dies if last else contextlib.nullcontext(), raises(RuntimeError, "rapt.distributed.ring_attention: rank"):
        ring_attention(q, k, v, group=groups[1])
        ring_attention(q, k, v, group=groups[1])  # a rank may have had all messages of the first call


CASES = {
    f"{method.__name__}-{str(dtype)[6:]}": functools.partial(against_one_process, method, dtype)
    for method in METHODS
    for dtype in (torch.float32, torch.bfloat16, torch.float16)
}
CASES |= {f"packed-{method.__name__}": functools.partial(packed, method) for method in METHODS}
_OTHERS = (few_rows, empty_rows, same_bits_again, losses_that_differ, no_second_derivatives)
for _case in (*_OTHERS, shards, ring_messages, disagreements, refusals, results_do_not_hold_groups):
    CASES[_case.__name__] = _case


def rank_main(rank, ranks, folder, cases, last_case=nothing_hangs, rendezvous=None, backend="gloo"):
    """Runs all cases and writes the error of each, or "", to a file. Ends after an error: ranks may be out of step."""
    torch.set_num_threads(1)
    found = {"store": dist.FileStore(f"{folder}/store", ranks)} if rendezvous is None else {"init_method": rendezvous}
    dist.init_process_group(backend, **found, rank=rank, world_size=ranks, timeout=timedelta(seconds=60))
    for name, case in [*cases.items(), (last_case.__name__, last_case)]:
        report = f"{folder}/{name}.{rank}"
        if case is last_case and rank == ranks - 1:
            open(report, "w").close()  # it does not come back
        text = ""
        try:
            case(rank, ranks)
        except BaseException:
            text = traceback.format_exc()
        with open(report, "w") as file:
            file.write(text)
        if text:
            break
    os._exit(0)  # groups whose ranks have died cannot be closed
