"""More cases for distributed_cases.py: decode over a KV cache that is spread over ranks."""

import itertools

import torch
from distributed_cases import SINKS, error, raises

import rapt
from rapt._distributed_check import agree, ranks_of
from rapt.distributed import decode_attention

OPTIONS = {
    "plain": {},
    "softcap": {"softcap": 5.0, "scale": 0.3},
    "sinks": {"sinks": SINKS},
    "window": {"window": (9, 0)},
    "window_sinks": {"window": (9, None), "sinks": SINKS},
}


def cache(lengths, rank, ranks, interleaved, hk=4, d=16, dv=24, room=64):
    """Whole keys and values, and which of them are this rank's, each in front of its cache."""
    torch.manual_seed(3)
    k, v = torch.randn(len(lengths), hk, room, d), torch.randn(len(lengths), hk, room, dv)
    mine, counts = [], []
    for n in lengths:
        own = torch.arange(rank, n, ranks) if interleaved else torch.arange(n).tensor_split(ranks)[rank]
        counts.append(len(own))
        mine.append(torch.nn.functional.pad(own, (0, room - len(own)), value=room - 1))
    rows = torch.stack(mine)[:, None, :, None].expand(-1, hk, -1, 1)
    return k, v, k.gather(2, rows.expand(-1, -1, -1, d)), v.gather(2, rows.expand(-1, -1, -1, dv)), torch.tensor(counts)


def paged(x, size):
    """The cache as pages in reverse order, and the table."""
    b, h, rows, d = x.shape
    pages = x.view(b, h, rows // size, size, d).transpose(1, 2).flatten(0, 1).flip(0).contiguous()
    return pages, torch.arange(len(pages)).flip(0).view(b, -1)


def decode(rank, ranks):
    """Against one process. A rank may have no key of a sequence."""
    lengths = [37, 1 + 3, 64]
    for interleaved, sq, (name, options) in itertools.product((False, True), (1, 3), OPTIONS.items()):
        k, v, own_k, own_v, counts = cache(lengths, rank, ranks, interleaved)
        q = torch.randn(3, 12, sq, 16)
        for dtype in (torch.float32, torch.bfloat16):
            some = [x.to(dtype) for x in (q, k, v)]
            whole = {
                "cache_seqlens": torch.tensor(lengths),
                "causal": True,
                "align": "bottom_right",
                "return_lse": True,
            }
            wanted, sums = rapt.attention(*some, **whole, **options)
            more = {"interleaved": interleaved, "return_lse": True} | options
            out, lse = decode_attention(some[0], own_k.to(dtype), own_v.to(dtype), cache_seqlens=counts, **more)
            bound = 1e-5 if dtype is torch.float32 else 4 * torch.finfo(dtype).eps
            assert out.dtype is dtype
            errors = [error(out, wanted), error(lse, sums)]
            assert all(x <= bound for x in errors), (errors, name, sq, interleaved)
            copies = [torch.empty_like(out) for _ in range(ranks)]
            torch.distributed.all_gather(copies, out)
            assert all(torch.equal(copy, out) for copy in copies), "not the same bits on every rank"


def decode_from_pages(rank, ranks):
    lengths = [37, 5, 64]
    for interleaved, sq, quantised in itertools.product((False, True), (1, 2), (False, True)):
        k, v, own_k, own_v, counts = cache(lengths, rank, ranks, interleaved)
        q, scales = torch.randn(3, 12, sq, 16), {}
        if quantised:
            k, v, own_k, own_v = ((x * 30).round().clamp(-127, 127).to(torch.int8) for x in (k, v, own_k, own_v))
            scales = {"k_scale": torch.full((1, 4, 1, 1), 1 / 30), "v_scale": torch.full((1, 4, 1, 1), 1 / 30)}
        whole = {"cache_seqlens": torch.tensor(lengths), "causal": True, "align": "bottom_right", "window": (20, 0)}
        wanted = rapt.attention(q, k, v, **whole, **scales)
        (pages, table), (of_v, _) = paged(own_k, 8), paged(own_v, 8)
        given = {"cache_seqlens": counts, "block_table": table, "window": (20, 0), "interleaved": interleaved}
        assert error(decode_attention(q, pages, of_v, **given, **scales), wanted) <= 1e-5


def decode_refuses(rank, ranks):
    last = rank == ranks - 1
    k, v, own_k, own_v, counts = cache([37], rank, ranks, False)
    torch.manual_seed(1)
    q = torch.randn(1, 12, 1, 16)
    with raises(ValueError, "q: got a tensor with hash"):
        decode_attention(q + last, own_k, own_v)
    with raises(ValueError, "sinks: got None on rank 0 and a tensor with hash"):
        decode_attention(q, own_k, own_v, sinks=SINKS if last else None)
    with raises(ValueError, "block_table: got" if last else f"group: rank {ranks - 1} refuses its part of the cache"):
        table = torch.zeros(1, 64, dtype=torch.int64)
        table[0, 0] = 99 if last else 0
        pages, _ = paged(own_k, 8)
        decode_attention(q, pages, paged(own_v, 8)[0], cache_seqlens=counts, block_table=table)
    with raises(ValueError, "window: got (9223372036854775808, 0)" if last else f"group: rank {ranks - 1} refuses"):
        decode_attention(q, own_k, own_v, window=(2**63 if last else 4, 0))
    longest = decode_attention(q, own_k, own_v, cache_seqlens=counts, window=(2**63 - 1, 0))
    torch.testing.assert_close(longest, decode_attention(q, own_k, own_v, cache_seqlens=counts))
    with raises((OverflowError, RuntimeError, ValueError), "verflow" if last else "refuses its arguments"):
        agree(ranks_of(None, "decode_attention"), {"b": 2**63 if last else 1}, None)
    for wrong in (-3, 65):  # with a window, a rank that sees no key does not call the kernel
        with raises(ValueError, f"cache_seqlens: got {wrong} for sequence 0" if rank == 0 else "group: rank 0 refuses"):
            lengths = torch.tensor([wrong]) if rank == 0 else torch.tensor([40])
            decode_attention(q, own_k, own_v, cache_seqlens=lengths, window=(4, 0))
    with raises(ValueError, "window: got (4, 2)"):
        decode_attention(q, own_k, own_v, window=(4, 2))
    with raises(ValueError, "sinks: got a tensor that requires grad"):
        decode_attention(q, own_k, own_v, sinks=SINKS.clone().requires_grad_())
    with raises(ValueError, "q: got a tensor that requires grad"):
        decode_attention(q.requires_grad_(), own_k, own_v)


CASES = {case.__name__: case for case in (decode, decode_from_pages, decode_refuses)}
