"""The parts of rapt's C interface (include/rapt/rapt.h) that the comparison scripts call, through ctypes."""

import ctypes
from ctypes import (Structure, byref, c_char_p, c_float, c_int, c_int32, c_int64, c_size_t, c_void_p, sizeof)

EXECUTORS = {"default": 0, "serial": 1, "tbb": 2, "openmp": 3, "loaded_openmp": 5}
DTYPES = {"torch.float32": 0, "torch.float16": 1, "torch.bfloat16": 2}
DEVICES = {"cpu": 1, "cuda": 2}


class Tensor(Structure):
    _fields_ = [("data", c_void_p), ("dtype", c_int32), ("device_type", c_int32), ("device_index", c_int32),
                ("ndim", c_int32), ("shape", c_int64 * 4), ("strides", c_int64 * 4)]


class AttentionArgs(Structure):
    _fields_ = ([("struct_size", c_size_t)] +
                [(name, Tensor) for name in ("q", "k", "v", "out", "lse", "cu_seqlens_q", "cu_seqlens_k", "kv_seqlens",
                                             "block_table", "k_scale", "v_scale", "k_zero", "v_zero", "bias", "mask",
                                             "alibi", "sinks")] +
                [("kv_kind", c_int32), ("causal", c_int32), ("has_scale", c_int32), ("scale", c_float),
                 ("softcap", c_float), ("has_window", c_int32), ("window_left", c_int64), ("window_right", c_int64),
                 ("align", c_int32), ("align_offset", c_int64)])


class UserExecutor(Structure):
    _fields_ = [("name", c_char_p), ("concurrency", c_void_p), ("run", c_void_p), ("user", c_void_p)]


class Allocator(Structure):
    _fields_ = [("allocate", c_void_p), ("deallocate", c_void_p), ("user", c_void_p)]


class ContextOptions(Structure):
    _fields_ = [("struct_size", c_size_t), ("executor", c_int32), ("threads", c_int32), ("has_isa", c_int32),
                ("isa", c_int32), ("kernel", c_char_p), ("user_executor", UserExecutor), ("allocator", Allocator),
                ("observer", c_void_p), ("observer_user", c_void_p), ("stream", c_void_p)]


class EntryInfo(Structure):
    _fields_ = [(name, c_char_p) for name in ("name", "backend", "unusable", "opt_in")]


def entries(library):
    """Every entry of a librapt, in dispatch order: dicts of EntryInfo's fields."""
    lib = ctypes.CDLL(library)
    found, count = ctypes.POINTER(EntryInfo)(), c_size_t()
    if lib.rapt_entries(byref(found), byref(count)) != 0:
        raise RuntimeError("rapt_entries failed")
    return [{name: getattr(entry, name).decode() for name, _ in EntryInfo._fields_} for entry in found[:count.value]]


class Rapt:
    """A loaded librapt with one context; `stream` is a cudaStream_t, `kernel` the one entry it is to use."""

    def __init__(self, library, threads=0, executor="default", stream=None, kernel=None):
        self._lib = ctypes.CDLL(library)
        for name, result in (("rapt_last_error", c_char_p), ("rapt_version", c_char_p), ("rapt_plan_entry", c_char_p),
                             ("rapt_plan_threads", c_int)):
            getattr(self._lib, name).restype = result
        options = ContextOptions(struct_size=sizeof(ContextOptions), executor=EXECUTORS[executor], threads=threads,
                                 kernel=kernel and kernel.encode(), stream=stream)
        self._context = c_void_p()
        self._check(self._lib.rapt_context_create(byref(options), byref(self._context)))

    def _check(self, status):
        if status != 0:
            raise RuntimeError(f"rapt: {self._lib.rapt_last_error().decode()}")

    @property
    def version(self):
        return self._lib.rapt_version().decode()

    def attention_args(self, q, k, v, out, causal=False):
        """Arguments for torch tensors [b, h, s, d] of any strides; they must outlive the result."""
        args = AttentionArgs(struct_size=sizeof(AttentionArgs), causal=int(causal))
        for name, tensor in (("q", q), ("k", k), ("v", v), ("out", out)):
            setattr(args, name, Tensor(tensor.data_ptr(), DTYPES[str(tensor.dtype)], DEVICES[tensor.device.type],
                                       tensor.device.index or 0, tensor.dim(), (c_int64 * 4)(*tensor.shape),
                                       (c_int64 * 4)(*tensor.stride())))
        return args

    def attention(self, args):
        self._check(self._lib.rapt_attention(byref(args), self._context))

    def chosen(self, args):
        """(entry, threads) that dispatch chooses for `args`."""
        plan = c_void_p()
        self._check(self._lib.rapt_plan_create(byref(args), self._context, byref(plan)))
        try:
            return self._lib.rapt_plan_entry(plan).decode(), self._lib.rapt_plan_threads(plan)
        finally:
            self._lib.rapt_plan_destroy(plan)
