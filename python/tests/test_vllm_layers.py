"""rapt.vllm's classes and operators against vLLM's own, call by call. They need vLLM, but no engine."""

import concurrent.futures
import threading
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed")
import vllm._custom_ops as ops  # noqa: E402
from vllm.distributed import parallel_state  # noqa: E402
from vllm.v1.attention.backends import cpu_attn  # noqa: E402
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl, CPUAttentionMetadata, _get_attn_isa  # noqa: E402
from vllm.v1.attention.backends.mla.prefill.cpu_sdpa import CPUSDPAMLAPrefillBackend  # noqa: E402

from rapt import _vllm_attention, _vllm_delta_rule, _vllm_mla, _vllm_shards  # noqa: E402

PAGE, HQ, HK, D = 32, 8, 2, 64
NEW, PAST = [40, 1, 1, 7], [0, 69, 3, 90]  # a prompt, two tokens to decode, a chunk of a prompt


def layer_of(kind, **features):
    """An object of the backend's class with what a layer has, without an engine's configuration."""
    impl = object.__new__(kind)
    plain = {"sliding_window": -1, "alibi_slopes": None, "logits_soft_cap": 0, "sinks": None, "attn_type": "decoder"}
    shared = {"scale": D**-0.5, "head_size": D, "kv_cache_dtype": "auto", "kv_sharing_target_layer_name": None}
    impl.__dict__.update(plain | shared | {"use_zentorch_sdpa": False, "num_kv_heads": HK, "_cache": None, "_scales": {}} | features)
    return impl


def batch(dtype, causal=True, window=-1):
    """Metadata, the caches' shape, slots of past and new tokens, and random tensors."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.tensor([a + b for a, b in zip(NEW, PAST)], dtype=torch.int32)
    borders = torch.tensor([0, *NEW]).cumsum(0).int()
    pages = [-(-n // PAGE) for n in lengths.tolist()]
    ids = torch.randperm(sum(pages) + 2, generator=generator).int()
    table, used = torch.zeros(len(NEW), max(pages), dtype=torch.int32), 0
    for i, n in enumerate(pages):
        table[i, :n], used = ids[used : used + n], used + n
    places = [(i, j) for i, n in enumerate(PAST) for j in range(n)], [(i, PAST[i] + j) for i, n in enumerate(NEW) for j in range(n)]
    past, new = (torch.tensor([int(table[i, j // PAGE]) * PAGE + j % PAGE for i, j in group]) for group in places)
    isa = _get_attn_isa(dtype, PAGE, D)
    schedule = ops.cpu_attn_get_scheduler_metadata(
        num_reqs=len(NEW),
        num_heads=HQ,
        num_kv_heads=HK,
        head_dim=D,
        seq_lens=lengths,
        dtype=dtype,
        query_start_loc=borders,
        causal=causal,
        sliding_window_size=window,
        isa=isa,
        enable_kv_split=True,
    )
    given = (sum(NEW), max(NEW), borders, int(lengths.max()), lengths, table, new, schedule, causal)

    def random(*shape):
        return torch.randn(shape, generator=generator).to(dtype)

    return SimpleNamespace(given=given, cache=(len(ids), HK, PAGE, 2 * D), past=past, isa=isa, random=random)


def run(kind, made, features, key, value, query, cache, scales=(1.0, 1.0)):
    layer = SimpleNamespace(isa=made.isa, _k_scale_float=scales[0], _v_scale_float=scales[1])
    impl = layer_of(kind, **features)
    old, n = made.past.numel(), sum(NEW)
    out = torch.full((n + 3, HQ, D), 7.0, dtype=query.dtype)  # vLLM pads batches: rows that nobody writes
    if kind is CPUAttentionBackendImpl:
        impl.do_kv_cache_update(layer, key[:old], value[:old], cache, made.past)
        impl.do_kv_cache_update(layer, key[old:], value[old:], cache, made.given[6])
        impl.forward(layer, query, key[old:], value[old:], cache, CPUAttentionMetadata(*made.given), out)
    else:
        keys, values = impl._pages(cache)
        _vllm_attention.Places.of(made.past, PAGE).write(key[:old], value[:old], keys, values, **impl._codes(layer))
        impl.forward(layer, query, key[old:], value[old:], cache, _vllm_attention.Metadata(*made.given), out)
    assert (out[n:] == 7).all()
    return out[:n]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "features",
    [
        {},
        {"sliding_window": 16},
        {"logits_soft_cap": 5.0},
        {"alibi_slopes": torch.tensor([2.0**-i for i in range(1, HQ + 1)])},
        {"sinks": torch.linspace(-1, 3, HQ)},
    ],
    ids=["plain", "window", "softcap", "alibi", "sinks"],
)
def test_attention(dtype, features):
    made = batch(dtype, window=features.get("sliding_window", -1))
    total = made.past.numel() + sum(NEW)
    key, value, query = made.random(total, HK, D), made.random(total, HK, D), made.random(sum(NEW) + 3, HQ, D)
    caches = torch.zeros(made.cache, dtype=dtype), torch.zeros(made.cache, dtype=dtype)
    theirs = run(CPUAttentionBackendImpl, made, features, key, value, query, caches[0])
    ours = run(_vllm_attention.Impl, made, features, key, value, query, caches[1])
    bound = 2e-5 if dtype is torch.float32 else 2e-2
    torch.testing.assert_close(ours.float(), theirs.float(), rtol=bound, atol=bound)


def test_rows_without_a_slot_are_not_written():
    cache = torch.zeros(3, HK, PAGE, 2 * D)
    keys, values = layer_of(_vllm_attention.Impl)._pages(cache)
    new = torch.ones(4, HK, D)
    _vllm_attention.Places.of(torch.tensor([PAGE + 3, -1, 5, -1]), PAGE).write(new, 2 * new, keys, values)
    assert keys.sum() == 2 * HK * D and values.sum() == 4 * HK * D
    assert (keys[1, :, 3] == 1).all() and (values[0, :, 5] == 2).all()


@pytest.mark.parametrize(
    "name, dtype, scales",
    [
        ("fp8", torch.float8_e4m3fn, (1.0, 1.0)),
        ("fp8_e4m3", torch.float8_e4m3fn, (0.5, 0.0625)),
        ("fp8_e5m2", torch.float8_e5m2, (1.0, 2.0)),
    ],
)
def test_quantised_cache(name, dtype, scales):
    """Against keys and values that PyTorch has rounded to nearest: vLLM's own kernels round towards zero."""
    made = batch(torch.float32)
    total = made.past.numel() + sum(NEW)
    key, value, query = made.random(total, HK, D), made.random(total, HK, D), made.random(sum(NEW) + 3, HQ, D)
    codes = torch.zeros(made.cache, dtype=torch.uint8)
    ours = run(_vllm_attention.Impl, made, {"kv_cache_dtype": name}, key, value, query, codes, scales)
    key, value = ((x / scale).to(dtype).float() * scale for x, scale in zip((key, value), scales))
    wanted = run(_vllm_attention.Impl, made, {}, key, value, query, torch.zeros(made.cache))
    torch.testing.assert_close(ours, wanted, rtol=1e-5, atol=1e-5)


def test_cache_of_another_float_type():
    """A cache of bfloat16 (kv_cache_dtype="bfloat16") for a model of float32."""
    made = batch(torch.float32)
    total = made.past.numel() + sum(NEW)
    key, value, query = made.random(total, HK, D), made.random(total, HK, D), made.random(sum(NEW) + 3, HQ, D)
    key, value = key.bfloat16().float(), value.bfloat16().float()
    caches = (torch.zeros(made.cache, dtype=dtype) for dtype in (torch.float32, torch.bfloat16))
    outs = [run(_vllm_attention.Impl, made, {}, key, value, query, cache) for cache in caches]
    torch.testing.assert_close(outs[1], outs[0], rtol=1e-5, atol=1e-5)


def impl_of(monkeypatch, kv_cache_dtype="auto", ranks=1, **features):
    """A layer that is made as vLLM makes it."""
    config = SimpleNamespace(
        model_config=SimpleNamespace(dtype=torch.float32), parallel_config=SimpleNamespace(decode_context_parallel_size=ranks)
    )
    for module in (cpu_attn, _vllm_shards):
        monkeypatch.setattr(module, "get_current_vllm_config", lambda: config)
    monkeypatch.setattr(parallel_state, "get_dcp_world_size_and_rank", lambda enabled: (ranks, 0))
    given = {"num_heads": HQ, "head_size": D, "scale": 0.1, "num_kv_heads": 1, "alibi_slopes": None, "sliding_window": None}
    return _vllm_attention.Impl(**(given | {"kv_cache_dtype": kv_cache_dtype} | features))


def test_refusals(monkeypatch):
    with pytest.raises(ValueError, match="kv_cache_dtype: got 'nvfp4'; wanted one of auto, float16, bfloat16, fp8, fp8_e4m3, fp8_e5m2"):
        impl_of(monkeypatch, kv_cache_dtype="nvfp4")
    names = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "qk_head_dim", "v_head_dim", "kv_b_proj")
    with pytest.raises(ValueError, match="kv_cache_dtype: got 'fp8'; wanted auto for multi-head latent attention"):
        _vllm_mla.Impl(4, 576, 0.1, 1, None, None, "fp8", None, "decoder", None, **dict.fromkeys(names))
    assert impl_of(monkeypatch, ranks=2).need_to_return_lse_for_decode
    refused = {
        "a sliding window": {"sliding_window": 16},
        "ALiBi": {"alibi_slopes": [0.5] * HQ},
        "attention of the type encoder_decoder": {"attn_type": "encoder_decoder"},
        "2 KV heads on a rank": {"num_kv_heads": 2},
        "another layer's cache": {"kv_sharing_target_layer_name": "model.layers.0"},
    }
    for what, features in refused.items():
        with pytest.raises(ValueError, match=f"decode_context_parallel_size: got 2; wanted 1, because a layer has {what}"):
            impl_of(monkeypatch, ranks=2, **features)


def test_slots_of_shared_keys():
    """Of the tokens 3 to 9 of one sequence and 0 to 2 of another, pages of 4 rows, and two ranks that have two keys in turn."""
    positions, borders, table = torch.tensor([*range(3, 10), 0, 1, 2]), torch.tensor([0, 7, 10]), torch.tensor([[5, 1], [2, 7]])
    first = _vllm_shards.slots(positions, borders, table, 4, 2, 0, 2)
    second = _vllm_shards.slots(positions, borders, table, 4, 2, 1, 2)
    assert first.tolist() == [-1, 22, 23, -1, -1, 4, 5, 8, 9, -1]
    assert second.tolist() == [21, -1, -1, 22, 23, -1, -1, -1, -1, 8]


class Ranks:
    """Ranks of a group that are threads of this process."""

    def __init__(self, size):
        self.world_size, self.slots = size, [None] * size
        self.barrier, self.own = threading.Barrier(size, timeout=60), threading.local()

    @property
    def rank_in_group(self):
        return self.own.rank

    @property
    def device_group(self):
        return self

    def all_gather(self, tensor, dim):
        self.slots[self.rank_in_group] = tensor
        self.barrier.wait()
        made = torch.cat(self.slots, dim)
        self.barrier.wait()
        return made

    def all_to_all_single(self, received, sent, group):
        received.copy_(self.all_gather(sent[:, None], 1)[self.rank_in_group])

    def run(self, function):
        def one(rank):
            self.own.rank = rank
            try:
                return function(rank)
            except BaseException:
                self.barrier.abort()
                raise

        with concurrent.futures.ThreadPoolExecutor(self.world_size) as pool:
            return list(pool.map(one, range(self.world_size)))


@pytest.mark.parametrize("exchange", ["ag_rs", "a2a"])
@pytest.mark.parametrize(
    "new, past, features, interleave",
    [
        ([1, 1, 1, 1], [0, 70, 1, 90], {}, 1),  # decode: also of keys that one rank has alone
        ([1, 1, 1], [33, 70, 1], {"sinks": torch.linspace(-1, 3, HQ)}, 1),
        ([40, 3], [0, 0], {}, 1),  # prompts: no rank has to ask another one
        ([40, 1, 7, 1], [0, 69, 90, 2], {"logits_soft_cap": 5.0}, 4),
    ],
)
def test_decode_context_parallelism(monkeypatch, exchange, new, past, features, interleave):
    """Two ranks, each with half of the query heads and half of the keys, against one that has all."""
    size = 2
    ranks = Ranks(size)
    monkeypatch.setattr(_vllm_shards, "get_dcp_group", lambda: ranks)
    monkeypatch.setattr(_vllm_shards, "dist", ranks)
    generator = torch.Generator().manual_seed(0)
    lengths, borders = torch.tensor(new) + torch.tensor(past), torch.tensor([0, *new]).cumsum(0).int()
    n, pages = sum(new), 4
    query, keys, values = (torch.randn(int(lengths.sum()), h, D, generator=generator) for h in (HQ, 1, 1))
    starts = lengths.cumsum(0) - lengths
    rows = torch.cat([torch.arange(a + p, a + p + m) for a, p, m in zip(starts.tolist(), past, new)])
    table = torch.randperm(pages * len(new), generator=generator).int().view(-1, pages)

    def step(rank, size, heads):
        def places(begin, end):
            positions = torch.cat([torch.arange(a, b) for a, b in zip(begin, end)])
            borders = torch.tensor([0, *(b - a for a, b in zip(begin, end))]).cumsum(0)
            return _vllm_shards.slots(positions, borders, table, PAGE, size, rank, interleave)

        own = {name: x[heads] if isinstance(x, torch.Tensor) else x for name, x in features.items()}
        impl = layer_of(_vllm_attention.Impl, num_kv_heads=1, **own)
        cache = torch.zeros(table.numel(), 1, PAGE, 2 * D)
        old = torch.cat([torch.arange(a, a + p) for a, p in zip(starts.tolist(), past)])
        _vllm_attention.Places.of(places([0] * len(past), past), PAGE).write(keys[old], values[old], *impl._pages(cache))
        given = SimpleNamespace(num_reqs=len(new), seq_lens=lengths.int(), query_start_loc=borders, causal=True)
        config = {"decode_context_parallel_size": size, "cp_kv_cache_interleave_size": interleave, "dcp_comm_backend": exchange}
        m = _vllm_attention.Metadata(n, max(new), borders, int(lengths.max()), lengths.int(), table, places(past, lengths.tolist()), None)
        m.shares = _vllm_shards.Shares.of(given, SimpleNamespace(**config))
        out = torch.full((n, query[:, heads].shape[1], D), 7.0)
        return impl.forward(None, query[rows][:, heads], keys[rows], values[rows], cache, m, out)

    wanted = step(0, 1, slice(None))
    half = HQ // size
    got = ranks.run(lambda rank: step(rank, size, slice(rank * half, (rank + 1) * half)))
    torch.testing.assert_close(torch.cat(got, 1), wanted, rtol=1e-5, atol=1e-5)


def test_sequences_that_are_causal_or_not():
    made = batch(torch.float32)
    total = made.past.numel() + sum(NEW)
    key, value, query = made.random(total, HK, D), made.random(total, HK, D), made.random(sum(NEW) + 3, HQ, D)
    outs = []
    for causal, dynamic in ((True, None), (False, None), (False, torch.tensor([True, False, True, False]))):
        one = SimpleNamespace(**vars(made))
        one.given = (*made.given[:8], causal, dynamic)
        outs.append(run(_vllm_attention.Impl, one, {}, key, value, query, torch.zeros(made.cache)))
    causal, full, mixed = outs
    assert not torch.equal(causal, full)
    for i, (begin, end) in enumerate(zip([0, 40, 41, 42], [40, 41, 42, 49])):
        torch.testing.assert_close(mixed[begin:end], (full if i % 2 else causal)[begin:end], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("window", [-1, 8])
def test_encoder(window):
    """Keys of the batch itself, in both directions, without a cache."""
    made = batch(torch.float32, causal=False)
    n = sum(NEW)
    query, key, value = made.random(n, HQ, D), made.random(n, HK, D), made.random(n, HK, D)
    impl, out = layer_of(_vllm_attention.Impl, attn_type="encoder_only", sliding_window=window), torch.empty(n, HQ, D)
    impl.forward(None, query, key, value, None, _vllm_attention.Metadata(*made.given), out)
    begin = 0
    for rows in NEW:
        q, k, v = (x[begin : begin + rows].transpose(0, 1) for x in (query, key, value))
        place = torch.arange(rows)
        mask = (place[:, None] - place).abs() < window if window > 0 else None
        wanted = torch.nn.functional.scaled_dot_product_attention(q[None], k[None], v[None], mask, enable_gqa=True)[0]
        torch.testing.assert_close(out[begin : begin + rows], wanted.transpose(0, 1), rtol=1e-5, atol=1e-5)
        begin += rows


def test_cross_attention():
    """Keys of an encoder: written in the first step, read in the next one, which has none."""
    generator = torch.Generator().manual_seed(0)
    lengths, new = [37, 5], [3, 1]
    key, value, query = (torch.randn(n, h, D, generator=generator) for n, h in ((42, HK), (42, HK), (4, HQ)))
    table = torch.tensor([[3, 0], [2, 1]], dtype=torch.int32)
    slots = torch.cat([table[i, torch.arange(n) // PAGE].long() * PAGE + torch.arange(n) % PAGE for i, n in enumerate(lengths)])
    impl, cache = layer_of(_vllm_attention.Impl, attn_type="encoder_decoder"), torch.zeros(4, HK, PAGE, 2 * D)
    borders, seq_lens = torch.tensor([0, *new]).cumsum(0).int(), torch.tensor(lengths, dtype=torch.int32)
    for keys, values, places in ((key, value, slots), (None, None, slots[:0])):
        m = _vllm_attention.Metadata(4, 3, borders, 37, seq_lens, table, places, None, causal=False)
        out = impl.forward(None, query, keys, values, cache, m, torch.empty(4, HQ, D))
        for rows, those in ((slice(0, 3), slice(0, 37)), (slice(3, 4), slice(37, 42))):
            q, k, v = (x.transpose(0, 1)[None] for x in (query[rows], key[those], value[those]))
            wanted = torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)[0].transpose(0, 1)
            torch.testing.assert_close(out[rows], wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("lse", [False, True])
def test_mla_prefill(lse):
    lengths = torch.tensor([0, 19, 20, 60], dtype=torch.int32)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(60, 4, size, generator=generator) for size in (96, 96, 48))
    chunk = SimpleNamespace(query_start_loc=lengths, cu_seq_lens=torch.tensor([0, 5, 5, 60], dtype=torch.int32))
    results = []
    for kind in (CPUSDPAMLAPrefillBackend, _vllm_mla.PrefillBackend):
        backend = object.__new__(kind)
        backend.scale, backend._prefill_metadata = 0.1, SimpleNamespace(query_start_loc=lengths)
        new = backend.run_prefill_new_tokens(q, k, v, lse)
        results.append([*(new if lse else [new]), *backend.run_prefill_context_chunk(chunk, q, k, v)])
    theirs, ours = results
    theirs[-2][19:20] = 0  # one sequence has no keys in that chunk, and vLLM's own gives NaN there
    for a, b in zip(ours, theirs):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_mla_cache_and_decode():
    rank, rope, heads, page = 512, 64, 4, 16
    generator = torch.Generator().manual_seed(0)
    latent, rotary = torch.randn(90, rank, generator=generator), torch.randn(90, 1, rope, generator=generator)
    slots = torch.randperm(8 * page, generator=generator)[:90]
    slots[3] = -1
    cache, wanted = torch.zeros(8, page, rank + rope), torch.zeros(8 * page, rank + rope)
    impl = object.__new__(_vllm_mla.Impl)
    impl.kv_lora_rank, impl.scale = rank, 0.05
    impl.do_kv_cache_update(latent, rotary, cache, slots, "auto", torch.ones(1))
    there = slots >= 0
    wanted[slots[there]] = torch.cat((latent, rotary[:, 0]), -1)[there]
    assert torch.equal(cache.view(8 * page, -1), wanted)
    table, lengths = torch.tensor([[3, 1], [5, 0]], dtype=torch.int32), torch.tensor([20, 9], dtype=torch.int32)
    q = torch.randn(2, heads, rank + rope, generator=generator)
    decode = SimpleNamespace(decode=SimpleNamespace(block_table=table, seq_lens=lengths))
    out, lse = impl.forward_mqa((q[..., :rank], q[..., rank:]), cache, decode, None)
    theirs = torch.zeros(2, heads, rank)
    ops.mla_decode_kvcache_cpu(theirs, q, cache, 0.05, table, lengths)
    assert lse is None
    torch.testing.assert_close(out, theirs, rtol=1e-5, atol=1e-5)


def delta_rule_inputs(tokens):
    generator = torch.Generator().manual_seed(0)
    hk, hv, size = 2, 4, 64
    mixed = torch.randn(1, tokens, (2 * hk + hv) * size, generator=generator).bfloat16()  # q, k and v are views of one tensor
    q, k, v = (x.unflatten(-1, (-1, size)) for x in mixed.split([hk * size, hk * size, hv * size], -1))
    a, b = (torch.randn(tokens, hv, generator=generator).bfloat16() for _ in range(2))
    return q, k, v, a, b, torch.rand(hv, generator=generator), torch.randn(5, hv, size, size, generator=generator)


def test_delta_rule_decode():
    q, k, v, a, b, a_log, pool = delta_rule_inputs(3)
    slots, borders = torch.tensor([4, 0, 2], dtype=torch.int32), torch.arange(4, dtype=torch.int32)
    given = (a_log, torch.ones(4).bfloat16(), q, k, v, a, b)
    states = pool.clone(), pool.clone()
    theirs = _vllm_delta_rule._recurrent(*given, states[0], slots, borders, True)
    ours = _vllm_delta_rule.recurrent(*given, states[1], slots, borders, True)
    assert ours.shape == theirs.shape
    torch.testing.assert_close(ours.float(), theirs.float(), rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(states[1], states[0], rtol=1e-2, atol=1e-2)


def test_delta_rule_drafts():
    """Two sequences with drafts of 3 and 2 tokens, of which 2 and 1 had been accepted before."""
    q, k, v, a, b, a_log, _ = delta_rule_inputs(5)
    pool = torch.randn(8, 4, 64, 64, generator=torch.Generator().manual_seed(1))
    slots = torch.tensor([[1, 4, 6], [0, 3, 7]], dtype=torch.int32)
    accepted, borders = torch.tensor([2, 1], dtype=torch.int32), torch.tensor([0, 3, 5], dtype=torch.int32)
    given = (a_log, torch.ones(4).bfloat16(), q[0], k[0], v[0], a, b)
    states = pool.clone(), pool.clone()
    theirs = _vllm_delta_rule._speculative(*given, states[0], slots, accepted, borders, True)
    ours = _vllm_delta_rule.speculative(*given, states[1], slots, accepted, borders, True)
    assert ours.shape == theirs.shape
    torch.testing.assert_close(ours.float(), theirs.float(), rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(states[1], states[0], rtol=1e-2, atol=1e-2)


def test_delta_rule_prefill():
    q, k, v, a, b, a_log, pool = delta_rule_inputs(83)
    slots, borders = torch.tensor([4, 2], dtype=torch.int32), torch.tensor([0, 70, 83], dtype=torch.int32)
    g, beta = ops.fused_gdn_gating_cpu(A_log=a_log - 2, a=a, b=b, dt_bias=torch.ones(4).bfloat16())
    pool[2] = 0
    states = pool.clone(), pool.clone()
    rest = (True, borders, False, True, slots)
    theirs, _ = _vllm_delta_rule._chunk(q, k, v, g, beta, states[0], *rest)
    ours, _ = _vllm_delta_rule.chunk(q, k, v, g, beta, states[1], *rest)
    assert ours.shape == theirs.shape
    torch.testing.assert_close(ours.float(), theirs.float(), rtol=5e-2, atol=5e-2)
    torch.testing.assert_close(states[1], states[0], rtol=5e-2, atol=5e-2)
