"""rapt.attention, rapt.torch and rapt.transformers on a GPU's tensors. Skipped where there is no GPU, or rapt has no
backend for it."""

from unittest import mock

import pytest
import rapt
import rapt.torch
import torch
from kernel_calls import backward_calls, kernel_calls
from torch.nn import functional

if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)
if not any(entry["backend"] == "cuda" for entry in rapt.info()["entries"]):
    pytest.skip(rapt.info()["backends"][1]["missing"], allow_module_level=True)

ours = rapt.torch.scaled_dot_product_attention
theirs = functional.scaled_dot_product_attention
operator = torch.ops.rapt.scaled_dot_product_attention
BOUNDS = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}

pytestmark = pytest.mark.usefixtures("without_fallbacks")


def tensors(dtype=torch.float32, sq=70, sk=90, d=40, heads=6):
    torch.manual_seed(1)
    return [torch.randn(2, h, s, d).to(dtype) for h, s in ((heads, sq), (2, sk), (2, sk))]


def relative(got, wanted):
    got, wanted = got.detach().cpu().double(), wanted.detach().cpu().double()
    return ((got - wanted).norm() / wanted.norm()).item()


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"causal": True, "align": "bottom_right"},
        {"window": (20, 3), "align": "top_left", "softcap": 5.0},
        {"scale": 0.2, "return_lse": True},
    ],
)
def test_like_the_cpu(dtype, arguments):
    q, k, v = tensors(dtype)
    wanted = rapt.attention(q, k, v, **arguments)
    got = rapt.attention(q.cuda(), k.cuda(), v.cuda(), **arguments)
    if not arguments.get("return_lse"):
        wanted, got = [wanted], [got]
    for a, b in zip(got, wanted, strict=True):
        assert a.device == torch.device("cuda:0")
        assert a.dtype is b.dtype and a.shape == b.shape
        assert relative(a, b) < BOUNDS[dtype]


def test_tensors_of_scores():
    q, k, v = tensors()
    arguments = {
        "mask": torch.rand(70, 90) > 0.3,
        "bias": torch.randn(6, 1, 90),
        "alibi": torch.rand(6),
        "sinks": torch.randn(6),
    }
    wanted = rapt.attention(q, k, v, align="top_left", **arguments)
    on_gpu = {name: tensor.cuda() for name, tensor in arguments.items()}
    assert relative(rapt.attention(q.cuda(), k.cuda(), v.cuda(), align="top_left", **on_gpu), wanted) < 1e-6


def test_ragged_and_pages():
    q, k, v = (torch.randn(s, h, 32) for s, h in ((50, 4), (60, 2), (60, 2)))
    starts = [torch.tensor(x, dtype=torch.int32) for x in ([0, 10, 50], [0, 25, 60])]
    on_gpu = [t.cuda() for t in (q, k, v, *starts)]
    wanted = rapt.attention(q, k, v, cu_seqlens_q=starts[0], cu_seqlens_k=starts[1])
    got = rapt.attention(*on_gpu[:3], cu_seqlens_q=on_gpu[3], cu_seqlens_k=on_gpu[4])
    assert relative(got, wanted) < 1e-6

    q, pages, table = torch.randn(2, 4, 1, 32), torch.randn(8, 2, 16, 32), torch.tensor([[3, 1, 6], [0, 5, 2]])
    lengths = torch.tensor([37, 48])
    wanted = rapt.attention(q, pages, pages, block_table=table, cache_seqlens=lengths)
    got = rapt.attention(
        q.cuda(), pages.cuda(), pages.cuda(), block_table=table.cuda(), cache_seqlens=lengths.cuda()
    )
    assert relative(got, wanted) < 1e-6


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_quantised_pages_and_merged_parts(dtype):
    q, k, v = (torch.randn(2, h, s, 64) for h, s in ((4, 1), (2, 90), (2, 90)))

    def parts(device):
        pages = [torch.zeros(12, 2, 16, 64, dtype=dtype, device=device) for _ in range(2)]
        scales = {name: torch.zeros(12, 2, 16, 1, device=device) for name in ("k_scale", "v_scale")}
        cache = {"block_table": torch.arange(12, device=device).view(2, 6), **scales}
        none, all_keys = (torch.full((2,), n, device=device) for n in (0, 90))
        rapt.append_kv(k.to(device), v.to(device), *pages, none, **cache)
        return rapt.attention(q.to(device), *pages, cache_seqlens=all_keys, return_lse=True, **cache)

    out, lse = parts("cuda")
    wanted, _ = parts("cpu")
    assert out.device == torch.device("cuda:0")
    assert relative(out, wanted) < 1e-6
    assert relative(rapt.merge_states([out, out], [lse, lse]), wanted) < 1e-6


def grouped(q, k, v, **options):
    return ours(q, k, v, enable_gqa=True, **options)


@pytest.mark.parametrize("function", [rapt.attention, grouped], ids=["attention", "sdpa"])
def test_current_stream(function):
    q, k, v = (t.cuda() for t in tensors(sq=500, sk=500, d=128))
    wanted = function(q, k, v)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        late = torch.empty_like(q)
        torch.cuda._sleep(100_000_000)
        late.copy_(q)
        got = function(late, k, v)
        assert not stream.query()
    stream.synchronize()
    assert torch.equal(got, wanted)


def test_explain():
    q, k, v = (t.cuda() for t in tensors())
    assert ".cuda" in rapt.explain(q, k, v).entry


def test_refusals():
    q, k, v = tensors()
    with pytest.raises(ValueError, match="k: got a tensor on another device than q"):
        rapt.attention(q.cuda(), k, v)
    with pytest.raises(ValueError, match="align: got none, with lengths on a device"):
        rapt.attention(q.cuda(), k.cuda(), v.cuda(), cache_seqlens=torch.tensor([90, 90]).cuda(), causal=True)


def test_quantised_keys():
    q, k, v = tensors()
    codes = [(20 * t).to(torch.int8) for t in (k, v)]
    scales = {name: torch.full((1, 2, 1, 1), 0.05) for name in ("k_scale", "v_scale")}
    wanted = rapt.attention(q, *codes, **scales)
    got = rapt.attention(q.cuda(), *(t.cuda() for t in codes), **{name: t.cuda() for name, t in scales.items()})
    assert relative(got, wanted) < 1e-6


SDPA_OPTIONS = {
    "plain": {},
    "causal": {"is_causal": True},
    "mask": {"attn_mask": torch.rand(70, 90) > 0.3},
    "bias": {"attn_mask": torch.randn(2, 1, 70, 90), "scale": 0.2},
    "causal mask": {"attn_mask": torch.rand(70, 90) > 0.3, "is_causal": True},
}


def exact(q, k, v, attn_mask=None, is_causal=False, scale=None):
    """By PyTorch, in float64."""
    if attn_mask is not None:
        attn_mask = attn_mask.cuda() if attn_mask.dtype is torch.bool else attn_mask.cuda().double()
        if is_causal:
            attn_mask, is_causal = attn_mask & torch.ones_like(attn_mask).tril(), False
    return theirs(q.double(), k.double(), v.double(), attn_mask, 0.0, is_causal, scale=scale, enable_gqa=True)


@pytest.mark.parametrize("options", SDPA_OPTIONS.values(), ids=SDPA_OPTIONS)
@pytest.mark.parametrize("dtype", BOUNDS)
def test_operator(dtype, options):
    q, k, v = (t.cuda() for t in tensors(dtype))
    options = {"attn_mask": None, "is_causal": False, "scale": None} | options
    mask = None if options["attn_mask"] is None else options["attn_mask"].cuda()
    got = operator(q, k, v, mask, options["is_causal"], options["scale"], True)
    assert (got.device, got.dtype, got.shape) == (q.device, dtype, q.shape)
    assert relative(got, exact(q, k, v, **options)) < BOUNDS[dtype]


RUNS = pytest.mark.parametrize("run", [grouped, torch.compile(grouped, fullgraph=True)], ids=["eager", "compiled"])


@pytest.mark.parametrize("options", SDPA_OPTIONS.values(), ids=SDPA_OPTIONS)
@RUNS
def test_gradients_by_pytorch(run, options):
    """Of fp32, forward and backward: the naive entry is not chosen."""
    inputs = [t.cuda().requires_grad_() for t in tensors()]
    on_gpu = options | ({"attn_mask": options["attn_mask"].cuda()} if "attn_mask" in options else {})
    with kernel_calls() as forward, backward_calls() as backward:
        with pytest.warns(rapt.torch.FallbackWarning, match="gradients on a GPU of torch.float32, heads of 40 and 40 columns"):
            out = run(*inputs, **on_gpu)
        wanted = exact(*inputs, **options)
        assert relative(out, wanted) < 1e-5
        grad = torch.randn_like(out)
        grads = torch.autograd.grad(out, inputs, grad), torch.autograd.grad(wanted, inputs, grad.double())
    assert (forward.call_count, backward.count) == (0, 0)
    for got, wanted in zip(*grads, strict=True):
        assert relative(got, wanted) < 1e-4


def test_gradients_of_the_operator():
    """Of what rapt.torch leaves to PyTorch: by the naive entry."""
    inputs = [t.cuda().requires_grad_() for t in (*tensors(), torch.randn(70, 90))]
    with backward_calls() as backward:
        got = torch.autograd.grad(operator(*inputs, False, 0.2, True).square().sum(), inputs)
    assert backward.count == 1
    *qkv, bias = inputs
    for a, b in zip(got, torch.autograd.grad(exact(*qkv, attn_mask=bias, scale=0.2).square().sum(), inputs), strict=True):
        assert relative(a, b) < 1e-5


GRADIENT_BOUNDS = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
NAMES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}


def largest_heads(naive):
    """Of the types that entries of attention_backward take, naive ones or others."""
    entries = [e for e in rapt.info()["entries"] if e["backend"] == "cuda" and e["operation"] == "attention_backward"]
    usable = [e for e in entries if not e["unusable"] and not e["opt_in"] and (e["phase"] == "naive") == naive]
    return {NAMES[name]: e["max_head_dim"] for e in reversed(usable) for name in e["dtypes"] if name in NAMES}


BY_RAPT = pytest.mark.parametrize("dtype", largest_heads(naive=False))


def learnt(dtype, *sizes):
    return [t.cuda().requires_grad_() for t in tensors(dtype, *sizes)]


def check_gradients(got, wanted, dtype):
    for a, b in zip(got, wanted, strict=True):
        assert a.shape == b.shape and a.device.type == "cuda"
        assert relative(a, b) < GRADIENT_BOUNDS[dtype]


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"scale": 0.2}], ids=["plain", "causal", "scale"])
@pytest.mark.parametrize("sizes", [(70, 90, 40), (300, 300, 64), (200, 130, 128)])
@RUNS
@BY_RAPT
def test_gradients_by_rapt(dtype, run, sizes, options):
    """One forward, one backward, and gradients of the inputs alone that want them."""
    inputs = learnt(dtype, *sizes)
    with kernel_calls() as forward, backward_calls() as backward:
        out = run(*inputs, **options)
        grad = torch.randn_like(out)
        got = torch.autograd.grad(out, inputs, grad)
        kind = "eager" if run is grouped else "dispatched"
        assert (forward.call_count, backward.names) == (1, [f"{kind}_sdpa_gradients"])
        (of_keys,) = torch.autograd.grad(run(*inputs, **options), inputs[1:2], grad)
    assert [t.dtype for t in got] == [dtype] * 3
    check_gradients(got, torch.autograd.grad(exact(*inputs, **options), inputs, grad.double()), dtype)
    check_gradients([of_keys], got[1:2], dtype)
    on_cpu = [t.detach().cpu().requires_grad_() for t in inputs]
    check_gradients(got, torch.autograd.grad(grouped(*on_cpu, **options), on_cpu, grad.cpu()), dtype)


@pytest.mark.parametrize("with_mask", [False, True])
@BY_RAPT
def test_dropout(dtype, with_mask):
    """The weights that dropout_mask() says are dropped, in the result as in the gradients."""
    q, k, v, dout = (torch.randn(2, 6, n, 64).cuda().to(dtype) for n in (70, 90, 90, 70))
    mask = torch.rand(2, 1, 70, 90).cuda() > 0.3 if with_mask else None
    options = {"mask": mask, "dropout_p": 0.25, "seed": 3}
    out, lse = rapt.attention(q, k, v, return_lse=True, **options)
    got = rapt.attention_backward(dout, q, k, v, out, lse, **options)[:3]
    kept = torch.from_numpy(rapt.dropout_mask(2, 6, 70, 90, 0.25, 3)).cuda()
    inputs = [t.double().requires_grad_() for t in (q, k, v)]
    scores = inputs[0] @ inputs[1].transpose(-1, -2) / 8
    weights = torch.softmax(scores if mask is None else scores.masked_fill(~mask, -torch.inf), -1)
    wanted = (weights * kept / 0.75) @ inputs[2]
    assert relative(out, wanted) < BOUNDS[dtype]
    check_gradients(got, torch.autograd.grad(wanted, inputs, dout.double()), dtype)


def test_dropout_in_a_graph():
    x = torch.randn(1, 2, 64, 64, device="cuda", dtype=torch.bfloat16)
    with mock.patch.object(torch.cuda, "is_current_stream_capturing", lambda: True):
        with pytest.raises(ValueError, match="dropout_p: got dropout in a CUDA graph"):
            operator(x, x, x, None, False, None, False, 0.5, torch.tensor(3))


@BY_RAPT
def test_gradients_of_sums_and_views(dtype):
    """A dout of stride 0, one that is not contiguous, and inputs that are views of one tensor."""
    x = torch.randn(2, 70, 3, 4, 64).cuda().to(dtype).requires_grad_()
    q, k, v = x.permute(2, 0, 3, 1, 4)
    weights = torch.randn(2, 70, 4, 64).cuda().to(dtype).transpose(1, 2)
    for loss in (lambda out: out.sum(), lambda out: (out * weights).sum(), lambda out: out[:, :, ::2].float().square().mean()):
        with backward_calls() as backward:
            (got,) = torch.autograd.grad(loss(ours(q, k, v, is_causal=True)), x, retain_graph=True)
        assert backward.count == 1
        (wanted,) = torch.autograd.grad(loss(exact(q, k, v, is_causal=True)), x, retain_graph=True)
        check_gradients([got], [wanted], dtype)


@pytest.mark.parametrize("batch", [(), (3,), (2, 3, 2)], ids=len)
@BY_RAPT
def test_gradients_of_other_ranks(dtype, batch):
    """Of keys that are broadcast, too."""
    q = torch.randn(*batch, 4, 70, 64).cuda().to(dtype).requires_grad_()
    k = torch.randn(4, 90, 64).cuda().to(dtype).requires_grad_()
    with backward_calls() as backward:
        got = torch.autograd.grad(ours(q, k, k).sum(), (q, k))
    assert backward.count == 1
    wide = k.double().expand(*batch, 4, 90, 64)
    check_gradients(got, torch.autograd.grad(theirs(q.double(), wide, wide).sum(), (q, k)), dtype)


@BY_RAPT
def test_what_else_pytorch_differentiates(dtype):
    """Calls with masks, and with larger heads than rapt's entry takes."""
    mask = torch.rand(70, 90).cuda() > 0.3
    for d, options in ((40, {"attn_mask": mask}), (largest_heads(naive=False)[dtype] + 8, {})):
        rapt._refusals.warned.clear()
        inputs = learnt(dtype, 70, 90, d)
        with backward_calls() as backward, pytest.warns(rapt.torch.FallbackWarning, match="gradients on a GPU"):
            got = torch.autograd.grad(grouped(*inputs, **options).sum(), inputs)
        assert backward.count == 0
        check_gradients(got, torch.autograd.grad(exact(*inputs, **options).sum(), inputs), dtype)


@BY_RAPT
def test_gradients_on_the_current_stream(dtype):
    inputs = learnt(dtype, 500, 500, 128)
    grad = torch.randn(2, 6, 500, 128).cuda().to(dtype)
    wanted = torch.autograd.grad(grouped(*inputs), inputs, grad)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        late, out = torch.zeros_like(grad), grouped(*inputs)
        torch.cuda._sleep(100_000_000)
        late.copy_(grad)
        got = torch.autograd.grad(out, inputs, late)
        assert not stream.query()
    stream.synchronize()
    check_gradients(got, wanted, dtype)


@BY_RAPT
def test_gradients_in_a_graph(dtype):
    inputs = learnt(dtype)
    grad = torch.randn(2, 6, 70, 40).cuda().to(dtype)

    def step():
        return torch.autograd.grad(grouped(*inputs, is_causal=True), inputs, grad)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = step()
    for _ in range(2):
        grad.copy_(torch.randn_like(grad))
        for t in got:
            t.fill_(torch.nan)
        graph.replay()
        check_gradients(got, step(), dtype)


@BY_RAPT
def test_gradients_in_autocast(dtype):
    inputs = learnt(torch.float32)
    with backward_calls() as backward, torch.autocast("cuda", dtype=dtype):
        out = grouped(*inputs)
        got = torch.autograd.grad(out.float().square().sum(), inputs)
    assert (out.dtype, backward.count, {t.dtype for t in got}) == (dtype, 1, {torch.float32})
    check_gradients(got, torch.autograd.grad(exact(*inputs).square().sum(), inputs), dtype)


@BY_RAPT
def test_no_second_derivatives(dtype):
    inputs = learnt(dtype)
    first = torch.autograd.grad(grouped(*inputs).sum(), inputs, create_graph=True)
    with pytest.raises(RuntimeError, match="create_graph: got a gradient of rapt's attention"):
        first[0].sum().backward()


@BY_RAPT
def test_opcheck_of_gradients(dtype):
    q, k, v = learnt(dtype)
    torch.library.opcheck(rapt._sdpa_autograd.operator, (q, k, v, None, True, 0.2, True))


BACKWARD_CALLS = {
    "plain": {},
    "causal": {"causal": True, "align": "bottom_right"},
    "window and sinks": {"window": (20, 3), "align": "top_left", "sinks": torch.randn(6)},
    "modifiers": {"mask": torch.rand(70, 90) > 0.3, "bias": torch.randn(6, 1, 90), "alibi": torch.rand(6), "softcap": 5.0, "align": 0},
}


@pytest.mark.parametrize("arguments", BACKWARD_CALLS.values(), ids=BACKWARD_CALLS)
@pytest.mark.parametrize("dtype", largest_heads(naive=True))
def test_attention_backward_like_the_cpu(dtype, arguments):
    inputs = tensors(dtype)
    out, lse = rapt.attention(*inputs, **arguments, return_lse=True)
    given = (torch.randn_like(out), *inputs, out, lse)
    want = ["q", "k", "v", *(x for x in ("bias", "sinks", "alibi") if x in arguments)]
    dlse = torch.randn_like(lse)
    wanted = rapt.attention_backward(*given, **arguments, dlse=dlse, want=want)
    on_gpu = {key: x.cuda() if isinstance(x, torch.Tensor) else x for key, x in arguments.items()}
    got = rapt.attention_backward(*(t.cuda() for t in given), **on_gpu, dlse=dlse.cuda(), want=want)
    made = [pair for pair in zip(got, wanted, strict=True) if pair[0] is not None]
    assert len(made) == len(want)
    for a, b in made:
        check_gradients([a], [b], dtype)


@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("name", ["bias", "mask"])
@BY_RAPT
def test_modifiers_smaller_than_a_sequence(dtype, name, with_sinks):
    """Of lengths on a device: the rows and keys that a bias or mask has not are masked, in gradients too."""
    q, k, v, dout = (torch.randn(250, h, 64).cuda().to(dtype) for h in (4, 2, 2, 4))
    borders = torch.tensor([0, 150, 250], dtype=torch.int32).cuda()
    small = torch.randn(4, 100, 90).cuda() if name == "bias" else torch.rand(4, 100, 90).cuda() > 0.3
    whole = torch.full((4, 150, 150), -torch.inf, device="cuda") if name == "bias" else torch.zeros(4, 150, 150, device="cuda").bool()
    whole[:, :100, :90] = small
    sinks = torch.randn(4).cuda() if with_sinks else None
    made = []
    for modifier in (small, whole):
        options = {"cu_seqlens_q": borders, "cu_seqlens_k": borders, name: modifier, "sinks": sinks}
        out, lse = rapt.attention(q, k, v, return_lse=True, **options)
        made.append([out, *rapt.attention_backward(dout, q, k, v, out, lse, **options)[:3]])
    for got, wanted in zip(*made, strict=True):
        assert relative(got, wanted) < 1e-3


@BY_RAPT
def test_flash_attn_gradients(dtype):
    """Dense and ragged. Rows of no sequence have gradients of 0."""
    from rapt.flash_attn import flash_attn_func, flash_attn_varlen_func

    def dense(q, k, v, sinks, borders):
        out, lse, _ = flash_attn_func(q, k, v, causal=True, window_size=(30, 0), s_aux=sinks, return_attn_probs=True)
        return out.float().square().sum() + lse.sum()

    def ragged(q, k, v, sinks, borders):
        q, k, v = (x.flatten(0, 1) for x in (q, k, v))
        out = flash_attn_varlen_func(q, k, v, borders, borders, 75, 75, causal=True, s_aux=sinks)
        return out[:150].float().square().sum()

    tensors = [torch.randn(2, 80, h, 64).to(dtype) for h in (4, 2, 2)] + [torch.randn(4)]
    borders = torch.tensor([0, 75, 150], dtype=torch.int32)
    for function in (dense, ragged):
        on_cpu = [t.clone().requires_grad_() for t in tensors]
        inputs = [t.cuda().requires_grad_() for t in tensors]
        with backward_calls() as backward:
            got = torch.autograd.grad(function(*inputs, borders.cuda()), inputs)
        assert backward.count == 1
        check_gradients(got, torch.autograd.grad(function(*on_cpu, borders), on_cpu), dtype)
        if function is ragged:
            assert all((t.flatten(0, 1)[150:] == 0).all() for t in got[:3])
    wide = [t.float().cuda().requires_grad_() for t in tensors]
    with pytest.raises(NotImplementedError, match="q: got tensors on cuda:0, .*; wanted bfloat16 or float16"):
        dense(*wide, borders)


@BY_RAPT
def test_gradients_of_models(dtype):
    """By rapt. Sinks of rows are added to its gradients."""
    pytest.importorskip("transformers")
    from rapt import _model_attention as hooks

    for sinks, softcap, count in ((torch.randn(6), None, 1), (torch.randn(2, 6, 70, 1), None, 1), (None, 30.0, 1)):
        sinks = sinks if sinks is None else sinks.cuda().requires_grad_()
        options = (None, None, sinks, True, 30, softcap, 0.3, 0.0, None)
        inputs = learnt(dtype)
        wants = [*inputs, *(x for x in (sinks,) if x is not None)]
        numbers = [t if t is None else t.detach().double().requires_grad_() for t in (*inputs, sinks)]
        wanted_out = hooks.composed(*numbers[:3], None, None, numbers[3], *options[3:-1])
        wanted = torch.autograd.grad(wanted_out.square().sum(), [t for t in numbers if t is not None])
        for function in (hooks.operator, hooks.forward_with_gradients):
            with backward_calls() as backward:
                got = torch.autograd.grad(function(*inputs, *options).float().square().sum(), wants)
            assert backward.count == count
            check_gradients(got, wanted, dtype)


def test_opcheck():
    q, k, v = (t.cuda().requires_grad_() for t in tensors())
    torch.library.opcheck(rapt._sdpa_autograd.operator, (q, k, v, torch.rand(70, 90).cuda() > 0.3, False, 0.2, True))
    x = torch.randn(2, 9, 4, 16, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
    torch.library.opcheck(rapt._sdpa_autograd.operator, (x, x, x, None, True, None, False))


def test_compiled():
    def block(q, k, v):
        return functional.scaled_dot_product_attention(2 * q, k, v, is_causal=True, enable_gqa=True).relu()

    q, k, v = (t.cuda() for t in tensors())
    with rapt.torch.enabled(), kernel_calls() as kernel:
        got = torch.compile(block, fullgraph=True)(q, k, v)
        assert kernel.call_count == 1
        assert relative(got, block(q, k, v)) < 1e-6
    assert relative(got, exact(2 * q, k, v, is_causal=True).relu()) < 1e-6


def test_graph():
    q, k, v = (t.cuda() for t in tensors())
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        grouped(q, k, v, is_causal=True)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = grouped(q, k, v, is_causal=True)
    for _ in range(2):
        q.copy_(torch.randn_like(q))
        got.fill_(torch.nan)
        graph.replay()
        assert torch.equal(got, grouped(q, k, v, is_causal=True))


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("dtype", BOUNDS)
def test_the_extension_is_the_operators_kernel(dtype, mode):
    q, k, v = (t.cuda() for t in tensors(dtype))
    with kernel_calls() as kernel, mode():
        got = operator(q, k, v, None, True, None, True)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            again = operator(q, k, v, None, True, None, True)
        torch.cuda.current_stream().wait_stream(stream)
    assert (kernel.eager, kernel.by_python) == (2, 0)
    assert torch.equal(got, again) and relative(got, exact(q, k, v, is_causal=True)) < BOUNDS[dtype]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = operator(q, k, v, None, True, None, True)
    got.fill_(torch.nan)
    graph.replay()
    assert torch.equal(got, again)


def test_autocast():
    q, k, v = (t.cuda() for t in tensors())
    with torch.autocast("cuda", dtype=torch.float16), mock.patch.object(rapt._refusals, "_cuda_preference", return_value=""):
        got = grouped(q, k, v)
    assert got.dtype is torch.float16
    assert relative(got, exact(q.half(), k.half(), v.half())) < BOUNDS[torch.float16]


def test_what_pytorch_keeps():
    x = torch.randn(1, 1, 9, 600, device="cuda")
    with pytest.raises(rapt.torch.FallbackWarning, match="values of more than 576 columns"):
        ours(x, x, x)
    assert relative(operator(x, x, x, None, False, None, False), exact(x, x, x)) < 1e-6
    with pytest.raises(rapt.torch.FallbackWarning, match="different devices"):
        ours(x, x, x.cpu())
    with pytest.raises(ValueError, match="on another device than q"):
        operator(x, x, x.cpu(), None, False, None, False)
    with pytest.raises(ValueError, match="float64"):
        operator(x.double(), x.double(), x.double(), None, False, None, False)


def test_transformers_operator():
    pytest.importorskip("transformers")
    from rapt import _model_attention as hooks
    mask, bias, sinks = torch.rand(2, 1, 70, 90) > 0.3, torch.randn(1, 6, 70, 90), torch.randn(6)
    for options in [(None, None, None, True, 30, 2.0, 0.3), (mask, bias, sinks, False, -1, None, 0.25)]:
        wanted = hooks.composed(*tensors(), *options)
        on_gpu = [t.cuda() if isinstance(t, torch.Tensor) else t for t in (*tensors(), *options)]
        for function in (hooks.operator, hooks.forward):
            assert relative(function(*on_gpu), wanted) < 2e-6


ENTRIES = [
    e["name"]
    for e in rapt.info()["entries"]
    if e["backend"] == "cuda" and e["operation"] == "attention" and not e["unusable"] and {"f32", "bf16", "f16"} & set(e["dtypes"])
]


@pytest.mark.parametrize("entry", ENTRIES)
def test_like_triton(entry):
    pytest.importorskip("triton")
    import triton_attention

    taken = set()
    for dtype, bound in BOUNDS.items():
        for sq, sk, d in ((70, 90, 40), (1, 65, 128), (300, 300, 64)):
            q, k, v = (t.cuda() for t in tensors(dtype, sq, sk, d))
            try:
                assert rapt.explain(q, k, v, kernel=entry).entry == entry
            except ValueError as error:
                refusals = ["takes other element types"] + ["takes up to 64 rows"] * (sq > 1)
                assert any(reason in str(error) for reason in refusals)
                continue
            taken.add(dtype)
            for options in ({"causal": False}, {"causal": True, "scale": 0.3}):
                wanted, wanted_lse = triton_attention.attention(q, k, v, **options)
                got, lse = rapt.attention(q, k, v, align="bottom_right", return_lse=True, kernel=entry, **options)
                assert relative(got, wanted) < 2 * bound
                assert relative(lse, wanted_lse) < 2e-6
    assert taken


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("d", [64, 128])
def test_8_bit_products(d, causal):
    name = "attention_prefill.f8e4m3.cuda.sm90a"
    unusable = {e["name"]: e["unusable"] for e in rapt.info()["entries"]}.get(name, "not in this build")
    if unusable:
        pytest.skip(unusable)
    q, k, v = (t.cuda().to(torch.float8_e4m3fn) for t in tensors(torch.float32, 300, 500, d))
    scales = [torch.rand(t.shape[0], t.shape[1], 1, 1, device="cuda") + 0.5 for t in (q, k, v)]
    given = dict(zip(("q_scale", "k_scale", "v_scale"), scales), causal=causal, align="bottom_right", return_lse=True)
    assert rapt.explain(q, k, v, **given).entry != name
    out, lse = rapt.attention(q, k, v, kernel=name, **given)
    numbers = [t.float() * scale for t, scale in zip((q, k, v), scales)]
    wanted, wanted_lse = rapt.attention(*numbers, causal=causal, align="bottom_right", return_lse=True)
    assert out.dtype == torch.bfloat16 and 1e-3 < relative(out, wanted) < 0.06
    assert (lse - wanted_lse).abs().max() < 0.15
