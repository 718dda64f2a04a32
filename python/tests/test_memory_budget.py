"""Dropout in compiled training that computes its activations again in the backward: one mask in both."""

from functools import partial
from types import SimpleNamespace

import pytest
import rapt.torch
import rapt.transformers
import torch
from torch._functorch import config
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

PARTITIONED = "aot_eager_decomp_partition"  # with inductor's partitioner, and nothing generated


def sdpa(q, k, v):
    return rapt.torch.scaled_dot_product_attention(q, k, v, dropout_p=0.5)


LAYER = SimpleNamespace(is_causal=False)


def softcapped(q, k, v):
    return rapt.transformers._attention_forward(LAYER, q, k, v, None, dropout=0.5, softcap=3.0)[0].transpose(1, 2)


def plain(function, *inputs):
    return function(*inputs)


def checkpointed(function, *inputs):
    return checkpoint(function, *inputs, use_reentrant=False)


def region(function, *inputs):
    with torch.autograd.graph.region_activation_memory_budget(0.01):
        return function(*inputs)


def check(attention, around, backend):
    """What two layers give is linear in v: the gradient is the difference of two results, with the masks of the forward."""

    def layer(q, k, v, w):
        return attention(torch.sin(q @ w), torch.cos(k @ w), v @ w)

    def model(q, k, v, w):
        for _ in range(2):
            v = around(layer, q, k, v, w)
        return v

    torch.manual_seed(0)
    q, k, v, step = torch.randn(4, 1, 2, 16, 8)
    v.requires_grad_()
    w = (torch.randn(8, 8) / 3).requires_grad_()
    run = torch.compile(model, backend=backend, fullgraph=True)

    def of(v):
        torch.manual_seed(3)
        return run(q, k, v, w)

    out = of(v)
    torch.manual_seed(4)
    (gradient,) = torch.autograd.grad(out.sum(), v)
    wanted = (of((v + step).detach().requires_grad_()).double() - out.double()).sum()
    got = (gradient.double() * step).sum()
    assert abs(wanted) > 0.1 and abs(got - wanted) < 1e-4 * abs(wanted) + 1e-4


@pytest.mark.parametrize("around", (plain, checkpointed))
@pytest.mark.parametrize("budget", (1, 0.5, 0.1, 0))
def test_the_backward_has_the_mask_of_the_forward(budget, around):
    with config.patch(activation_memory_budget=budget):
        check(sdpa, around, PARTITIONED)


@pytest.mark.parametrize("budget", (0.1, 0))
def test_attention_of_models(budget):
    with config.patch(activation_memory_budget=budget):
        check(softcapped, plain, PARTITIONED)


@pytest.mark.parametrize("budget", (0.1, 0))
def test_with_inductor(budget):
    with config.patch(activation_memory_budget=budget):
        check(sdpa, checkpointed, "inductor")


def test_a_budget_of_a_region():
    check(sdpa, region, PARTITIONED)


def test_a_region_that_saves_nothing_is_refused():
    @torch.compile(backend=PARTITIONED, fullgraph=True)
    def run(q):
        with torch.autograd.graph.region_activation_memory_budget(0):
            return sdpa(q, q, q)

    with pytest.raises(Exception, match=r"dropout_p: got dropout in region_activation_memory_budget\(0\)"):
        run(torch.randn(1, 2, 16, 8, requires_grad=True))


def test_a_selective_policy_does_not_lose_the_seed():
    """In eager mode, too, and where the generator's state is not kept."""
    policy = partial(create_selective_checkpoint_contexts, lambda *_, **__: CheckpointPolicy.MUST_RECOMPUTE)
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 16, 8)
    v.requires_grad_()
    out = checkpoint(sdpa, q, k, v, use_reentrant=False, context_fn=policy, preserve_rng_state=False)
    (gradient,) = torch.autograd.grad(out.sum(), v)
    torch.testing.assert_close((gradient * v).sum(), out.sum(), rtol=1e-4, atol=1e-4)
