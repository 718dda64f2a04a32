"""Attention in Triton, written from the definition: rapt's CUDA entries are held against it, and share nothing with it.

softmax(scale * q k^T) v for q [b, hq, sq, d], k [b, hk, sk, d] and v [b, hk, sk, dv] of one type and any strides; query
head h reads key head h // (hq / hk). With `causal`, row i attends keys up to i + sk - sq. fp32 is multiplied as fp32;
bf16 and fp16 on tensor cores, with the weights rounded to their type. Sums, maxima and exponentials are fp32.
"""

import torch
import triton
import triton.language as tl


@triton.jit
def _kernel(
    q, k, v, out, lse,
    qb, qh, qs, qd, kb, kh, ks, kd, vb, vh, vs, vd, ob, oh, os, od,  # strides
    hq, group, sq, sk, d, dv, scale,
    CAUSAL: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64)
    b, h = head // hq, head % hq
    kv = h // group
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column, value = tl.arange(0, D), tl.arange(0, DV)

    q_at = q + b * qb + h * qh + row[:, None] * qs + column[None, :] * qd
    queries = tl.load(q_at, mask=(row[:, None] < sq) & (column[None, :] < d), other=0.0)
    total = tl.zeros([ROWS], tl.float32)
    most = tl.full([ROWS], float("-inf"), tl.float32)
    result = tl.zeros([ROWS, DV], tl.float32)

    for start in range(0, sk, KEYS):
        key = start + tl.arange(0, KEYS)
        k_at = k + b * kb + kv * kh + key[None, :] * ks + column[:, None] * kd
        keys = tl.load(k_at, mask=(key[None, :] < sk) & (column[:, None] < d), other=0.0)
        v_at = v + b * vb + kv * vh + key[:, None] * vs + value[None, :] * vd
        values = tl.load(v_at, mask=(key[:, None] < sk) & (value[None, :] < dv), other=0.0)

        scores = tl.dot(queries, keys, input_precision="ieee") * scale
        seen = (key[None, :] < sk) & (row[:, None] < sq)
        if CAUSAL:
            seen = seen & (key[None, :] <= row[:, None] + sk - sq)
        scores = tl.where(seen, scores, float("-inf"))

        above = tl.maximum(most, tl.max(scores, 1))
        safe = tl.where(above == float("-inf"), 0.0, above)  # of a row that has seen no key yet
        weights = tl.exp(scores - safe[:, None])
        before = tl.exp(most - safe)
        total = total * before + tl.sum(weights, 1)
        result = result * before[:, None] + tl.dot(weights.to(values.dtype), values, input_precision="ieee")
        most = above

    result = tl.where(total[:, None] > 0, result / total[:, None], 0.0)
    out_at = out + b * ob + h * oh + row[:, None] * os + value[None, :] * od
    tl.store(out_at, result.to(out.dtype.element_ty), mask=(row[:, None] < sq) & (value[None, :] < dv))
    tl.store(lse + head * sq + row, most + tl.log(total), mask=row < sq)


def attention(q, k, v, causal=False, scale=None):
    """(out [b, hq, sq, dv] of q's type, lse [b, hq, sq] of fp32)."""
    (b, hq, sq, d), (hk, sk, dv) = q.shape, v.shape[1:]
    out = q.new_empty((b, hq, sq, dv))
    lse = q.new_empty((b, hq, sq), dtype=torch.float32)
    strides = [size for tensor in (q, k, v, out) for size in tensor.stride()]
    sides = [max(16, triton.next_power_of_2(size)) for size in (d, dv)]  # the least that tl.dot takes
    rows, keys = 64, 32
    _kernel[(triton.cdiv(sq, rows), b * hq)](
        *(q, k, v, out, lse, *strides, hq, hq // hk, sq, sk, d, dv, d**-0.5 if scale is None else scale),
        **{"CAUSAL": causal, "ROWS": rows, "KEYS": keys, "D": sides[0], "DV": sides[1], "num_stages": 1},
    )
    return out, lse
