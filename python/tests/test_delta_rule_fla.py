"""flash-linear-attention's functions in rapt.torch, as its own tests try them, against a loop in double."""

import pytest
import rapt
import rapt.torch
import torch
from autograd_reference import delta_rule as loop
from autograd_reference import ratio
from delta_rule_torch_cases import draw, losses
from torch.nn import functional

# flash-linear-attention's tests: shapes (T, H, HV, D) and tolerances of its metric.
SHAPES = [(63, 1, 1, 64), (500, 3, 3, 60), (300, 4, 4, 100), (256, 4, 4, 128), (160, 2, 4, 64), (200, 2, 8, 128)]


def naive_recurrent_kda(q, k, v, g, beta, initial_state):
    return loop(q, k, v, g, beta, initial_state=initial_state)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
def test_kda_as_flash_linear_attention_tests_it(shape, dtype):
    T, H, HV, D = shape
    torch.manual_seed(42)
    q, k, v = (torch.rand(1, T, n, D).to(dtype) for n in (H, H, HV))
    g = functional.logsigmoid(torch.randn(1, T, HV, D)) / 1.0
    beta, h0 = torch.randn(1, T, HV).sigmoid(), torch.randn(1, HV, D, D)
    normal = [functional.normalize(x.float(), dim=-1).to(dtype) for x in (q, k)]
    wanted, wanted_state = naive_recurrent_kda(*normal, v, g, beta, h0)
    for function in (rapt.torch.chunk_kda, rapt.torch.fused_recurrent_kda):
        out, state = function(q, k, v, g, beta, initial_state=h0, output_final_state=True, use_qk_l2norm_in_kernel=True)
        assert out.dtype == dtype and ratio(out, wanted) < 0.005 and ratio(state, wanted_state) < 0.005


@pytest.mark.parametrize("shape", [(63, 1, 2, 64), (300, 2, 2, 60), (200, 1, 4, 128)])
def test_gradients_of_kda_as_flash_linear_attention_tests_them(shape):
    T, H, HV, D = shape
    torch.manual_seed(42)
    tensors = {
        "q": torch.rand(2, T, H, D).half(),
        "k": functional.normalize(torch.rand(2, T, H, D), dim=-1).half(),
        "v": torch.rand(2, T, HV, D).half(),
        "g": functional.logsigmoid(torch.randn(2, T, HV, D)),
        "beta": torch.randn(2, T, HV).sigmoid(),
        "initial_state": torch.randn(2, HV, D, D),
    }
    chunk = lambda **given: rapt.torch.chunk_kda(**given, output_final_state=True, chunk_size=64, safe_gate=False)  # noqa: E731
    *_, got = losses(chunk, tensors)
    *_, wanted = losses(loop, tensors)
    limits = {"g": 0.02, "beta": 0.02}
    assert all(ratio(got[name], wanted[name]) < limits.get(name, 0.008) for name in tensors)


def test_the_gate_of_kda():
    t = draw(hv=4, hk=2)
    a_log, bias = torch.randn(4), torch.randn(32)
    more = {"use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True, "allow_neg_eigval": True, "output_final_state": True}
    for bound in (None, -5.0):
        wanted, wanted_state = loop(
            **t, gate=True, gate_lower_bound=bound, a_log=a_log, dt_bias=bias.view(4, 8), beta_sigmoid=True, beta_double=True
        )
        for function in (rapt.torch.chunk_kda, rapt.torch.fused_recurrent_kda):
            out, state = function(**t, **more, A_log=a_log, dt_bias=bias, lower_bound=bound, safe_gate=bound is not None)
            assert ratio(out, wanted) < 2e-6 and ratio(state, wanted_state) < 2e-6
    bare, none = rapt.torch.chunk_kda(**t, lower_bound=-5, safe_gate=True)  # neither matters without its switch
    assert none is None and torch.equal(bare, rapt.torch.delta_rule(**t))
    wanted, _ = loop(**t, gate=True, gate_lower_bound=-5.0)
    assert ratio(rapt.torch.chunk_kda(**t, use_gate_in_kernel=True, lower_bound=-5.0)[0], wanted) < 2e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gated_delta_rule_as_flash_linear_attention_has_it(dtype):
    t = draw(b=2, t=100, hq=2, hk=2, hv=6, d=32, dv=64, decay="head", dtype=dtype)
    t["g"], t["beta"] = t["g"].float(), t["beta"].float()
    wanted, wanted_state = loop(**t)
    for function in (rapt.torch.chunk_gated_delta_rule, rapt.torch.fused_recurrent_gated_delta_rule):
        out, state = function(**t, output_final_state=True, head_first=False)
        assert out.dtype == dtype and ratio(out, wanted) < 0.005 and ratio(state, wanted_state) < 0.005
    v_first = t | {"initial_state": t["initial_state"].mT.contiguous()}
    turned, turned_state = rapt.torch.chunk_gated_delta_rule(**v_first, state_v_first=True, output_final_state=True)
    assert torch.equal(turned, out) and torch.equal(turned_state.mT, state)
    gk = -torch.rand(2, 100, 6, 32)
    wanted, _ = loop(**t | {"g": t["g"][..., None] + gk})
    out, state = rapt.torch.fused_recurrent_gated_delta_rule(**t, gk=gk)
    assert state is None and ratio(out, wanted) < 0.005
    a_log, bias = torch.randn(6), torch.randn(6)
    out, _ = rapt.torch.chunk_gated_delta_rule(**t, use_gate_in_kernel=True, A_log=a_log, dt_bias=bias)
    assert ratio(out, loop(**t, gate=True, a_log=a_log, dt_bias=bias)[0]) < 0.005


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_of_the_gated_delta_rule_as_flash_linear_attention_has_it(dtype):
    t = draw(b=2, t=100, hq=2, hk=2, hv=6, d=32, dv=64, decay="head", dtype=dtype)
    t["g"], t["beta"] = t["g"].float(), t["beta"].float()
    *_, got = losses(lambda **given: rapt.torch.chunk_gated_delta_rule(**given, output_final_state=True), t)
    *_, wanted = losses(loop, t)
    limits = {"g": 0.02, "beta": 0.02}
    assert all(ratio(got[name], wanted[name]) < limits.get(name, 0.008) for name in t)


def test_varlen_as_flash_linear_attention_has_it():
    t = draw(b=1, t=300, hv=2, state=False) | {"initial_state": torch.randn(4, 2, 8, 12)}
    starts = torch.tensor([0, 15, 100, 280, 300])
    out, state = rapt.torch.chunk_kda(**t, cu_seqlens=starts, cu_seqlens_cpu=starts, output_final_state=True)
    wanted, wanted_state = loop(**t, cu_seqlens=starts)
    assert ratio(out, wanted) < 2e-6 and ratio(state, wanted_state) < 2e-6


def test_what_flash_linear_attention_has_and_rapt_has_not():
    t, of_channels = draw(decay="head"), draw()
    for function, given, message in [
        (rapt.torch.chunk_kda, {"head_first": True}, "head_first: got True; wanted False"),
        (rapt.torch.chunk_kda, of_channels | {"cp_context": "context"}, "cp_context: got one without group; wanted"),
        (rapt.torch.fused_recurrent_kda, of_channels | {"cp_context": "context"}, "cp_context: got one; wanted None, or a chunk_"),
        (rapt.torch.fused_recurrent_gated_delta_rule, {"gv": t["v"]}, "gv: got a tensor; wanted None"),
        (rapt.torch.chunk_kda, of_channels | {"use_gate_in_kernel": True}, "A_log: got None"),
        (rapt.torch.chunk_kda, of_channels | {"cu_seqlens": torch.tensor([0, 9])}, "q: got shape [2, 9, 2, 8] with cu_seqlens"),
    ]:
        with pytest.raises(ValueError) as raised:
            function(**t | given)
        assert str(raised.value).startswith(message)


KDA = (rapt.torch.chunk_kda, rapt.torch.fused_recurrent_kda)
GATED = (rapt.torch.chunk_gated_delta_rule, rapt.torch.fused_recurrent_gated_delta_rule)
OF_CHANNELS, OF_HEADS = draw(), draw(decay="head")
GATE = {"use_gate_in_kernel": True, "A_log": torch.zeros(4)}


@pytest.mark.parametrize(
    ("functions", "given", "message"),
    [
        (KDA + GATED, {"allow_neg_eigval": True}, "allow_neg_eigval: got True without use_beta_sigmoid_in_kernel"),
        (KDA[:1], GATE | {"safe_gate": True}, "lower_bound: got None with safe_gate"),
        (KDA[:1], GATE | {"safe_gate": True, "lower_bound": -5.5}, "lower_bound: got -5.5 with safe_gate"),
        (KDA[:1], GATE | {"safe_gate": True, "lower_bound": 0.0}, "lower_bound: got 0.0 with safe_gate"),
        (KDA + GATED, {"use_gate_in_kernel": True}, "A_log: got None"),
        (KDA + GATED, {"state_v_first": True, "transpose_state_layout": False}, "transpose_state_layout: got one with"),
        (KDA + GATED, {"q": torch.zeros(2, 9, 4, 8)}, "q: got shape [2, 9, 4, 8]; wanted k's [2, 9, 2, 8]"),
        (KDA + GATED, {"v": torch.zeros(2, 9, 3, 12)}, "v: got shape [2, 9, 3, 12]; wanted a multiple of q's 2 heads"),
        (KDA, {"g": OF_HEADS["g"]}, "g: got shape [2, 9, 4]; wanted shape [2, 9, 4, 8]"),
        (KDA, {"g": None}, "g: got None; wanted shape [2, 9, 4, 8]"),
        (KDA, {"beta": torch.zeros(2, 9, 2)}, "beta: got shape [2, 9, 2]; wanted shape [2, 9, 4]"),
        (KDA + GATED, {"initial_state": torch.zeros(3, 4, 8, 12)}, "initial_state: got shape [3, 4, 8, 12]"),
        (GATED[1:], GATE | {"gk": OF_CHANNELS["g"]}, "gk: got a tensor with use_gate_in_kernel"),
        (GATED[1:], GATE | {"g": None}, "g: got no tensor"),
        (GATED[1:], GATE | {"g": None, "gk": OF_CHANNELS["g"]}, "gk: got a tensor with use_gate_in_kernel"),
    ],
)
def test_what_flash_linear_attention_refuses(functions, given, message):
    for function in functions:
        tensors = OF_CHANNELS if function in KDA else OF_HEADS
        function(**tensors)
        with pytest.raises(ValueError) as raised:
            function(**tensors | given)
        assert str(raised.value).startswith(message)
