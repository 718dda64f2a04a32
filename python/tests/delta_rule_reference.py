"""The delta rule as it is written, in float64: a loop over tokens and heads."""

import numpy as np


def sigmoid(x):
    return 0.5 * (1 + np.tanh(0.5 * x))


def normalised(x):
    return x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6)


def delta_rule(
    q, k, v, g=None, beta=None, *, rule="gated_delta", scale=None, initial_state=None, l2norm_qk=False, beta_sigmoid=False,
    beta_double=False, gate=False, a_log=None, dt_bias=None, gate_lower_bound=None
):  # fmt: skip
    """out [b, t, max(hq, h), V], and the states after every token, [b, t, h, K, V]."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    (b, t, hq, d), hk, (hv, dv) = q.shape, k.shape[2], v.shape[2:]
    h = max(hk, hv)
    if l2norm_qk:
        q, k = normalised(q), normalised(k)
    scale = d**-0.5 if scale is None else scale
    decay = np.zeros((b, t, h, d))
    if g is not None:
        decay += np.asarray(g, np.float64).reshape((1, 1, h, 1) if np.ndim(g) == 1 else (*g.shape, 1)[:4])
    if gate:
        bias = 0.0 if dt_bias is None else np.asarray(dt_bias, np.float64).reshape(h, -1)
        a = np.exp(np.zeros(h) if a_log is None else np.asarray(a_log, np.float64))[:, None]
        z = decay + bias
        decay = -a * np.logaddexp(0, z) if gate_lower_bound is None else gate_lower_bound * sigmoid(a * z)
    beta = np.ones((b, t, h)) if beta is None else np.asarray(beta, np.float64)
    if beta_sigmoid:
        beta = sigmoid(beta)
    if beta_double:
        beta = 2 * beta
    out, states = np.zeros((b, t, max(hq, h), dv)), np.zeros((b, t, h, d, dv))
    for i in range(b):
        for head in range(h):
            state = np.zeros((d, dv)) if initial_state is None else np.array(initial_state[i, head], np.float64)
            for j in range(t):
                key, u = k[i, j, head // (h // hk)], v[i, j, head // (h // hv)]
                if rule.startswith("gated"):
                    state = np.exp(decay[i, j, head])[:, None] * state
                if rule.endswith("delta"):
                    u = beta[i, j, head] * (u - state.T @ key)
                state = state + np.outer(key, u)
                for reader in range(max(hq // h, 1)):
                    query = head * (hq // h) + reader if hq >= h else head // (h // hq)
                    out[i, j, head * max(hq // h, 1) + reader] = scale * state.T @ q[i, j, query]
                states[i, j, head] = state
    return out, states
