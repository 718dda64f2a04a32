"""The operators of rapt.torch.delta_rule, and torch.compile."""

import pytest
import rapt
import rapt.torch
import torch
from delta_rule_torch_cases import draw, losses
from rapt._delta_rule_torch import Options

NAMES = ("q", "k", "v", "g", "beta", "initial_state", "a_log", "dt_bias")


def test_operators():
    t = draw()
    t["initial_state"] = t["initial_state"].mT.contiguous()
    given = [t.get(name) for name in NAMES]
    options = Options("gated_delta", 0.3, True, True, False, False, None, True)
    tests = ("test_schema", "test_faketensor", "test_autograd_registration", "test_aot_dispatch_static")
    given = [x if x is None else x.requires_grad_() for x in given]
    torch.library.opcheck(torch.ops.rapt.delta_rule.default, (*given, None, True, *options), test_utils=tests)
    given = [x if x is None else x.detach() for x in given]
    out, state = torch.empty(2, 9, 4, 12), torch.empty(2, 4, 12, 8)
    in_place = (out, state, None, None, *given, None, *options)
    torch.library.opcheck(torch.ops.rapt.delta_rule_.default, in_place, test_utils=tests)
    backward = (out, None, *given, None, *options, [x is not None for x in given])
    torch.library.opcheck(torch.ops.rapt.delta_rule_backward.default, backward, test_utils=tests[:2])


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled(backend):
    t = draw()

    def step(q, k, v, g, beta, initial_state):
        out, state = rapt.torch.delta_rule(q * 2, k, v, g, beta, initial_state=initial_state, return_state=True, l2norm_qk=True)
        return out.tanh(), state + 1

    compiled = torch.compile(step, backend=backend, fullgraph=True)
    if backend == "aot_eager":  # of inductor's C++, which takes seconds a kernel, training has more kinds
        with torch.no_grad():
            for wanted, got in zip(step(**t), compiled(**t)):
                torch.testing.assert_close(got, wanted)
    *_, wanted = losses(step, t)
    *_, got = losses(compiled, t)
    for name in t:
        torch.testing.assert_close(got[name], wanted[name])


def test_compiled_training_by_flash_linear_attentions_function():
    t = draw(b=1, t=40, state=False) | {"initial_state": torch.randn(2, 4, 8, 12)}

    def step(**given):
        return rapt.torch.fused_recurrent_gated_delta_rule(
            **given | {"g": None, "gk": given["g"]}, cu_seqlens=torch.tensor([0, 15, 40]), output_final_state=True
        )

    *_, wanted = losses(step, t)
    *_, got = losses(torch.compile(step, backend="aot_eager", fullgraph=True), t)
    assert all(torch.equal(got[name], wanted[name]) for name in t)


def test_compiled_for_any_length():
    compiled = torch.compile(rapt.torch.delta_rule, backend="aot_eager", fullgraph=True, dynamic=True)
    for t in (5, 6, 11):
        tensors = draw(b=1, t=t, state=False)
        torch.testing.assert_close(compiled(**tensors), rapt.torch.delta_rule(**tensors))
        starts = torch.tensor([0, 2, t])
        torch.testing.assert_close(
            compiled(**tensors, cu_seqlens=starts), rapt.torch.delta_rule(**tensors, cu_seqlens=starts)
        )


def test_compiled_in_place():
    t = draw()
    state = t.pop("initial_state")
    pool, slots = torch.cat((state, state)), torch.tensor([3, 0])

    def step(pool, q, k, v, g, beta):
        return rapt.torch.delta_rule(q, k, v, g, beta, initial_state=pool, final_state=pool, state_slots=slots)

    eager, compiled = pool.clone(), pool.clone()
    with torch.no_grad():
        wanted = step(eager, **t)
        got = torch.compile(step, backend="aot_eager", fullgraph=True)(compiled, **t)
    assert torch.equal(got, wanted) and torch.equal(compiled, eager)
    assert torch.equal(eager[1:3], pool[1:3]) and not torch.equal(eager, pool)
