"""rapt.attention on NumPy arrays and through DLPack, against float64."""

import os
import subprocess
import sys
import threading

import ml_dtypes
import numpy as np
import pytest
import rapt
import reference
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import assert_close, inputs


def test_dense_with_lse():
    q, k, v = inputs(2, 4, 2, 33, 50, 24, 17)
    out, lse = rapt.attention(q, k, v, return_lse=True)
    wanted, wanted_lse = reference.attention(q, k, v)
    assert out.dtype == lse.dtype == np.float32 and out.flags.c_contiguous
    assert_close(out, wanted)
    assert_close(lse, wanted_lse)


@pytest.mark.parametrize("align, offset", [("top_left", 0), ("bottom_right", 17), (5, 5), (-3, -3)])
def test_align(align, offset):
    q, k, v = inputs(1, 2, 2, 33, 50, 16)
    for options in ({"causal": True}, {"window": (4, 2)}, {"window": (None, 3)}, {"causal": True, "window": [7, -1]}):
        out = rapt.attention(q, k, v, align=align, **options)
        left, right = (-1 if side is None else side for side in options.get("window", (-1, -1)))
        wanted, _ = reference.attention(
            q, k, v, offset=offset, causal=options.get("causal", False), window=(left, right)
        )
        assert_close(out, wanted)


def test_scores():
    q, k, v = inputs(2, 4, 4, 9, 20, 16)
    rng = np.random.default_rng(1)
    options = {
        "scale": 0.3,
        "mask": rng.random((2, 1, 9, 20)) < 0.7,
        "bias": rng.standard_normal((4, 9, 20), dtype=np.float32),
        "softcap": 2.0,
        "alibi": rng.random(4, dtype=np.float32),
        "sinks": rng.standard_normal(4, dtype=np.float32),
    }
    out, lse = rapt.attention(q, k, v, align="top_left", return_lse=True, **options)
    wanted, wanted_lse = reference.attention(q, k, v, **options)
    assert_close(out, wanted)
    assert_close(lse, wanted_lse)


def test_a_row_without_keys_is_zero():
    q, k, v = inputs(1, 1, 1, 3, 4, 8)
    mask = np.ones((3, 4), bool)
    mask[1] = False
    out, lse = rapt.attention(q, k, v, mask=mask, return_lse=True)
    assert (out[0, 0, 1] == 0).all() and lse[0, 0, 1] == -np.inf
    assert (out[0, 0, 0] != 0).all()


def test_ragged():
    rng = np.random.default_rng(2)
    q_borders, k_borders = np.array([0, 3, 3, 10], np.int32), np.array([0, 5, 6, 20], np.int64)
    q = rng.standard_normal((10, 4, 16), dtype=np.float32)
    k, v = (rng.standard_normal((20, 2, 16), dtype=np.float32) for _ in range(2))
    out, lse = rapt.attention(
        *(q, k, v), cu_seqlens_q=q_borders, cu_seqlens_k=k_borders, causal=True, align="bottom_right", return_lse=True
    )
    for n in range(3):
        rows, keys = slice(*q_borders[n : n + 2]), slice(*k_borders[n : n + 2])
        one = [x.transpose(1, 0, 2)[None] for x in (q[rows], k[keys], v[keys])]
        offset = one[1].shape[2] - one[0].shape[2]
        wanted, wanted_lse = reference.attention(*one, causal=True, offset=offset)
        assert_close(out[rows], wanted[0].transpose(1, 0, 2))
        assert_close(lse[rows], wanted_lse[0].T)


def test_lengths_of_caches():
    q, k, v = inputs(3, 4, 2, 5, 40, 16)
    lengths = np.array([7, 0, 40], np.int32)
    k[0, :, 7:] = np.nan
    v[0, :, 7:] = np.nan
    out = rapt.attention(q, k, v, cache_seqlens=lengths)
    assert_close(out, reference.attention(q, np.nan_to_num(k), np.nan_to_num(v), lengths=lengths)[0])


@pytest.mark.parametrize("dtype, eps", [(ml_dtypes.bfloat16, 2.0**-8), (np.float16, 2.0**-11)])
def test_halves(dtype, eps):
    q, k, v = (x.astype(dtype) for x in inputs(2, 4, 2, 33, 50, 24))
    wanted, _ = reference.attention(q, k, v)
    out = rapt.attention(q, k, v)
    assert out.dtype == dtype
    assert_close(out, wanted, eps)
    wide = np.full(out.shape, np.nan, np.float32)
    assert rapt.attention(q.astype(np.float32), k, v, out=wide) is wide
    assert_close(wide, wanted, eps)
    rapt.attention(q, k, v, out=out, mask=np.ones(50, bool))
    assert_close(out, wanted, eps)


def test_strides_and_out_in_place():
    packed = np.random.default_rng(3).standard_normal((2, 33, 4, 3, 16), dtype=np.float32)
    q, k, v = (packed[:, :, :, i].transpose(0, 2, 1, 3) for i in range(3))
    room = np.full((2, 33, 4, 2, 16), np.nan, np.float32)
    out = room[:, :, :, 0].transpose(0, 2, 1, 3)
    assert rapt.attention(q, k, v, causal=True, out=out) is out
    assert_close(out, reference.attention(q, k, v, causal=True)[0])
    assert np.isnan(room[:, :, :, 1]).all()


def test_read_only_inputs_and_broadcast_views():
    q, k, v = inputs(3, 4, 4, 9, 9, 16)
    for x in (q, k, v):
        x.flags.writeable = False
    mask = np.broadcast_to(np.tri(9, dtype=bool), (3, 4, 9, 9))
    shared = [np.broadcast_to(x[:1, :1], x.shape) for x in (k, v)]
    assert_close(rapt.attention(q, *shared, mask=mask), reference.attention(q, *shared, causal=True)[0])


class OnlyDlpack:
    """What a library that rapt has never heard of shows of its arrays."""

    def __init__(self, array):
        self.array, self.shape, self.dtype = array, array.shape, f"other.{array.dtype}"

    def __dlpack__(self, **options):
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


def test_any_library_with_dlpack():
    q, k, v = inputs(1, 2, 2, 9, 9, 16)
    out = rapt.attention(*(OnlyDlpack(x) for x in (q, k, v)))
    assert type(out) is np.ndarray
    assert_close(out, reference.attention(q, k, v)[0])


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_any_problem(data):
    size = st.integers(1, 40)
    b, hk, group = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
    q, k, v = inputs(b, hk * group, hk, *(data.draw(size, label) for label in ("sq", "sk", "d", "dv")))
    # Any order of the dimensions in memory, with gaps.
    order = data.draw(st.permutations(range(4)))
    gap = data.draw(st.integers(1, 2))
    strided = []
    for x in (q, k, v):
        memory = np.zeros([x.shape[dim] * gap for dim in order], np.float32)
        view = memory[tuple(slice(None, None, gap) for _ in order)].transpose(np.argsort(order))
        view[...] = x
        strided.append(view)
    offset = data.draw(st.integers(-45, 45))
    causal = data.draw(st.booleans())
    window = tuple(data.draw(st.integers(-1, 45)) for _ in range(2))
    lengths = np.array([data.draw(st.integers(0, k.shape[2])) for _ in range(b)])
    out = rapt.attention(*strided, causal=causal, window=window, align=offset, cache_seqlens=lengths)
    wanted, _ = reference.attention(q, k, v, causal=causal, window=window, offset=offset, lengths=lengths)
    assert_close(out, wanted)


def test_threads_and_isas_agree():
    q, k, v = inputs(2, 4, 4, 130, 130, 32)
    one = rapt.attention(q, k, v, threads=1)
    assert (one == rapt.attention(q, k, v, threads=2)).all()
    assert (one == rapt.attention(q, k, v)).all()
    for isa in rapt.info()["isas"]:
        assert_close(rapt.attention(q, k, v, isa=isa), reference.attention(q, k, v)[0])
        assert f".{isa}" in rapt.explain(q, k, v, isa=isa).entry or isa in ("avx512bf16", "neonbf16", "amx")  # fp32 runs on vectors


def test_a_named_kernel_computes_the_call():
    q, k, v = inputs(1, 2, 2, 9, 9, 16)
    attention = [e for e in rapt.info()["entries"] if e["operation"] == "attention" and "f32" in e["dtypes"]]
    usable = [e["name"] for e in attention if not e["unusable"] and e["backend"] == "cpu"]
    takes = [name for name, reason in rapt.explain(q, k, v).candidates if not reason and name in usable]
    assert len(takes) > 1
    for name in takes:
        assert rapt.explain(q, k, v, kernel=name).entry == name
        assert_close(rapt.attention(q, k, v, kernel=name), reference.attention(q, k, v)[0])
    assert rapt.explain(q, k, v).entry == rapt.explain(q, k, v, kernel=None).entry


def test_python_runs_while_it_computes():
    q, k, v = inputs(1, 1, 1, 3000, 3000, 64)
    ticks = 0
    done = threading.Event()

    def compute():
        rapt.attention(q, k, v, threads=1)
        done.set()

    interval = sys.getswitchinterval()
    sys.setswitchinterval(60)  # whoever holds the GIL keeps it
    try:
        thread = threading.Thread(target=compute)
        thread.start()
        while not done.wait(0.001):
            ticks += 1
        thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert ticks > 1


def test_explain():
    q, k, v = inputs(1, 2, 2, 9, 9, 16)
    told = rapt.explain(q, k, v, causal=True, isa="generic")
    assert told.problem == "attention b=1 hq=2 sq=9 d=16 causal"
    assert told.entry.endswith(rapt.info()["isas"][-1] + told.entry[told.entry.rindex(".") :])
    reasons = dict(told.candidates)
    assert reasons[told.entry] == ""
    assert all(reason for name, reason in reasons.items() if ".avx2" in name)
    assert told.threads >= 1 and told.workspace_bytes > 0 and told.entry in str(told)
    with pytest.raises(TypeError, match="cusal"):
        rapt.explain(q, k, v, cusal=True)


def test_explain_problem():
    told = rapt.explain_problem("attention_backward dtype=bf16 hq=8 sq=512 d=64 causal", isa="generic", threads=1)
    assert told.problem == "attention_backward dtype=bf16 b=1 hq=8 sq=512 d=64 causal"
    assert told.entry.startswith("attention_backward.f32.generic") and dict(told.candidates)[told.entry] == ""
    assert told.threads == 1 and told.entry in str(told)
    assert rapt.explain_problem("delta_rule hq=2 t=9 d=16").entry.startswith("delta_rule")
    for text, why in {"backward sq=1": "attention_backward", "attention_backward square=1": "square"}.items():
        with pytest.raises(ValueError, match=why):
            rapt.explain_problem(text)


def test_info():
    info = rapt.info()
    assert info["version"] == rapt.__version__
    assert info["threads"] >= 1 and info["cpu"] and info["isas"]
    usable = [entry for entry in info["entries"] if not entry["unusable"]]
    kinds = {(entry["operation"], entry["phase"]) for entry in usable}
    assert kinds >= {("attention", "prefill"), ("attention", "decode"), ("append_kv", "all"), ("merge_states", "all")}
    assert all(entry["dtypes"] and 1 <= entry["min_head_dim"] <= entry["max_head_dim"] for entry in usable)
    cpu, cuda = info["backends"]
    assert cpu == {"name": "cpu", "library": "", "version": rapt.__version__, "missing": ""}
    found = any(entry["backend"] == "cuda" for entry in info["entries"])
    assert cuda["name"] == "cuda" and bool(cuda["library"]) == (cuda["version"] == rapt.__version__) == (not cuda["missing"]) == found


def test_the_gpu_backend_is_looked_for_when_it_is_asked_for(tmp_path):
    """The loader's log has the name of the file then, and not before."""
    file = tmp_path / "librapt_cuda.so"
    file.write_text("no library")
    environment = {**os.environ, "RAPT_CUDA_LIBRARY": str(file), "LD_DEBUG": "files"}
    call = "import numpy, rapt; q = numpy.ones((1, 1, 1, 8), numpy.float32); rapt.attention(q, q, q)"
    run = subprocess.run([sys.executable, "-c", call], env=environment, capture_output=True, text=True, check=True)
    assert "_core" in run.stderr and str(file) not in run.stderr
    ask = call + "; print(rapt.info()['backends'][1]['missing'])"
    run = subprocess.run([sys.executable, "-c", ask], env=environment, capture_output=True, text=True, check=True)
    assert str(file) in run.stderr
    assert run.stdout.startswith(f"RAPT_CUDA_LIBRARY is {file}: {file}: ")


def test_import_needs_numpy_only():
    code = "import rapt, sys; sys.exit(bool({'torch', 'ml_dtypes'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
def test_bias_slopes_and_sinks_of_16_bits(dtype):
    """They count as given: exactly as the same numbers in float32 do."""
    rng = np.random.default_rng(1)
    q, k, v = inputs(2, 4, 4, 9, 9, 16, 16)
    shapes = {"bias": (9, 9), "alibi": (4,), "sinks": (4,)}
    narrow = {name: rng.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}
    wide = {name: x.astype(np.float32) for name, x in narrow.items()}
    assert np.array_equal(rapt.attention(q, k, v, **narrow), rapt.attention(q, k, v, **wide))


def test_dropout_is_that_of_the_mask():
    q, k, v = inputs(2, 4, 2, 33, 50, 24)
    mask = rapt.dropout_mask(2, 4, 33, 50, 0.3, 2**64 - 1, 5)
    assert mask.dtype == bool and mask.shape == (2, 4, 33, 50) and abs(mask.mean() - 0.7) < 0.02
    assert (rapt.dropout_mask(2, 4, 20, 50, 0.3, 2**64 - 1, 5) == mask[:, :, :20]).all()
    assert (rapt.dropout_mask(2, 4, 33, 50, 0.3, 2**64 - 1) != mask).any()
    same = [rapt.dropout_mask(2, 4, 33, 50, 0.3, *pair) for pair in ((0, 2**32), (2**32, 0))]  # as the contract has it
    assert (same[0] == same[1]).all() and (same[0] != rapt.dropout_mask(2, 4, 33, 50, 0.3, 0)).any()
    # Of values of an identity out is the weights.
    one = np.broadcast_to(np.eye(50, dtype=np.float32), (2, 2, 50, 50))
    weights = rapt.attention(q, k, one)
    out, lse = rapt.attention(q, k, v, dropout_p=0.3, seed=2**64 - 1, offset=5, return_lse=True)
    wanted = (weights * mask / 0.7) @ v.repeat(2, axis=1)
    assert_close(out, wanted)
    assert (lse == rapt.attention(q, k, v, return_lse=True)[1]).all()
    assert (rapt.attention(q, k, v, dropout_p=0.0, seed=3) == rapt.attention(q, k, v)).all()
    assert (rapt.attention(q, k, v, dropout_p=1.0, seed=3) == 0).all()
    assert "dropout=0.3" in rapt.explain(q, k, v, dropout_p=0.3, seed=1).problem
