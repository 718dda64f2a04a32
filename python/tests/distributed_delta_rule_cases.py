"""More cases for distributed_cases.py: the delta rule over ranks, against rapt.torch.delta_rule on one process."""

from types import SimpleNamespace

import torch
from delta_rule_torch_cases import draw
from distributed_cases import raises

import rapt.torch
from rapt.distributed import delta_rule

# t does not divide by 2, 3 or 4, and heads whose state is soon forgotten are among others.
FORMS = {
    "head": ({}, {}),
    "channel": ({"decay": "channel", "hq": 4, "hk": 4}, {"state_v_first": True}),
    "constant": ({"decay": "constant", "state": False}, {"beta_double": True}),
    "none": ({"decay": "none"}, {"beta_sigmoid": True}),
    "readers": ({"hq": 8, "hk": 4, "hv": 2}, {"scale": 0.3}),
    "few_queries": ({"hq": 1, "hk": 2, "hv": 4}, {}),
    "linear": ({"decay": "none", "hq": 4, "hk": 2, "hv": 2}, {"rule": "linear"}),
    "gated": ({"decay": "channel", "hq": 2}, {"rule": "gated", "l2norm_qk": False}),
    "delta": ({"decay": "none"}, {"rule": "delta"}),
    "wide": ({"decay": "head", "b": 1, "hq": 1, "hk": 1, "hv": 2, "d": 160, "dv": 160}, {}),  # K + V > 256
    "no_norm": ({"decay": "channel"}, {"l2norm_qk": False, "beta_sigmoid": True, "beta_double": True}),
    "gated_gate": ({"decay": "channel"}, {"rule": "gated", "gate": True}),
    "gate": ({"decay": "channel"}, {"gate": True}),
    "gate_bound": ({"decay": "head"}, {"gate": True, "gate_lower_bound": -2.0}),
}


def tensors_of(form, t, dtype):
    sizes, options = FORMS[form]
    tensors = draw(**({"t": t, "decay": "head"} | sizes), dtype=dtype)
    options = {"l2norm_qk": True} | options
    if not options.get("rule", "gated_delta").endswith("delta"):
        del tensors["beta"]
    if options.get("gate"):
        torch.manual_seed(3)
        h = tensors["v"].shape[2]
        tensors |= {"a_log": torch.randn(h), "dt_bias": torch.randn(tensors["g"].shape[2:])}
    if options.get("state_v_first"):
        tensors["initial_state"] = tensors["initial_state"].mT.contiguous()
    if "g" in tensors and tensors["g"].dim() > 1 and not options.get("gate"):
        tensors["g"][:, :, :-1] *= 12  # forget within the first block of tokens
        tensors["g"][:, :, -1] *= 0.02
    return tensors, options


def part_of(name, x, rank, ranks):
    return x.tensor_split(ranks, 1)[rank] if name in ("q", "k", "v", "beta") or (name == "g" and x.dim() > 1) else x


def near(got, wanted, bound):
    got, wanted = got.detach().double(), wanted.detach().double()
    assert (got - wanted).norm() <= bound * wanted.norm() + 1e-6, ((got - wanted).norm() / wanted.norm()).item()


def compared(form, t, dtype, rank, ranks, offsets=None):
    """Results and gradients, of a loss that depends on the outputs and the final state."""
    tensors, options = tensors_of(form, t, dtype)
    more = {"return_state": True} if offsets is None else {"cu_seqlens": offsets}
    if offsets is not None:
        tensors.pop("initial_state", None)
        tensors = {name: x[:1] if x.dim() > 2 else x for name, x in tensors.items()}
    mine = {name: part_of(name, x, rank, ranks).clone().requires_grad_() for name, x in tensors.items()}
    made = delta_rule(**mine, **options, **more)
    out, state = made if offsets is None else (made, None)
    alone = rapt.delta_rule(**tensors, **options, **more)
    wanted, last = alone if offsets is None else (alone, None)
    torch.manual_seed(5)
    dout, dstate = torch.randn(wanted.shape).to(dtype), None if last is None else torch.randn(last.shape)
    bound = 2e-5 if dtype is torch.float32 else 3 * torch.finfo(dtype).eps
    near(out, part_of("q", wanted, rank, ranks), bound)
    uses_state = state is not None and rank == ranks - 1  # one rank's loss depends on it
    ends = [(out, part_of("q", dout, rank, ranks)), (state, dstate)][: 1 + uses_state]
    torch.autograd.backward(*zip(*ends))
    if state is not None:
        near(state, last, bound)
    grads = rapt.delta_rule_backward(**tensors, **options, dout=dout, dfinal_state=dstate, cu_seqlens=offsets)._asdict()
    for name, x in mine.items():
        grad, whole = x.grad.clone(), grads[f"d{name}"]
        if part_of(name, whole, rank, ranks) is whole and ranks > 1:  # of what all ranks have
            torch.distributed.all_reduce(grad)
        try:
            near(grad, part_of(name, whole, rank, ranks), 2 * bound)
        except AssertionError as error:
            raise AssertionError(f"gradient of {name} in {form}: {error}") from None


def delta_rule_forms(rank, ranks):
    for form in FORMS:
        compared(form, 37, torch.float32, rank, ranks)
    compared("head", 37, torch.bfloat16, rank, ranks)


def delta_rule_forgets(rank, ranks):
    """Parts of several blocks of tokens, in which all heads but one soon forget."""
    for form in ("head", "readers", "no_norm", "gate", "gate_bound", "gated_gate"):
        compared(form, 601 * ranks, torch.float32, rank, ranks)


def delta_rule_grows(rank, ranks):
    """A state of 0 stays 0, though the product of its decays overflows."""
    t = 8 * ranks
    torch.manual_seed(6)
    q, k, v = torch.randn(1, t, 2, 8), torch.randn(1, t, 2, 8), torch.randn(1, t, 2, 12)
    g = torch.zeros(1, t, 2)
    v[:, : t - 1], g[:, : t - 1] = 0, 30
    wanted, last = rapt.delta_rule(q, k, v, g, rule="gated", return_state=True)
    mine = [part_of(name, x, rank, ranks) for name, x in zip("qkvg", (q, k, v, g))]
    out, state = delta_rule(*mine, rule="gated", return_state=True)
    near(out, part_of("q", wanted, rank, ranks), 2e-5)
    near(state, last, 2e-5)


def delta_rule_ragged(rank, ranks):
    for inner in ((), (5, 12, 12, 30), (9, 10, 18, 27), (36,)):
        for form in ("head", "gated"):
            compared(form, 37, torch.float32, rank, ranks, torch.tensor([0, *inner, 37]))


def delta_rule_refuses(rank, ranks):
    tensors, _ = tensors_of("head", 8 * ranks, torch.float32)
    mine = {name: part_of(name, x, rank, ranks) for name, x in tensors.items()}
    last = rank == ranks - 1
    with raises(ValueError, "k: got shape" if last else f"group: rank {ranks - 1} refuses"):
        delta_rule(**mine | {"k": mine["k"][:, :-1] if last else mine["k"]})
    with raises(ValueError, "q: got 0 tokens" if last else f"group: rank {ranks - 1} refuses"):
        delta_rule(**{name: x if name == "initial_state" else x[:, : 8 * (not last)] for name, x in mine.items()})
    with raises(ValueError, "rule: got gated_delta on rank 0 and delta on rank"):
        delta_rule(**{name: x for name, x in mine.items() if name != "g"}, rule="delta" if last else "gated_delta")
    with raises(ValueError, "cu_seqlens: got a tensor with hash"):
        one = {name: x[:1] for name, x in mine.items() if name != "initial_state"}
        delta_rule(**one, cu_seqlens=torch.tensor([0, 3 + last, 8 * ranks]))
    with raises(ValueError, f"cu_seqlens: got offsets up to 7; wanted {8 * ranks}"):
        delta_rule(**one, cu_seqlens=torch.tensor([0, 7]))
    with raises(ValueError, "initial_state: got one with cu_seqlens"):
        delta_rule(**one, initial_state=mine["initial_state"][:1], cu_seqlens=torch.tensor([0, 8 * ranks]))


def delta_rule_keeps_sequences_apart(rank, ranks):
    """A NaN stays in its sequence, forward and backward."""
    t = 12 * ranks
    offsets = torch.tensor([0, 9, 15, t - 2, t])
    tensors = draw(b=1, t=t, decay="head", state=False)
    tensors["v"][:, 10] = torch.nan  # of the second sequence, of which the second rank has the end
    mine = {name: part_of(name, x, rank, ranks).clone().requires_grad_() for name, x in tensors.items()}
    out = delta_rule(**mine, cu_seqlens=offsets)
    out.sum().backward()
    at = torch.arange(t).tensor_split(ranks)[rank]
    others = (at < 9) | (at >= 15)
    assert out[:, others].isfinite().all() and out[:, at == 10].isnan().all()
    assert all(x.grad[:, others].isfinite().all() for x in mine.values())


def flash_linear_attention_context(rank, ranks):
    """Its context of a rank, of packed sequences of which some lie on several ranks."""
    t, sequences = 12 * ranks, [0, 5, 12 * ranks - 8, 12 * ranks - 3, 12 * ranks]
    begin, end = 12 * rank, 12 * (rank + 1)
    own = torch.tensor([0, *(at - begin for at in sequences if begin < at < end), 12])
    first = max(at for at in sequences if at <= begin)
    context = SimpleNamespace(group=torch.distributed.group.WORLD, cu_seqlens=own, pre_num_ranks=rank - first // 12)
    for run, decay in ((rapt.torch.chunk_kda, "channel"), (rapt.torch.chunk_gated_delta_rule, "head")):
        tensors = draw(b=1, t=t, decay=decay, state=False)
        wanted, _ = run(**tensors, cu_seqlens=torch.tensor(sequences))
        mine = {name: x[:, begin:end] for name, x in tensors.items()}
        out, state = run(**mine, cp_context=context, cu_seqlens=torch.tensor(sequences))  # of which the context's count
        assert state is None
        near(out, wanted[:, begin:end], 2e-5)
        alone, _ = run(**tensors, cp_context=SimpleNamespace(group=None))  # as if there were none
        near(alone, run(**tensors)[0], 0)
        with raises(ValueError, "output_final_state: got one with cp_context"):
            run(**mine, cp_context=context, output_final_state=True)
        wrong = SimpleNamespace(**vars(context) | {"cu_seqlens": own + 1})
        with raises(ValueError, "cu_seqlens: got" if rank == 0 else "group: rank 0 refuses"):
            run(**mine, cp_context=context if rank else wrong)
        for wrong in ({"allow_neg_eigval": True}, {"head_first": True}, {"q": mine["q"][:, 1:]}):
            with raises(ValueError, f"{next(iter(wrong))}: got" if rank == 0 else "group: rank 0 refuses"):
                run(**mine | (wrong if rank == 0 else {}), cp_context=context)


CASES = {case.__name__: case for case in (delta_rule_forms, delta_rule_forgets, delta_rule_grows)}
for _case in (delta_rule_ragged, delta_rule_keeps_sequences_apart, flash_linear_attention_context, delta_rule_refuses):
    CASES[_case.__name__] = _case
