"""`delta_rule`: linear attention with a state of fixed size, and `delta_rule_backward`, its gradients."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Literal, NamedTuple, TypeAlias

from rapt import _core
from rapt._arrays import Array, empty_gradients, empty_like, shape_of

__all__ = ["DeltaRuleGradients", "delta_rule", "delta_rule_backward"]

Rule: TypeAlias = Literal["linear", "gated", "delta", "gated_delta"]
Wanted: TypeAlias = Literal["q", "k", "v", "g", "beta", "initial_state", "a_log", "dt_bias"]

_INPUTS = """q k v g beta rule scale initial_state cu_seqlens l2norm_qk beta_sigmoid beta_double gate a_log dt_bias gate_lower_bound
    state_v_first threads isa""".split()


def _inputs(given: dict[str, Any]) -> tuple[Any, ...]:
    """What both directions are given alike, in the order of the extension."""
    return tuple(given[name] for name in _INPUTS)


def delta_rule(
    q: Array,
    k: Array,
    v: Array,
    g: Array | None = None,
    beta: Array | None = None,
    *,
    rule: Rule = "gated_delta",
    scale: float | None = None,
    initial_state: Array | None = None,
    return_state: bool = False,
    final_state: Array | None = None,
    cu_seqlens: Array | None = None,
    state_slots: Array | None = None,
    accepted: Array | None = None,
    l2norm_qk: bool = False,
    beta_sigmoid: bool = False,
    beta_double: bool = False,
    gate: bool = False,
    a_log: Array | None = None,
    dt_bias: Array | None = None,
    gate_lower_bound: float | None = None,
    state_v_first: bool = False,
    out: Array | None = None,
    threads: int | None = None,
    isa: str | None = None,
) -> Any:
    """Linear attention with a state S [K, V] for each sequence and head, updated token by token:

        S = diag(exp(g)) S                  rules "gated" and "gated_delta"
        u = beta (v - S^T k)                rules "delta" and "gated_delta"; u = v otherwise
        S = S + k u^T
        out = scale S^T q

    Sources: Schlag et al., 2021; Yang et al., Gated Delta Networks, 2024 (g for each head); Kimi Linear, 2025 (g for
    each channel of K). The names of rules are those of ONNX's LinearAttention. Symbols: b batch, t tokens, hq, hk and
    hv heads of q, k and v, h = max(hk, hv) state heads, K and V head dimension of keys and of values. The smaller of hk
    and hv divides the larger; hq divides h or is a multiple of it. Head i of the fewer heads serves the i-th of equal
    runs of the others.

    q, k, v         [b, t, hq, K], [b, t, hk, K] and [b, t, hv, V] of float32, bfloat16 or float16, each independently;
                    K and V from 1 to 256.
    g               Log decay [h], [b, t, h] or [b, t, h, K], of the same types, for gated rules. Default: no decay. At
                    most 0 in models.
    beta            [b, t, h] of the same types, for rules with a delta. Default 1.
    rule            "linear", "gated", "delta" or "gated_delta".
    scale           Default K**-0.5.
    initial_state   float32 or bfloat16 [b, h, K, V]. Default 0.
    return_state    True: returns (out, state), with the state after the last token, float32 [b, h, K, V].
    final_state     float32 or bfloat16: receives the state after the last token, rounded once. May be initial_state,
                    which is then updated in place.
    cu_seqlens      int32 or int64 [b + 1], from 0 to total: q is [total, hq, K] or, as in flash-linear-attention, [1,
                    total, hq, K], and k, v, g and beta alike. Sequence n has the tokens cu_seqlens[n] to cu_seqlens[n +
                    1].
    state_slots     int32 or int64 [b]: states are pools [slots, h, K, V], and sequence n uses slot state_slots[n] of
                    both. No two sequences may share a slot. Other slots keep their contents. A negative slot is read as
                    0 and not written. Or [b, n], for up to n tokens: the state after token j goes to slot
                    state_slots[n, j] (speculative decoding).
    accepted        int32 or int64 [b], with state_slots [b, n]: sequence n starts from slot state_slots[n, accepted[n]
                    - 1]. Default 1.
    l2norm_qk       True: q and k are divided by sqrt(sum of squares + 1e-6).
    beta_sigmoid    True: sigmoid(beta) replaces beta.
    beta_double     True: beta, or its sigmoid, is multiplied by 2.
    gate            True: -exp(a_log) softplus(g + dt_bias) replaces g, or with gate_lower_bound, gate_lower_bound
                    sigmoid(exp(a_log) (g + dt_bias)).
    a_log, dt_bias  float32 [h], with gate; dt_bias is [h, K] if g has K. Default 0.
    gate_lower_bound
                    A number of at most 0, with gate.
    state_v_first   True: states are [..., h, V, K].
    out             Written and returned instead of a new array: float32, bfloat16 or float16. Shares no memory with
                    inputs.
    threads, isa    As for rapt.attention.

    All arrays are on the CPU, or PyTorch tensors on one GPU, whose values of cu_seqlens, state_slots and accepted are not
    validated.

    Returns out [b, t, max(hq, h), V] of q's type and rank, C-contiguous: a PyTorch tensor if q is one, otherwise
    NumPy's. Sums are float32. The bits do not depend on threads, other sequences or later tokens. Raises TypeError or
    ValueError, which names the argument, before anything is written. Releases the GIL. Records no gradients: use
    delta_rule_backward or rapt.torch.delta_rule.
    """
    made, state = results(q, k, v, cu_seqlens, return_state, out, final_state, state_slots, state_v_first)
    _core.delta_rule(_inputs(locals()), (made, state, state_slots, accepted))
    return (made, state) if return_state else made


def result_shapes(
    q: Any, k: Any, v: Any, cu_seqlens: Any, state_v_first: bool = False
) -> tuple[tuple[int, ...], tuple[int, int, int, int]]:
    """Of the output and the final state."""
    shapes = {name: shape_of(name, array) for name, array in (("q", q), ("k", k), ("v", v))}
    rank = 4 if cu_seqlens is None else len(shapes["q"])
    for name, shape in shapes.items():
        if len(shape) != rank or rank not in (3, 4):
            wanted = "[b, t, heads, size] or, with cu_seqlens, [total, heads, size]"
            raise ValueError(f"{name}: got shape {list(shape)}; wanted {wanted}")
    (*tokens, hq, size), (*_, hk, _), (*_, hv, value_size) = shapes.values()
    h = max(hk, hv)
    b = tokens[0] if cu_seqlens is None else max(shape_of("cu_seqlens", cu_seqlens)[0] - 1, 0)
    last = (value_size, size) if state_v_first else (size, value_size)
    return (*tokens, max(hq, h), value_size), (b, h, *last)


def results(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens: Any,
    return_state: bool,
    out: Any,
    final_state: Any,
    state_slots: Any,
    state_v_first: bool,
) -> tuple[Any, Any]:
    """The arrays to write: out, and final_state or None. New ones where none are given."""
    made, state = result_shapes(q, k, v, cu_seqlens, state_v_first)
    if return_state and final_state is None:
        if state_slots is not None:
            raise ValueError("final_state: got None with state_slots and return_state; wanted the pool to write to")
        final_state = empty_like("q", q, state, "float32")
    return empty_like("q", q, made) if out is None else out, final_state


class DeltaRuleGradients(NamedTuple):
    """Results of delta_rule_backward: gradients with the shape, type and library of their inputs; None if not wanted,
    or for inputs that were not given.
    """

    dq: Any = None
    dk: Any = None
    dv: Any = None
    dg: Any = None
    dbeta: Any = None
    dinitial_state: Any = None
    da_log: Any = None
    ddt_bias: Any = None


def delta_rule_backward(
    q: Array,
    k: Array,
    v: Array,
    g: Array | None = None,
    beta: Array | None = None,
    *,
    dout: Array | None = None,
    dfinal_state: Array | None = None,
    rule: Rule = "gated_delta",
    scale: float | None = None,
    initial_state: Array | None = None,
    cu_seqlens: Array | None = None,
    l2norm_qk: bool = False,
    beta_sigmoid: bool = False,
    beta_double: bool = False,
    gate: bool = False,
    a_log: Array | None = None,
    dt_bias: Array | None = None,
    gate_lower_bound: float | None = None,
    state_v_first: bool = False,
    want: Collection[Wanted] | None = None,
    threads: int | None = None,
    isa: str | None = None,
) -> DeltaRuleGradients:
    """Gradients of sum(dout * out) + sum(dfinal_state * state), for out and state of delta_rule(q, k, v, ...,
    return_state=True).

    The gradients are with respect to the inputs as given: through norms, gates and sigmoid if the forward has them. The
    call recomputes the states from one state per 24 tokens, and copies no argument.

    q, k, v, ...    As given to delta_rule(). initial_state has the values from before that call. Pools of states have
                    no gradients.
    dout            float32, bfloat16 or float16, of out's shape, with any strides. Default 0.
    dfinal_state    float32 or bfloat16, of the state's shape. Default 0.
    want            The gradients to compute, of "q", "k", "v", "g", "beta", "initial_state", "a_log" and "dt_bias".
                    Default: those of all inputs that are given. The gradients of a_log, dt_bias and a g of [h] are sums
                    over all tokens.
    threads, isa    As for rapt.attention.

    Returns DeltaRuleGradients(dq, dk, dv, dg, dbeta, dinitial_state, da_log, ddt_bias): C-contiguous arrays with the
    shapes and types of their inputs, PyTorch's for its tensors, otherwise NumPy's; None for the others. Sums are
    float32 or float64, and every gradient is rounded once. The bits do not depend on threads or, except in sums over
    sequences, on other sequences. Raises TypeError or ValueError, which names the argument, before anything is written.
    Releases the GIL.
    """
    inputs = {"q": q, "k": k, "v": v, "g": g, "beta": beta, "initial_state": initial_state, "a_log": a_log, "dt_bias": dt_bias}
    names = [name for name, array in inputs.items() if array is not None] if want is None else want
    gradients = DeltaRuleGradients(**empty_gradients(names, inputs))
    _core.delta_rule_backward(_inputs(locals()), (dout, dfinal_state, *gradients))
    return gradients
