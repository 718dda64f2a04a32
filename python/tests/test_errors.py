"""Whatever is wrong is refused before anything is written, by an error that names the argument."""

import ctypes

import numpy as np
import pytest
import rapt
import torch
from rapt import _core
from reference import inputs

Q, K, V = inputs(2, 4, 2, 8, 8, 16)


def read_only():
    out = np.empty_like(Q)
    out.flags.writeable = False
    return out


@pytest.mark.parametrize(
    "change, error, message",
    [
        ({"q": Q.astype(np.float64)}, TypeError, r"q: got dtype float64; wanted float32, bfloat16, float16"),
        ({"v": V.astype(np.float16)}, TypeError, r"v: got dtype f16; wanted k's, f32"),
        ({"q": Q.astype(">f4")}, TypeError, r"q: got numpy.ndarray of >f4; wanted a NumPy array"),
        ({"q": [1.0]}, TypeError, r"q: got builtins.list"),
        ({"k": "k"}, TypeError, r"k: got builtins.str; wanted a NumPy array"),
        ({"k": None}, ValueError, r"k: got no tensor; wanted \[b, hk, sk, dk\]"),
        ({"q": Q[0]}, ValueError, r"q: got shape \[4, 8, 16\]; wanted \[b, hq, sq, d\]"),
        ({"q": Q[None]}, ValueError, r"out: got 5 dimensions|q: got 5 dimensions; wanted 1 to 4"),
        ({"q": Q[:, :3]}, ValueError, r"k: got 2 heads for 3 query heads; wanted a divisor"),
        ({"q": Q[:, :, ::-1]}, ValueError, r"q: got stride -16; wanted strides of 0 or more"),
        ({"q": np.ma.array(Q)}, TypeError, r"q: got a masked array"),
        ({"mask": np.ones((8, 8), np.float32)}, TypeError, r"mask: got dtype float32; wanted bool \(additive masks are a bias\)$"),
        ({"bias": np.ones((8, 8))}, TypeError, r"bias: got dtype float64; wanted float32, bfloat16 or float16$"),
        ({"sinks": np.ones(4)}, TypeError, r"sinks: got dtype float64; wanted float32, bfloat16 or float16$"),
        ({"alibi": np.ones(4, np.int32)}, TypeError, r"alibi: got dtype int32; wanted float32, bfloat16 or float16$"),
        ({"k_scale": np.ones((2, 2, 8, 1))}, TypeError, r"k_scale: got dtype float64; wanted float32$"),
        ({"cu_seqlens_q": np.array([0.0, 16.0])}, TypeError, r"cu_seqlens_q: got dtype float64; wanted int32 or int64$"),
        ({"bias": np.ones((3, 8), np.float32)}, ValueError, r"bias: got shape \[3, 8\]; wanted a shape that broadcasts"),
        ({"scale": float("nan")}, ValueError, r"scale: got nan; wanted a finite number"),
        ({"scale": "1"}, TypeError, r"scale: got '1'; wanted a number"),
        ({"scale": 1e39}, ValueError, r"scale: got 1e\+39; wanted a finite number"),
        ({"softcap": -1.0}, ValueError, r"softcap: got -1.0; wanted"),
        ({"softcap": 1e-31}, ValueError, r"softcap: got 1e-31; wanted"),
        ({"dropout_p": 0.5}, ValueError, r"seed: got None, with a dropout_p of 0.5; wanted an int from 0 to 2\*\*64 - 1"),
        ({"dropout_p": 1.5, "seed": 1}, ValueError, r"dropout_p: got 1.5; wanted a number from 0 to 1"),
        ({"dropout_p": float("nan"), "seed": 1}, ValueError, r"dropout_p: got nan; wanted a number from 0 to 1"),
        ({"dropout_p": "1", "seed": 1}, TypeError, r"dropout_p: got '1'; wanted a number"),
        ({"dropout_p": 0.5, "seed": -1}, ValueError, r"seed: got -1; wanted an int from 0 to 2\*\*64 - 1"),
        ({"dropout_p": 0.5, "seed": 0.5}, TypeError, r"seed: got 0.5; wanted an int"),
        ({"dropout_p": 0.5, "seed": 1, "offset": 2**64}, ValueError, r"offset: got 18446744073709551616; wanted an int"),
        ({"causal": 1}, TypeError, r"causal: got 1; wanted True or False"),
        ({"window": 3}, TypeError, r"window: got 3; wanted None or a pair"),
        ({"window": (1, 2, 3)}, TypeError, r"window: got \(1, 2, 3\); wanted None or a pair"),
        ({"window": (-2, 0)}, ValueError, r"window: got -2; wanted -1"),
        ({"align": "left"}, ValueError, r"align: got 'left'; wanted None, \"top_left\""),
        ({"align": 0.5}, TypeError, r"align: got 0.5; wanted None, \"top_left\""),
        ({"scale": b"0.5"}, TypeError, r"scale: got b'0.5'; wanted a number"),
        ({"scale": bytearray(b"0.5")}, TypeError, r"scale: got bytearray.*; wanted a number"),
        ({"softcap": 10**400}, ValueError, r"softcap: got 1000.*; wanted a number that a float holds"),
        ({"align": 2**70}, ValueError, r"align: got 11805\d+; wanted a number of 64 bits"),
        ({"causal": True, "k": K[:, :, :5], "v": V[:, :, :5]}, ValueError, r"align: got none, with 8 queries and 5 keys"),
        ({"alibi": np.ones(3, np.float32)}, ValueError, r"alibi: got shape \[3\]; wanted q's heads hq = 4"),
        ({"cu_seqlens_q": np.array([0, 16])}, ValueError, r"q: got shape \[2, 4, 8, 16\]; wanted \[total_q, hq, d\]"),
        ({"cu_seqlens_k": np.array([0, 16])}, ValueError, r"k: got shape \[2, 2, 8, 16\]; wanted \[total_k, hk, dk\]"),
        ({"cache_seqlens": np.array([8, 9])}, ValueError, r"cache_seqlens: got length 9 of sequence 1; wanted 0 to sk = 8"),
        ({"cache_seqlens": np.array([8.0, 8.0])}, TypeError, r"cache_seqlens: got dtype float64; wanted int32 or int64$"),
        ({"block_table": np.zeros((2, 1), np.int32)}, ValueError, r"cache_seqlens: got no tensor; wanted \[b\] for pages"),
        ({"ring": True}, ValueError, r"cache_seqlens: got no tensor; wanted \[b\] for a ring"),
        ({"ring": True, "block_table": np.zeros((2, 1), np.int32)}, ValueError, r"ring: got True with a block_table"),
        ({"block_table": np.zeros((2, 1), np.int32), "cu_seqlens_k": np.array([0, 8])}, ValueError, r"cu_seqlens_k: got"),
        ({"block_table": np.zeros((2, 1)), "cache_seqlens": np.array([8, 8])}, TypeError, r"block_table: got dtype float64; wanted int32"),
        ({"indices": np.full((2, 8, 3), 8)}, ValueError, r"indices: got key 8 at \[0, 0, 0\]; wanted 0 to 7, one of k's rows, or negative, for no key"),
        ({"indices": np.zeros((2, 7, 3), np.int32)}, ValueError, r"indices: got shape \[2, 7, 3\]; wanted q's rows sq = 8"),
        ({"indices": np.zeros((2, 8, 3))}, TypeError, r"indices: got dtype float64; wanted int32 or int64"),
        ({"counts": np.zeros((2, 8), np.int32)}, ValueError, r"counts: got an array without indices; wanted both"),
        ({"return_lse": 1}, TypeError, r"return_lse: got 1; wanted True or False"),
        ({"return_lse": None}, TypeError, r"return_lse: got None; wanted True or False"),
        ({"indices": np.zeros((2, 8, 3), np.int32), "counts": np.full((2, 8), 4)}, ValueError, r"counts: got 4 keys of token 0"),
        ({"indices": np.zeros((2, 8, 3), np.int32), "causal": True}, ValueError, r"causal: got one for gathered keys; wanted none"),
        ({"indices": np.zeros((2, 8, 3), np.int32), "ring": True}, ValueError, r"indices: got gathered keys with cu_seqlens_k"),
        ({"k": K.astype(np.uint8)}, TypeError, r"k: got dtype uint8; wanted .* uint8 with kv_dtype"),
        ({"kv_dtype": "i4x2"}, TypeError, r"k: got dtype float32; wanted uint8, as kv_dtype is given"),
        ({"kv_dtype": "int4"}, ValueError, r"kv_dtype: got 'int4'; wanted None, \"i4x2\", \"i8\""),
        ({"k": K.astype(np.int8), "v": V.astype(np.int8)}, ValueError, r"k_scale: got no tensor; wanted scales for i8"),
        ({"k_scale": np.ones((2, 2, 8, 1), np.float32)}, ValueError, r"k_scale: got scales for f32; wanted none"),
        ({"threads": 0}, ValueError, r"threads: got 0; wanted 1 or more, or None for all"),
        ({"threads": True}, TypeError, r"threads: got True"),
        ({"isa": "sse9"}, ValueError, r"isa: got \"sse9\"; wanted an ISA of this build and CPU"),
        ({"isa": ""}, ValueError, r"isa: got \"\""),
        ({"kernel": ""}, ValueError, r"kernel: got \"\"; wanted the name of an entry"),
        ({"kernel": 1}, TypeError, r"kernel: got 1; wanted None or the name of an entry"),
        ({"kernel": "attention_fast"}, ValueError, r"kernel: got \"attention_fast\""),
        ({"kernel": "append_kv.f64.generic"}, ValueError, r"kernel: got \"append_kv.f64.generic\"; wanted an entry of attention"),
        ({"kernel": "\ud800"}, ValueError, r"kernel: got .*; wanted the name of an entry"),
        ({"out": np.empty((2, 4, 8, 15), np.float32)}, ValueError, r"out: got shape \[2, 4, 8, 15\]; wanted v's head dimension"),
        ({"out": Q}, ValueError, r"out: got memory shared with q"),
        ({"out": read_only()}, ValueError, r"out: got a read-only array; wanted one that can be written"),
        ({"out": np.broadcast_to(np.float32(0), Q.shape)}, ValueError, r"out: got a read-only array"),
    ],
)
def test_refusals(change, error, message):
    arguments = {"q": Q, "k": K, "v": V} | change
    for call in (rapt.attention, rapt.explain):
        with pytest.raises(error, match=message):
            call(**arguments)


def test_pages_without_a_block_table():
    pages, lengths = np.zeros((5, 2, 8, 16), np.float32), np.array([3, 4])
    for call in (
        lambda: rapt.attention(Q, pages, pages, cache_seqlens=lengths),
        lambda: rapt.append_kv(K, V, pages, pages, lengths),
    ):
        with pytest.raises(ValueError, match="^block_table: got None, with k of batch 5 and cache_seqlens of 2; wanted a block_table"):
            call()


def test_a_keyword_that_is_nearly_right():
    with pytest.raises(TypeError, match=r"^explain\(\) got .* 'seqlens'. Did you mean cache_seqlens or cu_seqlens_k or cu_seqlens_q\?$"):
        rapt.explain(Q, K, V, seqlens=np.array([8, 8]))
    with pytest.raises(TypeError, match=r"^attention_backward\(\) got .* 'seqlens'. Did you mean cache_seqlens or cu_seqlens_k or cu_seqlens_q\?$"):
        rapt.attention_backward(Q, Q, K, V, Q, Q[..., 0], seqlens=np.array([8, 8]))
    with pytest.raises(TypeError, match=r"^explain\(\) got an unexpected keyword argument 'xyz'$"):
        rapt.explain(Q, K, V, xyz=1)


def test_nothing_is_written_when_refused():
    out = np.full(Q.shape, 7, np.float32)
    with pytest.raises(ValueError, match="scale"):
        rapt.attention(Q, K, V, out=out, scale=float("inf"))
    assert (out == 7).all()


def tensors():
    return [torch.from_numpy(x.copy()) for x in (Q, K, V)]


@pytest.mark.parametrize(
    "spoil, error, message",
    [
        (lambda t: t.double(), TypeError, r"k: got dtype torch.float64; wanted float32, bfloat16, float16"),
        (lambda t: t.to("meta"), ValueError, r"k: got a tensor on meta; wanted one on the cpu"),
        (lambda t: t.to_sparse(), TypeError, r"k: got torch.Tensor without strided memory"),
        (lambda t: t.requires_grad_(), ValueError, r"k: got a tensor that requires grad; wanted one that does not"),
        (lambda t: torch.complex(t, t).conj().imag, ValueError, r"k: got a tensor that is negated when it is read"),
        (lambda t: torch.nested.nested_tensor([t[0]], layout=torch.jagged), (TypeError, ValueError), r"k: got"),
    ],
)
@pytest.mark.parametrize("by_table", [True, False])
def test_refusals_of_tensors(spoil, error, message, by_table):
    q, k, v = tensors()
    _core.read_torch_by_table(by_table)
    try:
        with pytest.raises(error, match=message):
            rapt.attention(q, spoil(k), v)
    finally:
        _core.read_torch_by_table(True)


class OnAnotherDevice:
    """An array that says it lies there, for what reads DLPack."""

    def __init__(self, array, device):
        self.array, self.shape, self.dtype, self.device = array, array.shape, array.dtype, device

    def __dlpack_device__(self):
        return self.device

    def __dlpack__(self, **options):
        capsule = self.array.__dlpack__()
        pointer = ctypes.pythonapi.PyCapsule_GetPointer
        pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
        device = (ctypes.c_int32 * 2).from_address(pointer(capsule, b"dltensor") + ctypes.sizeof(ctypes.c_void_p))
        device[:] = self.device
        return capsule


@pytest.mark.parametrize("device, name", [((2, 1), "cuda:1"), ((10, 0), "DLPack device 10")])
def test_arrays_of_other_libraries_on_devices(device, name):
    q, k, v = (OnAnotherDevice(x.copy(), device) for x in (Q, K, V))
    with pytest.raises(ValueError, match=rf"q: got test_errors.OnAnotherDevice on {name}; wanted an array on the cpu") as error:
        rapt.attention(q, k, v)
    cuda = any(entry["backend"] == "cuda" for entry in rapt.info()["entries"])
    advice = ("torch.from_dlpack(q)" if cuda else "RAPT_CUDA_LIBRARY") if device[0] == 2 else ""
    assert advice in str(error.value)


class Exporter:
    """An array of a library whose DLPack is as old, or as unwilling to copy, as its options say."""

    def __init__(self, array, max_version=(1, 0), keywords=("max_version", "copy", "dl_device", "stream"), copies=False):
        self.array, self.shape, self.dtype = array, array.shape, f"other.{array.dtype}"
        self.max_version, self.keywords, self.copies = max_version, keywords, copies

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()

    def __dlpack__(self, **options):
        if not set(options) <= set(self.keywords):
            raise TypeError("unexpected keyword argument")
        if self.copies and options.get("copy") is False:
            raise BufferError("memory that must be copied")
        version = min(options.get("max_version") or (0, 8), self.max_version)
        return (self.array.copy() if self.copies else self.array).__dlpack__(max_version=version)


UNSAID = r"out: got test_errors.Exporter, which does not say whether it can be written; wanted a NumPy array"
EXPORTERS = [
    ({}, ""),
    ({"max_version": (0, 8)}, UNSAID),  # as JAX, whose arrays are immutable
    ({"keywords": ()}, UNSAID),
    ({"copies": True}, UNSAID),
]


@pytest.mark.parametrize("options, message", EXPORTERS)
def test_out_of_other_libraries(options, message):
    memory = np.full(Q.shape, 7, np.float32)
    out = Exporter(memory, **options)
    if message:
        with pytest.raises(ValueError, match=message):
            rapt.attention(Q, K, V, out=out)
        assert (memory == 7).all()
        return
    assert rapt.attention(Q, K, V, out=out) is out
    assert (memory == rapt.attention(Q, K, V)).all()
    memory.flags.writeable = False
    with pytest.raises(ValueError, match="out: got a read-only array"):
        rapt.attention(Q, K, V, out=out)


def test_arrays_of_jax_are_not_written():
    jax = pytest.importorskip("jax")
    with jax.default_device(jax.devices("cpu")[0]):  # a GPU's are refused for being there
        out = jax.numpy.full(Q.shape, 7.0)
        for array in (out, out.astype("bfloat16")):
            with pytest.raises(ValueError, match="out: got .*(read-only|whether it can be written)"):
                rapt.attention(Q, K, V, out=array)
            assert (array == 7).all()
        q, k, v = (jax.numpy.asarray(x) for x in (Q, K, V))
        assert (rapt.attention(q, k, v) == rapt.attention(Q, K, V)).all()


def test_out_that_requires_grad():
    q, k, v = tensors()
    out = torch.empty_like(q, requires_grad=True)
    with torch.no_grad(), pytest.raises(ValueError, match="out: got a tensor that requires grad"):
        rapt.attention(q, k, v, out=out)


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
def test_fake_tensors_have_no_memory():
    with torch._subclasses.FakeTensorMode():
        fake = torch.empty(2, 4, 8, 16)
        with pytest.raises((TypeError, ValueError), match="q: got .*(without strided|null pointer)"):
            rapt.attention(fake, fake, fake)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_cuda():
    q, k, v = tensors()
    with pytest.raises(ValueError, match="k: got a tensor (on cuda:0|that is not on the cpu)"):
        rapt.attention(q, k.cuda(), v)


@pytest.mark.parametrize(
    "arguments, error, message",
    [
        ((1, 2, 3, 4, 1.5, 1), ValueError, "p: got 1.5; wanted a number from 0 to 1"),
        ((1, 2, 3, 4, "1", 1), TypeError, "p: got '1'; wanted a number"),
        ((1, 2, 3, 4, 0.5, None), TypeError, "seed: got None; wanted an int"),
        ((1, 2, 3, 4, 0.5, 1, -1), ValueError, "offset: got -1; wanted an int"),
        ((1, -2, 3, 4, 0.5, 1), ValueError, r"hq: got -2; wanted 0 to 2\*\*48"),
        ((1, 2, 3, 2**48 + 1, 0.5, 1), ValueError, r"sk: got 281474976710657; wanted 0 to 2\*\*48"),
        ((1.5, 2, 3, 4, 0.5, 1), TypeError, "b: got 1.5; wanted an int"),
        ((1, 2, True, 4, 0.5, 1), TypeError, "sq: got True; wanted an int"),
    ],
)
def test_dropout_masks_that_are_none(arguments, error, message):
    with pytest.raises(error, match=message):
        rapt.dropout_mask(*arguments)
