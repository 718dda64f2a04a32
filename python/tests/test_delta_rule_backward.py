"""rapt.delta_rule_backward of arrays against autograd of a loop in float64."""

import ml_dtypes
import numpy as np
import pytest
import rapt
import torch
from autograd_reference import delta_rule, ratio
from test_delta_rule import draw, state_of

NAMES = ("q", "k", "v", "g", "beta", "initial_state", "a_log", "dt_bias")
UNITS = {np.float32: 6e-6, np.float16: 2e-3, ml_dtypes.bfloat16: 1.2e-2}


def named(tensors, **more):
    return {name: x for name, x in (dict(zip(NAMES, tensors)) | more).items() if x is not None}


def torched(array):
    return torch.from_numpy(np.asarray(array, np.float32))


def wanted_of(inputs, dout, dfinal_state, **options):
    """By autograd, of the numbers as the arrays have them."""
    leaves = {name: torched(x).double().requires_grad_() for name, x in inputs.items()}
    out, state = delta_rule(**leaves, **options)
    loss = out.sum() * 0
    if dout is not None:
        loss = loss + (out * torched(dout)).sum()
    if dfinal_state is not None:
        loss = loss + (state * torched(dfinal_state)).sum()
    return dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values()))))


def gradients_of_results(inputs, options, seed=3, dtype=None):
    out, state = rapt.delta_rule(**inputs, **options, return_state=True)
    rng = np.random.default_rng(seed)
    return rng.standard_normal(out.shape).astype(dtype or out.dtype), rng.standard_normal(state.shape, np.float32)


def check(inputs, unit=UNITS[np.float32], **options):
    dout, dfinal_state = gradients_of_results(inputs, options)
    got = rapt.delta_rule_backward(**inputs, **options, dout=dout, dfinal_state=dfinal_state)
    options.pop("isa", None)
    if "cu_seqlens" in options:
        options["cu_seqlens"] = torch.from_numpy(options["cu_seqlens"])
    wanted = wanted_of(inputs, dout, dfinal_state, **options)
    for name, gradient in zip(NAMES, got):
        if name not in inputs:
            assert gradient is None
            continue
        assert gradient.dtype == inputs[name].dtype and gradient.flags.c_contiguous
        assert ratio(torched(gradient), wanted[name]) < unit, name
    return got


@pytest.mark.parametrize("dtype", UNITS)
@pytest.mark.parametrize("decay", ["none", "constant", "head", "channel"])
def test_decays_and_types(decay, dtype):
    tensors = draw(decay=decay, dtype=dtype)
    check(named(tensors, initial_state=state_of(*tensors[:3])), UNITS[dtype])


@pytest.mark.parametrize("strength", [30, 300])
def test_strong_decays(strength):
    q, k, v, g, beta = draw(t=60)
    check(named((q, k, v, g * np.float32(strength), beta)))


@pytest.mark.parametrize("gate_lower_bound", [None, -5.0])
def test_gates(gate_lower_bound):
    tensors = draw()
    gate = {"a_log": np.linspace(-2, 2, 4, dtype=np.float32), "dt_bias": np.linspace(-3, 30, 96, dtype=np.float32).reshape(4, 24)}
    check(named(tensors, **gate), gate=True, gate_lower_bound=gate_lower_bound, l2norm_qk=True, beta_sigmoid=True)


def test_gradients_of_one_result():
    tensors = named(draw(t=60))
    dout, dfinal_state = gradients_of_results(tensors, {})
    for given in ({"dout": dout}, {"dfinal_state": dfinal_state}):
        got = rapt.delta_rule_backward(**tensors, **given)
        wanted = wanted_of(tensors, given.get("dout"), given.get("dfinal_state"))
        for name, w in wanted.items():
            gradient = getattr(got, "d" + name)
            if (w == 0).all():  # of queries, which the last state does not depend on
                assert name == "q" and (gradient == 0).all()
            else:
                assert ratio(torched(gradient), w) < UNITS[np.float32], name
    nothing = rapt.delta_rule_backward(**tensors)
    assert all((gradient == 0).all() for gradient in nothing if gradient is not None)


def test_wanted_gradients_alone():
    tensors = named(draw(), initial_state=state_of(*draw()[:3]))
    dout, dfinal_state = gradients_of_results(tensors, {})
    given = tensors | {"dout": dout, "dfinal_state": dfinal_state}
    every = rapt.delta_rule_backward(**given)
    for name in tensors:
        for want in (name, [name]):
            alone = rapt.delta_rule_backward(**given, want=want)
            assert [n for n, x in alone._asdict().items() if x is not None] == ["d" + name]
            assert np.array_equal(getattr(alone, "d" + name), getattr(every, "d" + name))


def test_states_with_values_first():
    tensors = named(draw(), initial_state=state_of(*draw()[:3]))
    dout, dfinal_state = gradients_of_results(tensors, {})
    wanted = rapt.delta_rule_backward(**tensors, dout=dout, dfinal_state=dfinal_state)
    turned = tensors | {"initial_state": np.ascontiguousarray(tensors["initial_state"].mT)}
    got = rapt.delta_rule_backward(**turned, dout=dout, dfinal_state=np.ascontiguousarray(dfinal_state.mT), state_v_first=True)
    assert got.dinitial_state.flags.c_contiguous and np.array_equal(got.dinitial_state.mT, wanted.dinitial_state)
    assert all(np.array_equal(a, b) for a, b in zip(got[:5], wanted[:5]))
    with pytest.raises(ValueError, match=r"^dfinal_state: got shape \[2, 4, 24, 40\]; wanted \[.., h, V, K\]"):
        rapt.delta_rule_backward(**turned, dfinal_state=dfinal_state, state_v_first=True)


LENGTHS = (0, 30, 1, 0, 26, 0)


@pytest.mark.parametrize("rank", [3, 4])
@pytest.mark.parametrize("decay", ["constant", "channel"])
def test_ragged(rank, decay):
    tensors = draw(b=1, t=57, decay=decay)
    inputs = named(tensors, initial_state=state_of(*tensors[:3], count=len(LENGTHS)))
    if rank == 3:
        inputs = {name: x[0] if name != "initial_state" and x.ndim > 1 else x for name, x in inputs.items()}
    starts = np.cumsum((0, *LENGTHS))
    got = check(inputs, cu_seqlens=starts)
    if decay == "constant":
        return  # a sum over all sequences
    dout, dfinal_state = gradients_of_results(inputs, {"cu_seqlens": starts})
    rows = {name: x.reshape(1, *x.shape[x.ndim - len(y.shape) + 1 :]) for (name, x), y in zip(inputs.items(), tensors)}
    dout = dout.reshape(1, 57, 4, 40)
    for i, (a, b) in enumerate(zip(starts, starts[1:])):
        alone = {name: x[:, a:b] for name, x in rows.items()} | {"initial_state": inputs["initial_state"][i : i + 1]}
        one = rapt.delta_rule_backward(**alone, dout=dout[:, a:b], dfinal_state=dfinal_state[i : i + 1])
        for name, gradient in zip(NAMES[:5], got):
            assert np.array_equal(gradient.reshape(rows[name].shape)[:, a:b], getattr(one, "d" + name)), name
        assert np.array_equal(got.dinitial_state[i], one.dinitial_state[0])


def test_threads_strides_and_other_libraries():
    tensors = named(draw(t=70, hq=2, hk=2, hv=4), initial_state=state_of(*draw()[:3]))
    dout = np.broadcast_to(np.float32(1), (2, 70, 4, 40))  # of sum(out)
    wanted = rapt.delta_rule_backward(**tensors, dout=dout, threads=1)
    strided = {n: np.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2) for n, x in tensors.items()}
    for given in (tensors | {"threads": 2}, tensors | {"threads": 3}, strided):
        got = rapt.delta_rule_backward(**given, dout=dout)
        assert all(np.array_equal(a, b) for a, b in zip(got[:6], wanted[:6]))
    torches = {name: torch.from_numpy(x) for name, x in tensors.items()}
    got = rapt.delta_rule_backward(**torches, dout=torch.ones(()).expand(2, 70, 4, 40))
    assert all(isinstance(a, torch.Tensor) and np.array_equal(a, b) for a, b in zip(got[:6], wanted[:6]))


@pytest.mark.parametrize("isa", rapt.info()["isas"])
def test_instruction_sets(isa):
    check(named(draw(t=70)), isa=isa)


def test_nothing_to_differentiate():
    tensors = draw(t=0)
    inputs = named(tensors, initial_state=state_of(*tensors[:3]))
    dout, dfinal_state = gradients_of_results(inputs, {})
    got = rapt.delta_rule_backward(**inputs, dout=dout, dfinal_state=dfinal_state)
    assert got.dq.shape == (2, 0, 2, 24) and np.array_equal(got.dinitial_state, dfinal_state)
    constant = named(draw(t=0, decay="constant"))
    assert (rapt.delta_rule_backward(**constant).dg == 0).all()
    assert rapt.delta_rule_backward(**named(draw(b=0))).dk.shape == (0, 19, 2, 24)


Q, K, V, G, BETA = draw()
STATE = state_of(Q, K, V)
DOUT = np.ones((2, 19, 4, 40), np.float32)
REFUSED = {
    "want: got (); wanted one or more of 'q', 'k', 'v', 'g', 'beta', 'initial_state', 'a_log', 'dt_bias'": {"want": ()},
    "want: got ('q', 'dq'); wanted": {"want": ("q", "dq")},
    "want: got 'initial_state', and no initial_state; wanted gradients of what is given: 'q', 'k', 'v', 'g', 'beta'": {"want": ("q", "initial_state")},
    "k: got shape [2, 18, 2, 24]; wanted q's tokens t = 19": {"k": K[:, 1:]},
    "q: got head dimension 0; wanted 1 to 256": {"q": Q[..., :0], "k": K[..., :0]},
    "v: got head dimension 257; wanted 1 to 256": {"v": np.zeros((2, 19, 4, 257), np.float32)},
    "g: got a tensor; wanted one only with": {"rule": "delta"},
    "dout: got shape [2, 19, 2, 40]; wanted the max(hq, hk, hv) heads h_out = 4": {"dout": DOUT[:, :, :2]},
    "dfinal_state: got shape [1, 4, 24, 40]": {"dfinal_state": STATE[:1]},
    "initial_state: got shape [1, 4, 24, 40]": {"initial_state": STATE[:1]},
    "rule: got 'deltas'; wanted": {"rule": "deltas"},
    "dout: got shape [2, 19, 4, 40] with cu_seqlens; wanted [1, total, ..]": {
        name: x[:1] for name, x in zip(NAMES, (Q, K, V, G, BETA))
    }
    | {"cu_seqlens": np.int32([0, 19])},
}


@pytest.mark.parametrize("message", REFUSED)
def test_refused(message):
    with pytest.raises(ValueError) as raised:
        rapt.delta_rule_backward(**({"q": Q, "k": K, "v": V, "g": G, "beta": BETA, "dout": DOUT} | REFUSED[message]))
    assert str(raised.value).startswith(message)


def test_refused_types():
    for name, given in {
        "dout": {"dout": DOUT.astype(np.float64)},
        "dfinal_state": {"dfinal_state": STATE.astype(np.float16)},
        "v": {"v": V.astype(np.float64)},
        "gate": {"gate": "yes"},
        "want": {"want": 5},
    }.items():
        with pytest.raises(TypeError, match=f"^{name}: got "):
            rapt.delta_rule_backward(**({"q": Q, "k": K, "v": V, "g": G, "beta": BETA} | given))
    with pytest.raises(ValueError, match="^q: got a tensor that requires grad"):
        rapt.delta_rule_backward(torch.from_numpy(Q).requires_grad_(), *map(torch.from_numpy, (K, V, G, BETA)))
