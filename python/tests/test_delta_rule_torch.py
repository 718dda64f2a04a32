"""rapt.torch.delta_rule against a loop in double, gradients by autograd of that."""

import pytest
import rapt
import rapt.torch
import torch
from autograd_reference import ratio
from autograd_reference import delta_rule as loop
from delta_rule_torch_cases import draw, losses
from torch.autograd import forward_ad


def rapt_with_state(**given):
    return rapt.torch.delta_rule(**given, return_state=True)


def check(tensors, unit=2e-6, **options):
    out, state, grads = losses(rapt_with_state, tensors, **options)
    wanted_out, wanted_state, wanted = losses(loop, tensors, **options)
    assert ratio(out, wanted_out) < unit and ratio(state, wanted_state) < 2e-6
    for name, x in tensors.items():
        assert grads[name].dtype == x.dtype
        assert ratio(grads[name], wanted[name]) < 3 * unit, name


@pytest.mark.parametrize("dtype, unit", [(torch.float32, 2e-6), (torch.bfloat16, 4e-3), (torch.float16, 1e-3)])
@pytest.mark.parametrize("decay", ["none", "constant", "head", "channel"])
def test_gradients(decay, dtype, unit):
    check(draw(decay=decay, dtype=dtype), unit)


@pytest.mark.parametrize("heads", [(4, 4, 4), (2, 2, 4), (8, 4, 2), (6, 1, 3), (2, 4, 1)])
@pytest.mark.parametrize("rule, taken", [("linear", ""), ("gated", "g"), ("delta", "beta"), ("gated_delta", "g beta")])
def test_gradients_of_rules_and_heads(rule, taken, heads):
    tensors = draw(hq=heads[0], hk=heads[1], hv=heads[2])
    check({name: x for name, x in tensors.items() if name not in ("g", "beta") or name in taken.split()}, rule=rule)


OPTIONS = {
    "scale": {"scale": -0.3},
    "l2norm": {"l2norm_qk": True},
    "sigmoid": {"beta_sigmoid": True},
    "double": {"beta_sigmoid": True, "beta_double": True},
    "values first": {"state_v_first": True},
    "gate": {"gate": True},
    "gate with all": {"gate": True, "l2norm_qk": True, "beta_sigmoid": True},
    "bounded gate": {"gate": True, "gate_lower_bound": -5.0},
    "bounded gate with all": {"gate": True, "gate_lower_bound": -5.0, "l2norm_qk": True},
}


@pytest.mark.parametrize("decay", ["head", "channel"])
@pytest.mark.parametrize("name", OPTIONS)
def test_gradients_of_options(name, decay):
    tensors = draw(decay=decay)
    if "with all" in name:
        tensors |= {"a_log": torch.randn(4), "dt_bias": 3 * torch.randn((4, 8) if decay == "channel" else 4)}
    if name == "values first":
        tensors["initial_state"] = tensors["initial_state"].mT.contiguous()
    check(tensors, **OPTIONS[name])


def test_gradients_of_saturated_gates_are_finite():
    tensors = draw() | {"a_log": torch.tensor([-20.0, 0, 5, 20]), "dt_bias": 30 * torch.randn(4, 8)}
    for bound in (None, -5.0):
        *_, grads = losses(rapt_with_state, tensors, gate=True, gate_lower_bound=bound)
        assert all(torch.isfinite(x).all() for x in grads.values())


def test_gradients_of_many_tokens_and_strong_decays():
    tensors = draw(t=150, decay="channel")  # more than are kept at once
    tensors["g"] = tensors["g"] * torch.tensor([0.01, 1, 20, 600])[:, None]
    check(tensors)


@pytest.mark.parametrize("rank", [3, 4])
@pytest.mark.parametrize("decay", ["constant", "head", "channel"])
def test_gradients_of_ragged_batches(rank, decay):
    tensors = draw(b=1, t=13, decay=decay, state=False) | {"initial_state": torch.randn(5, 4, 8, 12)}
    if rank == 3:
        tensors = {n: x[0] if n != "initial_state" and x.ndim > 1 else x for n, x in tensors.items()}
    check(tensors, cu_seqlens=torch.tensor([0, 0, 6, 7, 7, 13]))


def test_some_gradients_only(monkeypatch):
    """The kernel is asked for those of what requires grad."""
    tensors, asked, backward = draw(), [], rapt.delta_rule_backward
    *_, wanted = losses(rapt_with_state, tensors)
    monkeypatch.setattr(rapt, "delta_rule_backward", lambda **given: (asked.append(given), backward(**given))[1])
    out, state = rapt_with_state(**tensors | {"v": tensors["v"].requires_grad_()})
    torch.manual_seed(7)
    loss = (out * torch.randn(out.shape)).double().sum() + (state * torch.randn(state.shape)).double().sum()
    loss.backward()
    assert torch.equal(tensors["v"].grad, wanted["v"])
    assert len(asked) == 1 and asked[0]["want"] == ["v"]
    # A loss of out alone; its gradient has none of its own.
    out = rapt.torch.delta_rule(**tensors)
    (dv,) = torch.autograd.grad(out.square().sum(), tensors["v"], create_graph=True)
    with pytest.raises(RuntimeError, match="create_graph"):
        dv.sum().backward()


def test_states_of_bfloat16():
    t = draw(dtype=torch.bfloat16)
    narrow = t["initial_state"].bfloat16().requires_grad_()
    wide = narrow.detach().float().requires_grad_()
    for function in (rapt.torch.chunk_kda, rapt.torch.fused_recurrent_kda):
        results = [function(**t | {"initial_state": state}, output_final_state=True) for state in (narrow, wide)]
        for got, wanted in zip(*results):
            assert torch.equal(got, wanted) and got.dtype == wanted.dtype
        grads = [torch.autograd.grad(out.sum() + last.sum(), state) for (out, last), state in zip(results, (narrow, wide))]
        assert torch.equal(grads[0][0], grads[1][0].bfloat16())
    state = narrow.detach().clone()
    out = rapt.torch.delta_rule(**t | {"initial_state": state}, final_state=state)
    assert torch.equal(out, results[0][0]) and torch.equal(state, results[0][1].bfloat16())


def test_gradients_with_autocast():
    """Projections in bfloat16, decays in float32, as models have them."""
    torch.manual_seed(0)
    x, weights = torch.randn(2, 40, 24), torch.randn(3, 24, 32, requires_grad=True)
    g, beta = -torch.rand(2, 40, 2, 16), torch.rand(2, 40, 2)

    def loss(function):
        q, k, v = ((x @ w).unflatten(-1, (2, 16)) for w in weights.unbind())
        return function(q, k, v, g, beta, l2norm_qk=True).float().square().mean(), q.dtype

    with torch.autocast("cpu", torch.bfloat16):
        got, dtype = loss(rapt.torch.delta_rule)
    assert dtype == torch.bfloat16
    wanted, _ = loss(lambda *given, **options: loop(*given, **options)[0])
    (got,), (wanted,) = (torch.autograd.grad(made, weights) for made in (got, wanted))
    assert got.dtype == torch.float32 and ratio(got, wanted) < 0.03


@pytest.mark.parametrize("grad", [False, True])
def test_options_are_refused_in_the_same_words(grad):
    q = torch.zeros(1, 4, 1, 8, requires_grad=grad)
    array = q.detach().numpy()
    for options in (
        *({"scale": "x"}, {"scale": "1"}, {"scale": True}, {"gate_lower_bound": "x"}),
        *({"l2norm_qk": "yes"}, {"rule": None}, {"rule": "deltas"}),
    ):
        with pytest.raises((TypeError, ValueError)) as wanted:
            rapt.delta_rule(array, array, array, **options)
        with pytest.raises(type(wanted.value)) as raised:
            rapt.torch.delta_rule(q, q, q, **options)
        assert str(raised.value) == str(wanted.value)


def test_tracing_and_transforms():
    q = torch.randn(1, 4, 1, 8)
    traced = torch.jit.trace(lambda x: rapt.torch.delta_rule(x, x, x), (q,))
    other = torch.randn(1, 4, 1, 8)
    assert torch.equal(traced(other), rapt.torch.delta_rule(other, other, other))
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="q: got a tensor of forward mode"):
        rapt.torch.delta_rule(forward_ad.make_dual(q, q), q, q)
    for transform in (torch.func.grad, torch.vmap):
        with pytest.raises(NotImplementedError, match="q: got a tensor of forward mode or of a torch.func transform"):
            transform(lambda x: rapt.torch.delta_rule(x, x, x).sum())(q[None])
    with pytest.raises(ValueError, match="final_state: got a tensor that requires grad"):
        rapt.torch.delta_rule(q, q, q, return_state=True, final_state=torch.zeros(1, 1, 8, 8, requires_grad=True))


def test_refused():
    t = draw()
    for name, x in t.items():
        with pytest.raises(ValueError, match=f"^{name}: got a tensor on meta; wanted one on the cpu"):
            rapt.torch.delta_rule(**t | {name: x.to("meta")})
    with pytest.raises(TypeError, match="^v: got numpy.ndarray; wanted a tensor"):
        rapt.torch.delta_rule(**t | {"v": t["v"].numpy()})
    training = t | {"q": t["q"].requires_grad_()}
    for name in ("out", "final_state"):
        made = {"out": torch.empty(2, 9, 4, 12), "final_state": torch.empty(2, 4, 8, 12)}[name]
        with pytest.raises(ValueError, match=f"^{name}: got a tensor with inputs that require grad"):
            rapt.torch.delta_rule(**training, **{name: made})
    with pytest.raises(ValueError, match="^threads: got 1 with gradients"):
        rapt.torch.delta_rule(**training, threads=1)
    with torch.no_grad():
        assert not rapt.torch.delta_rule(**training, threads=1, isa=rapt.info()["isas"][-1]).requires_grad
    with pytest.raises(ValueError, match="^k: got shape"):
        rapt.torch.delta_rule(**training | {"k": t["k"][:, 1:]})
