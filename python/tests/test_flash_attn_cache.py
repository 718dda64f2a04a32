"""flash_attn_with_kvcache against float64: every option beside every other, at random."""

import inspect
import random

import pytest
import torch
from flash_attn_reference import DTYPES, LSE, OUT, near, one, randn
from rapt import _flash_attn_cache
from rapt.flash_attn import flash_attn_with_kvcache

pytestmark = pytest.mark.usefixtures("seeded", "without_fallbacks")


@pytest.fixture
def one_thread():
    """For hundreds of calls that are too small for more."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def rotated(x, first, cos, sin, interleaved, each=True):
    """x [n, h, d] at positions first, first + 1, ... or all at first, by complex numbers."""
    columns = 2 * cos.shape[1]
    place = first + (torch.arange(len(x)) if each else torch.zeros(len(x), dtype=torch.long))
    turn = torch.complex(cos.double(), sin.double())[place][:, None]
    pairs = x[..., :columns].double().unflatten(-1, (-1, 2) if interleaved else (2, -1))
    dim = -1 if interleaved else -2
    pairs = torch.complex(*pairs.unbind(dim)) * turn
    return torch.cat((torch.stack((pairs.real, pairs.imag), dim).flatten(-2), x[..., columns:].double()), -1)


class Call:
    """A random call, and what it means sequence by sequence."""

    def __init__(self, seed, dtype):
        rng = random.Random(seed)
        torch.manual_seed(seed)
        self.b, self.dtype = b, _ = rng.randint(1, 3), dtype
        hk = rng.choice((1, 2))
        self.hq, d, dv = hk * rng.choice((1, 2, 4)), rng.choice((32, 59, 64, 128)), rng.choice((32, 64))
        room, n = rng.choice((16, 40, 70)), rng.choice((1, 1, 3, 9))
        self.given = {
            "causal": rng.random() < 0.5,
            "window_size": rng.choice(((-1, -1), (-1, -1), (rng.randint(0, 20), 0), (7, 3))),
            "softcap": rng.choice((0.0, 5.0)),
            "softmax_scale": rng.choice((None, 0.1)),
            "alibi_slopes": rng.choice((None, torch.rand(self.hq), torch.rand(b, self.hq))),
            "s_aux": rng.choice((None, None, torch.randn(self.hq))),
            "num_splits": rng.choice((0, 1, 3)),
        }
        new = rng.random() < 0.6
        self.rows = [n] * b
        self.new = [rng.choice((n, 1, 5))] * b if new else [0] * b
        ragged = rng.random() < 0.2
        if ragged:
            self.rows = [rng.randint(0, n) for _ in range(b)]
            self.new = [rng.randint(0, 5) if new else 0 for _ in range(b)]
        whole = not new and rng.random() < 0.2
        self.lengths = [room] * b if whole else [rng.randint(0, room - m) for m in self.new]
        if rng.random() < 0.2:
            self.lengths = [min(self.lengths)] * b
        self.q = [randn(m, self.hq, d, dtype=dtype) for m in self.rows]
        self.k, self.v = ([randn(m, hk, size, dtype=dtype) for m in self.new] for size in (d, dv))
        self.old = [[randn(m, hk, size, dtype=dtype) for m in self.lengths] for size in (d, dv)]
        self.make_cache(rng, room, hk, (d, dv))
        if ragged:
            self.given["cu_seqlens_q"] = torch.tensor([0, *self.rows]).cumsum(0).int()
            self.tensors = [torch.cat(self.q), *self.caches]
            if new:
                self.given["cu_seqlens_k_new"] = torch.tensor([0, *self.new]).cumsum(0).int()
                self.tensors += [torch.cat(self.k), torch.cat(self.v)]
        else:
            self.tensors = [torch.stack(self.q), *self.caches, *([torch.stack(self.k), torch.stack(self.v)] if new else [])]
        if not whole:
            same = len(set(self.lengths)) == 1
            self.given["cache_seqlens"] = self.lengths[0] if same else torch.tensor(self.lengths, dtype=rng.choice((torch.int32, torch.int64)))
        self.first = [0] * b
        if rng.random() < 0.3:
            self.first = [rng.randint(0, length) for length in self.lengths]
            self.given["cache_leftpad"] = torch.tensor(self.first, dtype=torch.int32)
        self.rotary = None
        if new and rng.random() < 0.6:
            angles = torch.rand(room + 9, rng.choice((8, 16)))
            self.rotary = angles.cos().to(dtype), angles.sin().to(dtype), rng.random() < 0.5
            self.given |= dict(zip(("rotary_cos", "rotary_sin", "rotary_interleaved"), self.rotary))
            self.begin = self.lengths
            if rng.random() < 0.2:
                self.begin = [0] * b
                self.given["rotary_seqlens"] = torch.tensor(self.begin, dtype=torch.int32)

    def make_cache(self, rng, room, hk, sizes):
        """Memory that holds NaN where no key is: caches in order, some of more caches, or pages."""
        kind = rng.choice(("in order", "chosen", "pages"))
        b, page_size = self.b, rng.choice((1, 8, 16)) if kind == "pages" else room
        count = b if kind == "in order" else b * -(-room // page_size) + 2
        each = 1 if kind != "pages" else -(-room // page_size)
        order = torch.arange(count) if kind == "in order" else torch.randperm(count)
        self.table, self.page_size = order[: b * each].view(b, each), page_size
        if kind == "chosen":
            self.given["cache_batch_idx"] = self.table[:, 0].int()
        if kind == "pages":
            self.given[rng.choice(("block_table", "page_table"))] = self.table.int()
        self.caches = [torch.full((count, page_size, hk, size), torch.nan, dtype=self.dtype) for size in sizes]
        for i, length in enumerate(self.lengths):
            for cache, rows in zip(self.caches, self.old):
                cache[self.places(i, 0, length)] = rows[i]
        if self.lengths == [room] * b and kind == "pages":  # the room is all pages
            for i in range(b):
                for cache, rows in zip(self.caches, self.old):
                    more = randn(each * page_size - room, hk, cache.shape[-1], dtype=self.dtype)
                    cache[self.places(i, room, each * page_size)] = more
                    rows[i] = torch.cat((rows[i], more))
            self.lengths = [each * page_size] * b

    def places(self, i, begin, end):
        j = torch.arange(begin, end)
        return self.table[i, j // self.page_size], j % self.page_size

    def wanted(self):
        """(out, lse) of each sequence, and the keys and values that its cache then holds."""
        made = []
        for i in range(self.b):
            q, k = self.q[i], self.k[i]
            if self.rotary is not None:
                each = self.given["causal"] or self.given["window_size"] != (-1, -1)
                q = rotated(q, self.begin[i], *self.rotary, each).to(self.dtype)
                k = rotated(k, self.begin[i], *self.rotary).to(self.dtype)
            keys, values = (torch.cat((old[i], new)) for old, new in ((self.old[0], k), (self.old[1], self.v[i])))
            slopes = self.given["alibi_slopes"]
            given = {"causal": self.given["causal"], "window": self.given["window_size"], "softcap": self.given["softcap"]}
            given |= {"scale": self.given["softmax_scale"], "sinks": self.given["s_aux"], "first": self.first[i]}
            slopes = slopes if slopes is None or slopes.dim() == 1 else slopes[i]
            made.append((*one(q, keys, values, **given, slopes=slopes)[:2], keys, values))
        return made


@pytest.mark.parametrize("dtype, seeds", list(zip(DTYPES, (range(160), range(160, 230), range(230, 300)))))
def test_calls_at_random(dtype, seeds, one_thread):
    for seed in seeds:
        call = Call(seed, dtype)
        before = [cache.clone() for cache in call.caches]
        out, lse = flash_attn_with_kvcache(*call.tensors, **call.given, return_softmax_lse=True)
        assert out.dtype is dtype and lse.dtype is torch.float32
        touched = torch.zeros(call.caches[0].shape[:2], dtype=torch.bool)
        for i, (wanted, sums, *rows) in enumerate(call.wanted()):
            if "cu_seqlens_q" in call.given:
                begin, end = call.given["cu_seqlens_q"][i : i + 2].tolist()
                its_out, its_lse = out[begin:end], lse[:, begin:end]
            else:
                its_out, its_lse = out[i], lse[i]
            near(its_out, wanted, OUT[dtype])
            near(its_lse, sums, LSE[dtype])
            for cache, x in zip(call.caches, rows):
                # Rotated keys are rounded from float32, here from float64.
                near(cache[call.places(i, 0, len(x))], x, torch.finfo(dtype).eps)
            touched[call.places(i, call.lengths[i], call.lengths[i] + call.new[i])] = True
        for cache, old in zip(call.caches, before):
            assert torch.equal(cache[~touched].nan_to_num(7.0), old[~touched].nan_to_num(7.0))


def test_caches_in_one_tensor():
    """Keys and values beside each other, as other engines allocate them."""
    q, k, v = randn(2, 3, 4, 32), randn(2, 3, 2, 32), randn(2, 3, 2, 32)
    lengths, table = torch.tensor([5, 20], dtype=torch.int32), torch.tensor([[3, 0], [1, 2]], dtype=torch.int32)
    results = []
    for both, dim in ((torch.zeros(4, 2, 16, 2, 32), 1), (torch.zeros(4, 16, 2, 2, 32), 2), (torch.zeros(2, 4, 16, 2, 32), 0)):
        caches = both.unbind(dim)
        results.append(flash_attn_with_kvcache(q, *caches, k, v, cache_seqlens=lengths, block_table=table, causal=True))
        assert torch.equal(caches[0][3, 5:8], k[0]) and torch.equal(caches[1][2, 4:7], v[1])
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])
    pool = torch.zeros(9, 16, 2, 32)  # pages of keys are 0, 2, 4, ..., those of values 1, 3, 5, ...
    overlapping = flash_attn_with_kvcache(
        q, pool[:-1], pool[1:], k, v, cache_seqlens=lengths, block_table=2 * table, causal=True
    )
    assert torch.equal(overlapping, results[0]) and torch.equal(pool[6, 5:8], k[0]) and torch.equal(pool[5, 4:7], v[1])


@pytest.mark.parametrize("paged", [False, True])
def test_repeated_calls_take_a_short_way(paged, monkeypatch):
    q, k, v, pool = randn(2, 3, 4, 32), randn(2, 3, 2, 32), randn(2, 3, 2, 32), randn(9, 16, 2, 32)
    lengths, table = torch.tensor([5, 12], dtype=torch.int32), torch.tensor([[6, 0], [2, 4]], dtype=torch.int32)
    options = {"causal": True, "window_size": (9, 0), "softcap": 5.0, "softmax_scale": 0.1, "return_softmax_lse": True}
    made, short = [], _flash_attn_cache._attend_now
    calls = []
    monkeypatch.setattr(_flash_attn_cache, "_attend_now", lambda *given: calls.append(1) or short(*given))
    for repeat in range(3):
        if repeat == 2:
            monkeypatch.setattr(_flash_attn_cache, "signature_of", lambda *_: None)
        rows = pool.clone()
        caches = (rows[:-1], rows[1:]) if paged else (rows[:2], rows[2:4])  # of pages, those of a pool with both
        place = {"cache_seqlens": lengths, "block_table": table if paged else None}
        made.append((*flash_attn_with_kvcache(q, *caches, k, v, **place, **options), *caches))
    assert len(calls) == 2
    for x, y, z in zip(*made):
        assert torch.equal(x, z) and torch.equal(y, z)


def test_compiled_without_breaks():
    q, k, v = randn(2, 3, 4, 32), randn(2, 3, 2, 32), randn(2, 3, 2, 32)
    cos, sin = randn(40, 8), randn(40, 8)

    def step(q, k, v, k_cache, v_cache, lengths, leftpad, cos, sin):
        return flash_attn_with_kvcache(
            q, k_cache, v_cache, k, v, cos, sin, lengths, cache_leftpad=leftpad, causal=True, return_softmax_lse=True
        )

    lengths, leftpad = torch.tensor([5, 20], dtype=torch.int32), torch.tensor([0, 4], dtype=torch.int32)
    made = []
    for run in (step, torch.compile(step, backend="aot_eager", fullgraph=True)):
        caches = randn(2, 30, 2, 32).mul(0), torch.zeros(2, 30, 2, 32)
        made.append((*run(q, k, v, *caches, lengths, leftpad, cos, sin), *caches))
    for eager, compiled in zip(*made):
        assert torch.equal(eager, compiled)


X, NEW = torch.zeros(2, 3, 4, 16), torch.zeros(2, 3, 2, 16)
CALL = {"q": X, "k_cache": torch.zeros(2, 20, 2, 16), "v_cache": torch.zeros(2, 20, 2, 16), "k": NEW, "v": NEW, "cache_seqlens": 4}
INDEX = torch.tensor([0, 1], dtype=torch.int32)


@pytest.mark.parametrize(
    "change, error, message",
    [
        ({"q": X[0]}, ValueError, "q: got shape"),
        ({"q": X.clone().requires_grad_()}, NotImplementedError, "q: got a tensor that requires grad"),
        ({"q": X.half()}, TypeError, "k_cache: got torch.float32; wanted q's torch.float16"),
        ({"k_cache": None}, TypeError, "k_cache: got None"),
        ({"v_cache": torch.zeros(2, 19, 2, 16)}, ValueError, "v_cache: got shape"),
        ({"k_cache": torch.zeros(1, 20, 2, 16), "v_cache": torch.zeros(1, 20, 2, 16)}, ValueError, "k_cache: got shape .* 2 caches or more"),
        ({"k": None}, ValueError, "k: got None with v"),
        ({"k": NEW.half()}, TypeError, "k: got torch.float16"),
        ({"v": NEW[..., :8]}, ValueError, "v: got shape"),
        ({"v": NEW[:, :2]}, ValueError, "k: got shape .* as many rows"),
        ({"cache_seqlens": None}, ValueError, "cache_seqlens: got None with k"),
        ({"cache_seqlens": 4.0}, TypeError, "cache_seqlens: got 4.0"),
        ({"cache_seqlens": 18}, ValueError, "cache_seqlens: got 18 keys and 3 new ones"),
        ({"cache_seqlens": -1}, ValueError, "cache_seqlens: got -1; wanted 0 or more"),
        ({"cache_seqlens": 2**70}, ValueError, "cache_seqlens: got 11805"),
        ({"window_size": (2**63, 0)}, ValueError, "window_size: got"),
        ({"cu_seqlens_q": torch.tensor([0.0, 3, 6]), "q": X.flatten(0, 1)}, TypeError, "cu_seqlens_q: got torch.float32"),
        ({"cu_seqlens_q": torch.zeros(0, dtype=torch.int32), "q": X.flatten(0, 1)}, ValueError, "cu_seqlens_q: got|k: got"),
        ({"block_table": torch.zeros(2, 1)}, TypeError, "block_table: got torch.float32"),
        ({"cache_seqlens": torch.tensor([4])}, ValueError, r"cache_seqlens: got torch.int64 \[1\]; wanted"),
        ({"cache_seqlens": torch.tensor([4.0, 4.0])}, ValueError, "cache_seqlens: got torch.float32"),
        ({"cache_batch_idx": torch.tensor([0, 2])}, ValueError, "cache_batch_idx: got"),
        ({"cache_batch_idx": torch.tensor([0, 0])}, ValueError, "cache_batch_idx: got"),
        ({"cache_batch_idx": INDEX, "block_table": INDEX[:, None]}, ValueError, "cache_batch_idx: got a tensor with block_table"),
        ({"page_table": INDEX[:, None], "block_table": INDEX[:, None]}, ValueError, "page_table: got a tensor with block_table"),
        ({"block_table": INDEX}, ValueError, "block_table: got shape"),
        ({"block_table": torch.tensor([[7], [1]])}, ValueError, "block_table: got"),
        ({"cache_leftpad": torch.tensor([0])}, ValueError, "cache_leftpad: got"),
        ({"rotary_cos": torch.zeros(30, 4)}, ValueError, "rotary_sin: got None with rotary_cos"),
        ({"rotary_cos": torch.zeros(30, 9), "rotary_sin": torch.zeros(30, 9)}, ValueError, "rotary_cos: got shape"),
        ({"rotary_cos": torch.zeros(30, 4), "rotary_sin": torch.zeros(30, 3)}, ValueError, "rotary_sin: got shape"),
        ({"rotary_cos": torch.zeros(6, 4), "rotary_sin": torch.zeros(6, 4)}, ValueError, "rotary_cos: got 6 positions; wanted those of 4 to 6"),
        ({"k": None, "v": None, "rotary_cos": X[0, :, 0], "rotary_sin": X[0, :, 0]}, ValueError, "rotary_cos: got a tensor without k"),
        ({"rotary_seqlens": INDEX}, ValueError, "rotary_seqlens: got a tensor without rotary_cos"),
        ({"rotary_interleaved": None}, TypeError, "rotary_interleaved: got None"),
        ({"alibi_slopes": torch.zeros(3)}, ValueError, "alibi_slopes: got shape"),
        ({"s_aux": torch.zeros(4, dtype=torch.float64)}, TypeError, "s_aux: got torch.float64"),
        ({"cu_seqlens_k_new": INDEX}, ValueError, "k: got shape"),
        ({"num_splits": None}, TypeError, "num_splits: got None"),
        ({"qv": X}, NotImplementedError, "qv: got"),
        ({"attention_chunk": 4}, NotImplementedError, "attention_chunk: got 4"),
    ],
)
def test_bad_input_writes_nothing(change, error, message):
    flash_attn_with_kvcache(**CALL)  # its checks are not made again
    call = CALL | {name: CALL[name].clone() for name in ("k_cache", "v_cache")} | {"k": NEW + 1, "v": NEW + 1} | change
    with pytest.raises(error, match=message):
        flash_attn_with_kvcache(**call)
    for name in ("k_cache", "v_cache"):
        assert call[name] is None or (call[name] == 0).all()


def test_signature():
    parameters = inspect.signature(flash_attn_with_kvcache).parameters.values()
    positional = [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert {p.name: p.default for p in positional[3:]} == {
        **dict.fromkeys(("k", "v", "rotary_cos", "rotary_sin", "cache_seqlens", "cache_batch_idx", "cache_leftpad", "block_table")),
        "softmax_scale": None,
        "causal": False,
        "window_size": (-1, -1),
        "softcap": 0.0,
        "rotary_interleaved": True,
        "alibi_slopes": None,
        "num_splits": 0,
        "return_softmax_lse": False,
    }
    names = "q k_cache v_cache k v rotary_cos rotary_sin cache_seqlens cache_batch_idx cache_leftpad block_table softmax_scale causal"
    names += " window_size softcap rotary_interleaved alibi_slopes num_splits return_softmax_lse"
    assert [p.name for p in positional] == names.split()
