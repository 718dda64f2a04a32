"""The delta rule on a GPU's tensors: rapt.delta_rule, rapt.torch and flash-linear-attention's functions."""

import pytest
import rapt
import rapt.torch
import torch
from delta_rule_torch_cases import draw
from rapt import _model_delta_rule
from test_delta_rule_models import LINEAR_MODELS, linear_model

if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)
if not any(entry["operation"] == "delta_rule" and entry["backend"] == "cuda" for entry in rapt.info()["entries"]):
    pytest.skip(rapt.info()["backends"][1]["missing"], allow_module_level=True)


def on_gpu(given):
    return {name: x.cuda() if isinstance(x, torch.Tensor) else x for name, x in given.items()}


def relative(got, wanted):
    got, wanted = got.cpu().double(), wanted.double()
    return ((got - wanted).norm() / wanted.norm()).item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tokens", [1, 70])
@pytest.mark.parametrize("v_first", [False, True])
def test_like_the_cpu(dtype, tokens, v_first):
    torch.manual_seed(1)
    given = {
        "q": torch.randn(3, tokens, 2, 64).to(dtype),
        "k": torch.randn(3, tokens, 2, 64).to(dtype),
        "v": torch.randn(3, tokens, 4, 128).to(dtype),
        "g": torch.randn(3, tokens, 4, 64),
        "beta": torch.randn(3, tokens, 4).to(dtype),
        "a_log": torch.rand(4),
        "dt_bias": torch.randn(4, 64),
        "initial_state": torch.randn(3, 4, *((128, 64) if v_first else (64, 128))),
    }
    options = {"gate": True, "l2norm_qk": True, "beta_sigmoid": True, "return_state": True, "state_v_first": v_first}
    wanted, wanted_state = rapt.delta_rule(**{name: x.float() for name, x in given.items()}, **options)
    for function in (rapt.delta_rule, rapt.torch.delta_rule):
        got, state = function(**on_gpu(given), **options)
        assert got.is_cuda and got.dtype == dtype and state.dtype == torch.float32
        assert relative(got, wanted) < {torch.float32: 1e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}[dtype]
        by_products = dtype is torch.bfloat16 and tokens > 1  # of bf16, of which the state is a sum
        assert relative(state, wanted_state) < (4e-3 if by_products else 1e-6)


def test_pools_in_place_by_a_graph():
    torch.manual_seed(2)
    pool = torch.randn(9, 4, 64, 64, device="cuda")
    slots = torch.tensor([7, -1, 2], device="cuda", dtype=torch.int32)
    q, k, v = (torch.randn(3, 1, 4, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    out = torch.empty_like(v)

    def step(states):
        return rapt.torch.delta_rule(q, k, v, l2norm_qk=True, initial_state=states, final_state=states, state_slots=slots, out=out)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step(pool.clone())
    torch.cuda.current_stream().wait_stream(side)
    before = pool.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(pool)
    wanted = before.clone()
    for _ in range(3):
        graph.replay()
        last = out.clone()
        step(wanted)
        assert torch.equal(pool, wanted) and torch.equal(last, out)
    untouched = [i for i in range(9) if i not in (7, 2)]
    assert torch.equal(pool[untouched], before[untouched]) and not torch.equal(pool[7], before[7])


def test_ragged():
    torch.manual_seed(3)
    starts = torch.tensor([0, 5, 5, 40])
    q, k, v = (torch.randn(1, 40, 2, 48) for _ in range(3))
    beta = torch.rand(1, 40, 2)
    wanted = rapt.delta_rule(q, k, v, beta=beta, l2norm_qk=True, cu_seqlens=starts)
    got = rapt.delta_rule(q.cuda(), k.cuda(), v.cuda(), beta=beta.cuda(), l2norm_qk=True, cu_seqlens=starts.cuda())
    assert relative(got, wanted) < 1e-6


def test_flash_linear_attentions_functions():
    t = draw(hv=4, hk=2)
    names = ("q", "k", "v", "g", "beta")
    wanted, wanted_state = rapt.torch.chunk_kda(*(t[name] for name in names), output_final_state=True)
    with torch.no_grad():
        got, state = rapt.torch.chunk_kda(*(t[name].cuda() for name in names), output_final_state=True)
    assert relative(got, wanted.detach()) < 1e-6 and relative(state, wanted_state.detach()) < 1e-6


def test_compiled():
    q, k, v = (torch.randn(2, 9, 2, 32, device="cuda") for _ in range(3))

    def layer(q, k, v):
        return rapt.torch.delta_rule(q, k, v.relu(), l2norm_qk=True) + 1

    assert torch.equal(torch.compile(layer, fullgraph=True)(q, k, v), layer(q, k, v))


def test_gradients_are_refused():
    q = torch.randn(1, 3, 2, 16, device="cuda", requires_grad=True)
    with pytest.raises(ValueError, match="q: got a tensor on cuda:0; wanted one on the cpu: gradients of the delta rule have no GPU"):
        rapt.torch.delta_rule(q, q, q)
    with pytest.raises(ValueError, match="k"):
        rapt.delta_rule(q.detach(), q.detach().cpu(), q.detach())


@pytest.mark.parametrize("kind", LINEAR_MODELS)
def test_models(kind):
    """A prompt, then token by token: as with transformers' own loops."""
    import rapt.transformers

    rapt.transformers.register()
    model = linear_model(kind).cuda().eval()
    tokens = torch.randint(3, 64, (2, 80), device="cuda")

    def run():
        result = model(tokens[:, :70], use_cache=True)
        logits, cache = [result.logits], result.past_key_values
        for t in range(70, 80):
            logits.append(model(tokens[:, t : t + 1], past_key_values=cache, use_cache=True).logits)
        return torch.cat(logits, 1).cpu()

    with torch.no_grad():
        wanted = run()
        model.set_attn_implementation("rapt")
        before = _model_delta_rule.calls
        got = run()
    assert _model_delta_rule.calls == before + 11
    assert relative(got, wanted) < 1e-4
