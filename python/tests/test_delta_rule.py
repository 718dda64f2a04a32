"""rapt.delta_rule of arrays against a loop in float64."""

import ml_dtypes
import numpy as np
import pytest
import rapt
import torch
from delta_rule_reference import delta_rule

UNITS = {np.float32: 2e-6, np.float16: 1e-3, ml_dtypes.bfloat16: 8e-3}
# AMX rounds what it multiplies to bf16 if q, k and v are bf16.
PRODUCTS_OF_BF16 = any(
    entry["operation"] == "delta_rule" and entry["arithmetic"] == "bf16" and not entry["unusable"] for entry in rapt.info()["entries"]
)


def draw(b=2, t=19, hq=2, hk=2, hv=4, d=24, dv=40, decay="channel", dtype=np.float32, seed=0):
    """q, k, v, g and beta, as models have them: keys of length 1, decays below 0."""
    rng = np.random.default_rng(seed)
    h = max(hk, hv)
    q, k, v = (rng.standard_normal((b, t, *of)) for of in ((hq, d), (hk, d), (hv, dv)))
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    g = {"none": None, "constant": (h,), "head": (b, t, h), "channel": (b, t, h, d)}[decay]
    g = None if g is None else -np.exp(rng.standard_normal(g)).astype(dtype)
    return q.astype(dtype), k.astype(dtype), v.astype(dtype), g, rng.random((b, t, h)).astype(dtype)


def state_of(q, k, v, count=None, seed=1):
    h = max(k.shape[2], v.shape[2])
    return np.random.default_rng(seed).standard_normal((count or len(q), h, q.shape[-1], v.shape[-1]), np.float32)


def error(got, wanted):
    """Of the whole, relative to its root mean square."""
    got, wanted = np.asarray(got, np.float64), np.asarray(wanted, np.float64)
    assert got.shape == wanted.shape and np.isfinite(got).all()
    return np.sqrt(np.square(got - wanted).mean()) / np.sqrt(np.square(wanted).mean()).clip(1e-30)


def check(tensors, unit=UNITS[np.float32], **options):
    out, state = rapt.delta_rule(*tensors, **options, return_state=True)
    wanted, states = delta_rule(*tensors, **options)
    assert out.dtype == tensors[0].dtype and out.flags.c_contiguous and state.dtype == np.float32
    is_bf16 = PRODUCTS_OF_BF16 and all(x.dtype == ml_dtypes.bfloat16 for x in tensors[:3])
    assert error(out, wanted) < unit and error(state, states[:, -1]) < (unit if is_bf16 else UNITS[np.float32])
    assert np.array_equal(rapt.delta_rule(*tensors, **options), out)
    return out, state


@pytest.mark.parametrize("dtype", UNITS)
@pytest.mark.parametrize("decay", ["none", "constant", "head", "channel"])
def test_decays_and_types(decay, dtype):
    tensors = draw(decay=decay, dtype=dtype)
    check(tensors, UNITS[dtype], initial_state=state_of(*tensors[:3]))


RULES = {"linear": (), "gated": ("g",), "delta": ("beta",), "gated_delta": ("g", "beta")}


@pytest.mark.parametrize("heads", [(4, 4, 4), (2, 2, 4), (1, 4, 2), (8, 4, 2), (6, 1, 3), (2, 4, 1)])
@pytest.mark.parametrize("rule", RULES)
def test_rules_and_heads(rule, heads):
    """ONNX's LinearAttention: any update rule, and query heads a multiple of the states'."""
    hq, hk, hv = heads
    q, k, v, g, beta = draw(hq=hq, hk=hk, hv=hv, dv=17)
    taken = {name: x for name, x in (("g", g), ("beta", beta)) if name in RULES[rule]}
    check((q, k, v, taken.get("g"), taken.get("beta")), rule=rule, initial_state=state_of(q, k, v))


OPTIONS = {
    "scale": {"scale": -0.3},
    "l2norm": {"l2norm_qk": True},
    "sigmoid": {"beta_sigmoid": True},
    "double": {"beta_sigmoid": True, "beta_double": True},
    "gate": {"gate": True},
    "gate with a_log": {"gate": True, "a_log": np.linspace(-2, 2, 4, dtype=np.float32)},
    "gate with dt_bias": {"gate": True, "dt_bias": np.linspace(-3, 30, 96, dtype=np.float32).reshape(4, 24)},
    "bounded gate": {"gate": True, "gate_lower_bound": -5.0},
    "bounded gate with all": {
        "gate": True,
        "gate_lower_bound": -5.0,
        "a_log": np.linspace(-2, 2, 4, dtype=np.float32),
        "dt_bias": np.linspace(-30, 30, 96, dtype=np.float32).reshape(4, 24),
        "l2norm_qk": True,
        "beta_sigmoid": True,
    },
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options(name):
    tensors = draw()
    plain = rapt.delta_rule(*tensors)
    out, _ = check(tensors, **OPTIONS[name])
    assert not np.array_equal(out, plain)


def test_gate_of_whole_heads():
    tensors = draw(decay="head")
    bias, a = np.linspace(-3, 3, 4, dtype=np.float32), np.linspace(-1, 1, 4, dtype=np.float32)
    check(tensors, gate=True, dt_bias=bias, a_log=a)
    check(draw(decay="constant"), gate=True, dt_bias=bias, a_log=a)


def test_decays_of_any_strength():
    q, k, v, g, beta = draw(t=150)
    for factor in (1e-3, 5, 600):
        check((q, k, v, g * np.float32(factor), beta), initial_state=state_of(q, k, v))
    g[:, 70:75] = -np.inf  # the state is forgotten
    check((q, k, v, g, beta), initial_state=state_of(q, k, v))


def test_states_with_values_first():
    tensors = draw()
    initial = state_of(*tensors[:3])
    out, state = rapt.delta_rule(*tensors, initial_state=initial, return_state=True)
    turned = np.ascontiguousarray(initial.swapaxes(-1, -2))
    again, v_first = rapt.delta_rule(*tensors, initial_state=turned, return_state=True, state_v_first=True)
    assert v_first.flags.c_contiguous and np.array_equal(again, out) and np.array_equal(v_first.swapaxes(-1, -2), state)
    with pytest.raises(ValueError, match=r"initial_state: got shape \[2, 4, 24, 40\]; wanted \[.., h, V, K\], V = 40 and K = 24"):
        rapt.delta_rule(*tensors, initial_state=initial, state_v_first=True)


def test_in_place():
    q, k, v, g, beta = draw()
    state = state_of(q, k, v)
    wanted, states = delta_rule(q, k, v, g, beta, initial_state=state)
    out = np.full(wanted.shape, np.nan, np.float16)
    assert rapt.delta_rule(q, k, v, g, beta, initial_state=state, final_state=state, out=out) is out
    assert error(out, wanted) < UNITS[np.float16] and error(state, states[:, -1]) < UNITS[np.float32]
    made, same = rapt.delta_rule(q, k, v, g, beta, final_state=state, return_state=True)
    assert same is state and np.array_equal(rapt.delta_rule(q, k, v, g, beta), made)


def test_prefill_then_decode():
    q, k, v, g, beta = draw(t=40)
    whole, last = rapt.delta_rule(q, k, v, g, beta, return_state=True)
    out, state = rapt.delta_rule(q[:, :31], k[:, :31], v[:, :31], g[:, :31], beta[:, :31], return_state=True)
    outs = [out]
    for t in range(31, 40):
        now = slice(t, t + 1)
        outs.append(
            rapt.delta_rule(
                q[:, now], k[:, now], v[:, now], g[:, now], beta[:, now], initial_state=state, final_state=state
            )
        )
    assert error(np.concatenate(outs, 1), whole) < 1e-6 and error(state, last) < 1e-6
    assert np.array_equal(outs[0], whole[:, :31])  # later tokens change no bit


LENGTHS = (0, 7, 1, 0, 11, 0)


@pytest.mark.parametrize("rank", [3, 4])
@pytest.mark.parametrize("integers", [np.int32, np.int64])
def test_ragged(rank, integers):
    tensors = draw(b=1)
    states = state_of(*tensors[:3], count=len(LENGTHS))
    starts = np.cumsum((0, *LENGTHS), dtype=integers)
    given = tensors if rank == 4 else tuple(x[0] for x in tensors)
    out, final = rapt.delta_rule(*given, initial_state=states, cu_seqlens=starts, return_state=True)
    assert out.shape == ((1, 19, 4, 40) if rank == 4 else (19, 4, 40)) and final.shape == states.shape
    out = out if rank == 4 else out[None]
    for i, (a, b) in enumerate(zip(starts, starts[1:])):
        one, state = rapt.delta_rule(*(x[:, a:b] for x in tensors), initial_state=states[i : i + 1], return_state=True)
        assert np.array_equal(one, out[:, a:b]) and np.array_equal(state[0], final[i])
    constant = np.float32([-0.1, -0.2, -0.3, -0.4])  # has no tokens to be ragged in
    out = rapt.delta_rule(*given[:3], constant, given[4], cu_seqlens=starts)
    one = rapt.delta_rule(*(x[:, :7] for x in tensors[:3]), constant, tensors[4][:, :7])
    assert np.array_equal(out.reshape(19, 4, 40)[:7], one[0])


def test_slots():
    q, k, v, g, beta = draw(b=3)
    pool = state_of(q, k, v, count=6)
    before = pool.copy()
    slots = np.int64([4, -1, 0])
    out = rapt.delta_rule(q, k, v, g, beta, initial_state=pool, final_state=pool, state_slots=slots)
    started = np.stack([before[4], np.zeros_like(before[0]), before[0]])
    wanted, states = delta_rule(q, k, v, g, beta, initial_state=started)
    assert error(out, wanted) < 2e-6 and error(pool[[4, 0]], states[[0, 2], -1]) < 2e-6
    assert np.array_equal(pool[[1, 2, 3, 5]], before[[1, 2, 3, 5]])


def test_speculative_decoding():
    q, k, v, g, beta = draw(t=3)
    pool = state_of(q, k, v, count=9)
    before = pool.copy()
    slots, accepted = np.int32([[0, 2, 4, 6], [8, 7, 5, -1]]), np.int32([3, 2])
    out = rapt.delta_rule(
        q, k, v, g, beta, initial_state=pool, final_state=pool, state_slots=slots, accepted=accepted, threads=2
    )
    wanted, states = delta_rule(q, k, v, g, beta, initial_state=before[[4, 7]])
    assert error(out, wanted) < 2e-6
    assert error(pool[slots[:, :3].ravel()], states.reshape(-1, *states.shape[2:])) < 2e-6
    assert np.array_equal(pool[[1, 3, 6]], before[[1, 3, 6]])


def test_strides_and_other_libraries():
    tensors = draw()
    wanted = rapt.delta_rule(*tensors, threads=1)
    strided = [np.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2) for x in tensors]
    assert np.array_equal(rapt.delta_rule(*strided, threads=2), wanted)
    torches = [torch.from_numpy(x) for x in tensors]
    out, state = rapt.delta_rule(*torches, return_state=True)
    assert isinstance(out, torch.Tensor) and isinstance(state, torch.Tensor) and np.array_equal(out, wanted)

    class Foreign:
        def __init__(self, array):
            self.array, self.shape, self.dtype = array, array.shape, array.dtype

        def __dlpack__(self, **arguments):
            return self.array.__dlpack__(**arguments)

        def __dlpack_device__(self):
            return self.array.__dlpack_device__()

    assert np.array_equal(rapt.delta_rule(*map(Foreign, tensors)), wanted)


@pytest.mark.parametrize("isa", rapt.info()["isas"])
def test_instruction_sets(isa):
    tensors = draw(t=70)
    assert error(rapt.delta_rule(*tensors, isa=isa), delta_rule(*tensors)[0]) < 2e-6


def test_empty():
    q, k, v, g, beta = draw(t=0)
    initial = state_of(q, k, v)
    out, state = rapt.delta_rule(q, k, v, g, beta, initial_state=initial, return_state=True)
    assert out.shape == (2, 0, 4, 40) and np.array_equal(state, initial)
    assert rapt.delta_rule(*draw(b=0)).shape == (0, 19, 4, 40)


Q, K, V, G, BETA = draw()
STATE = state_of(Q, K, V)
WIDE = np.zeros((2, 19, 2, 257), np.float32)
REFUSED = {
    "q: got shape [2, 19, 48]; wanted": {"q": Q.reshape(2, 19, 48)},
    "k: got shape [2, 18, 2, 24]; wanted q's tokens t = 19": {"k": K[:, 1:]},
    "v: got 3 heads; wanted": {"v": V[:, :, :3]},
    "q: got head dimension 257; wanted 1 to 256": {"q": WIDE, "k": WIDE},
    "v: got head dimension 0; wanted 1 to 256": {"v": V[..., :0]},
    "g: got shape [2, 19, 4, 23]": {"g": G[..., 1:]},
    "g: got a tensor; wanted one only with": {"rule": "delta"},
    "beta: got a tensor; wanted one only with": {"rule": "gated"},
    "beta: got shape [2, 19, 2]": {"beta": BETA[:, :, :2]},
    "beta: got no tensor": {"beta": None, "beta_sigmoid": True},
    "rule: got 'deltas'; wanted \"linear\", \"gated\", \"delta\" or \"gated_delta\"": {"rule": "deltas"},
    "initial_state: got shape [1, 4, 24, 40]": {"initial_state": STATE[:1]},
    "a_log: got a tensor; wanted one only with gate": {"a_log": np.zeros(4, np.float32)},
    "dt_bias: got shape [4]; wanted [h, d] = [4, 24]": {"gate": True, "dt_bias": np.zeros(4, np.float32)},
    "gate_lower_bound: got 5": {"gate": True, "gate_lower_bound": 5},
    "out: got shape [2, 19, 2, 40]; wanted the max(hq, hk, hv) heads h_out = 4": {"out": np.empty((2, 19, 2, 40), np.float32)},
    "state_slots: got slot 2 twice": {"initial_state": np.concatenate([STATE] * 2), "state_slots": np.int32([2, 2])},
    "state_slots: got slot 4; wanted less than 4": {
        "initial_state": np.concatenate([STATE] * 2),
        "state_slots": np.int32([4, 0]),
    },
    "accepted: got 3 of sequence 1": {
        "t": 2,
        "initial_state": np.concatenate([STATE] * 2),
        "state_slots": np.int32([[0, 1], [2, 3]]),
        "accepted": np.int32([1, 3]),
    },
    "final_state: got None with state_slots and return_state": {
        "initial_state": STATE,
        "state_slots": np.int32([0, 1]),
        "return_state": True,
    },
    "k: got shape [2, 19, 2, 24] with cu_seqlens; wanted [1, total, ..]": {"q": Q[:1], "cu_seqlens": np.int32([0, 19])},
    "cu_seqlens: got": {name: x[:1] for name, x in zip(("q", "k", "v", "g", "beta"), (Q, K, V, G, BETA))}
    | {"cu_seqlens": np.int32([0, 18])},
}


@pytest.mark.parametrize("message", REFUSED)
def test_refused(message):
    given = {"q": Q, "k": K, "v": V, "g": G, "beta": BETA} | REFUSED[message]
    if tokens := given.pop("t", None):
        given |= {name: given[name][:, :tokens] for name in ("q", "k", "v", "g", "beta")}
    with pytest.raises(ValueError) as raised:
        rapt.delta_rule(**given)
    assert str(raised.value).startswith(message)


def test_states_of_bfloat16():
    q, k, v, g, beta = draw()
    state = state_of(q, k, v).astype(ml_dtypes.bfloat16)
    before, given = state.copy(), {"g": g, "beta": beta}
    out, last = rapt.delta_rule(q, k, v, **given, initial_state=before, return_state=True)
    wanted, states = delta_rule(q, k, v, **given, initial_state=before.astype(np.float32))
    assert error(out, wanted) < UNITS[np.float32] and error(last, states[:, -1]) < UNITS[np.float32] and last.dtype == np.float32
    assert np.array_equal(rapt.delta_rule(q, k, v, **given, initial_state=state, final_state=state), out)
    assert np.array_equal(state, last.astype(ml_dtypes.bfloat16))  # rounded once
    grads = rapt.delta_rule_backward(q, k, v, **given, dout=out, dfinal_state=state, initial_state=before)
    wide = {"dfinal_state": state.astype(np.float32), "initial_state": before.astype(np.float32)}
    again = rapt.delta_rule_backward(q, k, v, **given, dout=out, **wide)
    assert np.array_equal(grads.dk, again.dk)
    assert np.array_equal(grads.dinitial_state, again.dinitial_state.astype(ml_dtypes.bfloat16))


def test_refused_types():
    for name, given in {
        "v": {"v": V.astype(np.float64)},
        "initial_state": {"initial_state": STATE.astype(np.float16)},
        "cu_seqlens": {"cu_seqlens": np.float32([0, 2])},
        "l2norm_qk": {"l2norm_qk": "yes"},
        "q": {"q": 1},
    }.items():
        with pytest.raises(TypeError, match=f"^{name}: got "):
            rapt.delta_rule(**({"q": Q, "k": K, "v": V, "g": G, "beta": BETA} | given))
    readonly = STATE.copy()
    readonly.flags.writeable = False
    with pytest.raises(ValueError, match="^final_state: got a read-only array"):
        rapt.delta_rule(Q, K, V, G, BETA, final_state=readonly)
    with pytest.raises(ValueError, match="^q: got a tensor that requires grad; wanted .*rapt.torch"):
        rapt.delta_rule(torch.from_numpy(Q).requires_grad_(), *map(torch.from_numpy, (K, V, G, BETA)))
