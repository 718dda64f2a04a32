"""Autocast changes no bit of what rapt computes, nor of its gradients, but in scaled_dot_product_attention, where it is PyTorch's."""

from types import SimpleNamespace

import pytest
import rapt
import rapt.mla
import rapt.torch
import rapt.transformers
import torch

B, S, SK, H = 2, 5, 9, 2


def lists(n=4, sk=SK, tokens=S):
    chosen = torch.rand(B, tokens, sk).argsort(-1)[..., :n].int()
    chosen[0, 1, 2:] = -1
    return chosen


def latents(dtype, **options):
    shapes = {"q_nope": (B, S, H, 8), "q_rope": (B, S, H, 4), "kv": (B, SK, 20), "w_uk": (H, 8, 16), "w_uv": (H, 6, 16)}
    tensors = {name: torch.randn(shape, dtype=dtype) / 2 for name, shape in shapes.items()}
    return lambda **given: rapt.mla.attention(**given, **options), tensors


def latent_pages(dtype):
    call, tensors = latents(dtype, form="expanded", seqlens=torch.tensor([9, 4]), block_table=torch.tensor([[0, 1, 2], [3, 4, 5]]))
    return call, tensors | {"kv": torch.randn(6, 3, 20, dtype=dtype)}


def flash_mla_cache(dtype):
    pages, table = torch.randn(4, 8, 1, 40, dtype=dtype), torch.arange(4, dtype=torch.int32).view(2, 2)
    lengths = torch.tensor([13, 4], dtype=torch.int32)
    q = torch.randn(B, 1, H, 40, dtype=dtype)
    return lambda **given: rapt.mla.flash_mla_with_kvcache(**given, block_table=table, cache_seqlens=lengths, head_dim_v=32), {
        "q": q,
        "k_cache": pages,
    }


def flash_mla_sparse(dtype):
    more = {"indices": lists()[0][:, None], "sm_scale": 0.2, "d_v": 32, "attn_sink": torch.randn(H)}
    tensors = {"q": torch.randn(S, H, 40, dtype=dtype), "kv": torch.randn(SK, 1, 40, dtype=dtype)}
    return lambda **given: rapt.mla.flash_mla_sparse_fwd(**given, **more), tensors


def fp8_rows(dtype):
    def call(kv_new):
        cache = torch.zeros(B, 16, 656, dtype=torch.uint8)
        rapt.mla.append_fp8_rows(kv_new, cache, torch.tensor([3, 0]))
        return cache

    return call, {"kv_new": torch.randn(B, S, 576, dtype=dtype)}


def of_delta_rule(function, decay, **options):
    def make(dtype):
        tensors = {name: torch.randn(B, S, H, 8, dtype=dtype) for name in "qkv"}
        g, beta = -torch.rand((B, S, H, 8) if decay == "channel" else (B, S, H)), torch.rand(B, S, H, dtype=dtype)
        return lambda **given: function(**given, **options), tensors | {"g": g, "beta": beta}

    return make


def index_tensors(dtype):
    return {
        "q": torch.randn(B, S, 3, 8, dtype=dtype),
        "k": torch.randn(B, SK, 8, dtype=dtype),
        "w": torch.randn(B, S, 3, dtype=torch.float32),
    }


def of_indexer(function, **options):
    return lambda dtype: (lambda **given: function(**given, **options, align="bottom_right"), index_tensors(dtype))


def select_topk(dtype):
    return lambda scores: rapt.torch.select_topk(scores, 3), {"scores": torch.randn(B, S, SK)}


def heads(dtype, hk=1):
    return {
        "q": torch.randn(B, H, S, 16, dtype=dtype),
        "k": torch.randn(B, hk, SK, 16, dtype=dtype),
        "v": torch.randn(B, hk, SK, 12, dtype=dtype),
    }


def sparse_attention(dtype):
    indices = lists()
    return lambda **given: rapt.torch.sparse_attention(**given, indices=indices), heads(dtype) | {"sinks": torch.randn(H)}


def indexer_loss(indices):
    def make(dtype):
        q, k, _ = heads(dtype).values()
        return lambda scores: rapt.torch.indexer_loss(scores, 5 * q, k, indices), {"scores": torch.randn(B, S, SK)}

    return make


def model_attention(sinks_of_rows):
    def make(dtype):
        layer, options = SimpleNamespace(is_causal=True), {"softcap": 5.0}
        sinks = torch.randn((B, H, S, 1) if sinks_of_rows else (H,))

        def call(q, k, v, sinks):
            return rapt.transformers._attention_forward(layer, q, k, v, None, s_aux=sinks, **options)[0]

        return call, heads(dtype) | {"sinks": sinks}

    return make


torch.manual_seed(0)
TRAINED = {
    "mla absorbed": lambda dtype: latents(dtype, form="absorbed", return_lse=True),
    "mla expanded": lambda dtype: latents(dtype, form="expanded", causal=True, align="bottom_right"),
    "mla expanded, lengths": lambda dtype: latents(dtype, form="expanded", seqlens=torch.tensor([9, 4])),
    "mla lists": lambda dtype: latents(dtype, indices=lists()),
    "delta_rule": of_delta_rule(rapt.torch.delta_rule, "channel", l2norm_qk=True, beta_sigmoid=True, return_state=True),
    "chunk_kda": of_delta_rule(rapt.torch.chunk_kda, "channel", use_qk_l2norm_in_kernel=True),
    "fused_recurrent_kda": of_delta_rule(rapt.torch.fused_recurrent_kda, "channel", output_final_state=True),
    "chunk_gated_delta_rule": of_delta_rule(
        rapt.torch.chunk_gated_delta_rule, "head", use_gate_in_kernel=True, A_log=torch.randn(H), dt_bias=torch.randn(H)
    ),
    "fused_recurrent_gated_delta_rule": of_delta_rule(
        rapt.torch.fused_recurrent_gated_delta_rule, "head", gk=-torch.rand(B, S, H, 8)
    ),
    "index_scores": of_indexer(rapt.torch.index_scores),
    "sparse_attention": sparse_attention,
    "indexer_loss": indexer_loss(None),
    "indexer_loss, lists": indexer_loss(lists()),
    "transformers": model_attention(False),
    "transformers, sinks of rows": model_attention(True),
}
CALLED = {
    "mla pages": latent_pages,
    "flash_mla_with_kvcache": flash_mla_cache,
    "flash_mla_sparse_fwd": flash_mla_sparse,
    "append_fp8_rows": fp8_rows,
    "index_topk": of_indexer(rapt.torch.index_topk, n=3),
    "select_topk": select_topk,
}
TYPES = [
    (torch.float16, torch.bfloat16),
    (torch.bfloat16, torch.float16),
    (torch.float32, torch.bfloat16),
    (torch.float32, torch.float16),
]


def tensors_of(made):
    return made if isinstance(made, (tuple, list)) else (made,)


def assert_same_bits(got, wanted):
    assert len(got) == len(wanted)
    for x, y in zip(got, wanted):
        assert x.dtype == y.dtype and torch.equal(x, y)


@pytest.mark.parametrize(("dtype", "autocast"), TYPES)
@pytest.mark.parametrize("name", TRAINED | CALLED)
def test_results(name, dtype, autocast):
    torch.manual_seed(0)
    call, tensors = (TRAINED | CALLED)[name](dtype)
    with torch.no_grad():
        wanted = [x for x in tensors_of(call(**tensors)) if x is not None]
        with torch.autocast("cpu", dtype=autocast):
            got = [x for x in tensors_of(call(**tensors)) if x is not None]
    assert_same_bits(got, wanted)


@pytest.mark.parametrize(("dtype", "autocast"), TYPES)
@pytest.mark.parametrize("name", TRAINED)
def test_gradients(name, dtype, autocast):
    torch.manual_seed(0)
    check_gradients(*TRAINED[name](dtype), autocast)


@pytest.mark.parametrize("name", [name for name in TRAINED if "loss" not in name])  # it runs in eager mode
def test_compiled(name):
    torch.manual_seed(0)
    dtype, autocast = TYPES[0]
    call, tensors = TRAINED[name](dtype)
    check_gradients(torch.compile(call, backend="aot_eager", fullgraph=True), tensors, autocast)


def check_gradients(call, tensors, autocast):
    def run(forward, backward):
        leaves = {name: x.clone().requires_grad_() for name, x in tensors.items()}
        with torch.autocast("cpu", dtype=autocast, enabled=forward):
            made = [x for x in tensors_of(call(**leaves)) if x is not None]
        with torch.autocast("cpu", dtype=autocast, enabled=backward):
            grads = torch.autograd.grad(made, list(leaves.values()), [torch.ones_like(x) for x in made])
        return [x.detach() for x in made] + list(grads)

    wanted = run(False, False)
    assert_same_bits(run(True, False), wanted)
    assert_same_bits(run(True, True), wanted)
