"""FlopCounterMode counts rapt's operators: the numbers of PyTorch's formulas, and of plain products of matrices."""

from types import SimpleNamespace

import pytest
import rapt.mla
import rapt.torch
import rapt.transformers
import torch
from delta_rule_torch_cases import draw
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count


def counts(function, *tensors, backward=True):
    """Of a forward without gradients, and of one with its backward."""
    with torch.no_grad(), FlopCounterMode(display=False) as forward:
        function(*tensors)
    leaves = [x.detach().requires_grad_() if x.is_floating_point() else x for x in tensors]
    if not backward:
        return forward.get_total_flops(), None
    with FlopCounterMode(display=False) as both:
        made = function(*leaves)
        (made[0] if isinstance(made, tuple) else made).sum().backward()
    return forward.get_total_flops(), both.get_total_flops() - forward.get_total_flops()


def test_the_numbers_of_pytorch():
    x = torch.randn(1, 12, 64, 64)
    assert counts(rapt.torch.scaled_dot_product_attention, x, x, x) == (12_582_912, 31_457_280)


@pytest.mark.parametrize("hk", (4, 2, 1))
def test_scaled_dot_product_attention(hk):
    q, k, v = torch.randn(2, 4, 7, 16), torch.randn(2, hk, 9, 16), torch.randn(2, hk, 9, 24)
    wanted = sdpa_flop_count(q.shape, k.shape, v.shape), sdpa_backward_flop_count((2, 4, 7, 24), q.shape, k.shape, v.shape)
    assert wanted == (2 * 2 * 4 * 7 * 9 * 40, 2 * 2 * 4 * 7 * 9 * (3 * 16 + 2 * 24))
    mask = torch.ones(7, 9, dtype=torch.bool).tril()
    for options in ({}, {"is_causal": True}, {"attn_mask": mask}, {"dropout_p": 0.5}):
        call = lambda q, k, v: rapt.torch.scaled_dot_product_attention(q, k, v, enable_gqa=True, **options)  # noqa: B023, E731
        assert counts(call, q, k, v) == wanted
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        call = lambda q, k, v: torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)  # noqa: E731
        forward, backward = counts(call, q, k, v)
    assert forward == wanted[0] and backward == wanted[1] - 2 * 2 * 4 * 7 * 9 * 16  # it keeps its scores


def test_what_broadcasts_and_what_has_few_dimensions():
    q, k = torch.randn(3, 2, 4, 7, 16), torch.randn(1, 2, 4, 9, 16)
    assert counts(rapt.torch.scaled_dot_product_attention, q, k, k) == (2 * 24 * 7 * 9 * 32, 2 * 24 * 7 * 9 * 80)
    assert counts(rapt.torch.scaled_dot_product_attention, q[0, 0, 0], k[0, 0, 0], k[0, 0, 0])[0] == 2 * 7 * 9 * 32


def test_checkpointing_adds_a_forward():
    x = torch.randn(1, 12, 64, 64, requires_grad=True)
    with FlopCounterMode(display=False) as mode:
        run = rapt.torch.scaled_dot_product_attention
        torch.utils.checkpoint.checkpoint(run, x, x, x, use_reentrant=False).sum().backward()
    assert mode.get_total_flops() == 12_582_912 * 4.5


def test_attention_of_models():
    layer, sinks = SimpleNamespace(is_causal=True), torch.randn(4)
    q, k, v = torch.randn(2, 4, 7, 16), torch.randn(2, 2, 9, 16), torch.randn(2, 2, 9, 24)
    call = lambda *t: rapt.transformers._attention_forward(layer, *t[:3], None, softcap=5.0, s_aux=t[3])[0]  # noqa: E731
    assert counts(call, q, k, v, sinks) == (2 * 56 * 9 * 40, 2 * 56 * 9 * 96)
    plain = lambda *t: rapt.transformers._attention_forward(layer, *t, None)[0]  # noqa: E731
    assert counts(plain, q[:, :, :1], k, v)[0] == 2 * 8 * 9 * 40


def test_latent_attention():
    b, sq, sk, h, n, r, c, v = 2, 5, 9, 3, 8, 4, 16, 6
    tensors = [torch.randn(s) for s in ((b, sq, h, n), (b, sq, h, r), (b, sk, c + r), (h, n, c), (h, v, c))]
    into, out_of, row = 2 * b * sq * h * n * c, 2 * b * sq * h * v * c, 2 * b * sq * h

    def call(**options):
        return lambda *t: rapt.mla.attention(*t, **options)

    absorbed = into + out_of + row * sk * (c + r + c), 2 * (into + out_of) + row * sk * (3 * (c + r) + 2 * c)
    assert counts(call(form="absorbed"), *tensors) == absorbed
    expand = 2 * b * sk * h * c * (n + v)
    expanded = expand + row * sk * (n + r + v), 2 * expand + row * sk * (3 * (n + r) + 2 * v)
    assert counts(call(form="expanded", causal=True, align="bottom_right"), *tensors) == expanded
    lengths = torch.tensor([9, 4])
    some, _ = counts(call(form="absorbed", seqlens=lengths), *tensors)
    assert some == into + out_of + 2 * sq * h * (9 + 4) * (c + r + c)
    indices = torch.zeros(b, sq, 3, dtype=torch.int32)
    assert counts(call(indices=indices), *tensors)[0] == into + out_of + row * 3 * (c + r + c)
    pages = [*tensors[:2], torch.randn(6, 4, c + r), *tensors[3:]]
    table = torch.arange(6).view(2, 3)
    paged, _ = counts(call(form="absorbed", seqlens=lengths, block_table=table), *pages, backward=False)
    assert paged == some


def test_sparse_attention():
    q, k, v = torch.randn(2, 4, 7, 16), torch.randn(2, 2, 9, 16), torch.randn(2, 2, 9, 24)
    indices, tokens = torch.zeros(2, 7, 3, dtype=torch.int32), torch.full((2, 7), 2)
    call = lambda *t: rapt.torch.sparse_attention(*t, indices)  # noqa: E731
    assert counts(call, q, k, v) == (2 * 56 * 3 * 40, 2 * 56 * 3 * 96)
    counted = lambda *t: rapt.torch.sparse_attention(*t, indices, counts=tokens)  # noqa: E731
    assert counts(counted, q, k, v) == (2 * 56 * 2 * 40, 2 * 56 * 2 * 96)


def test_delta_rule():
    t = draw(b=2, t=9, hq=2, hk=2, hv=4, d=8, dv=12, state=False)
    call = lambda *given: rapt.torch.delta_rule(*given)  # noqa: E731
    token = 2 * 2 * 9 * 8 * 12  # a product with one state of each token
    assert counts(call, *t.values()) == (token * 4 * 3, token * 4 * 8)
    gated = lambda *given: rapt.torch.delta_rule(*given, rule="gated")  # noqa: E731
    assert counts(gated, *list(t.values())[:4]) == (token * 4 * 2, token * 4 * 5)
    more = draw(b=2, t=9, hq=8, hk=2, hv=4, d=8, dv=12, state=False)
    assert counts(call, *more.values()) == (token * (4 * 3 + 4), token * (4 * 8 + 2 * 4))
    states = torch.zeros(2, 4, 8, 12)
    in_place = lambda *given: rapt.torch.delta_rule(*given, final_state=states)  # noqa: E731
    assert counts(in_place, *t.values(), backward=False)[0] == token * 4 * 3


def test_the_indexer():
    q, k, w = torch.randn(2, 7, 3, 8), torch.randn(2, 9, 8), torch.randn(2, 7, 3)
    scores = lambda *t: rapt.torch.index_scores(*t, align="bottom_right")  # noqa: E731
    products = 2 * 2 * 7 * 3 * 9 * 8
    assert counts(scores, q, k, w) == (products, 3 * products)
    some = lambda *t: rapt.torch.index_topk(*t, 4, align="bottom_right", seqlens=torch.tensor([9, 5]))  # noqa: E731
    assert counts(some, q, k, w, backward=False)[0] == 2 * 7 * 3 * (9 + 5) * 8


def test_fake_tensors():
    """Lengths that cannot be read are as long as they can be."""
    with torch._subclasses.FakeTensorMode():
        q, k, w = torch.randn(2, 7, 3, 8), torch.randn(2, 9, 8), torch.randn(2, 7, 3)
        some = lambda *t: rapt.torch.index_scores(*t, align="bottom_right", seqlens=torch.tensor([9, 5]))  # noqa: E731
        assert counts(some, q, k, w, backward=False)[0] == 2 * 2 * 7 * 3 * 9 * 8
        x = torch.randn(1, 12, 64, 64)
        assert counts(rapt.torch.scaled_dot_product_attention, x, x, x, backward=False)[0] == 12_582_912


def test_every_operator_is_counted():
    """But for those that multiply no matrices, and those that tests have made in this process."""
    registry = torch.utils.flop_counter.flop_registry
    names = {name.partition("::")[2].partition(".")[0] for name in torch._C._dispatch_get_all_op_names() if name.startswith("rapt::")}
    uncounted = {name for name in names if not name.startswith("test_") and getattr(torch.ops.rapt, name) not in registry}
    assert uncounted == {"flash_append_kv", "kept_seed", "select_topk"}
