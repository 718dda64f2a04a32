// Which kernels attention_prefill has: plain data, by which operations/attention/cuda_choice.cpp names one and
// attention_prefill.cu compiles it.
#pragma once

#include "core/pod.hpp"

namespace rapt::cuda {

struct PrefillConfig {
  DType element = DType::bf16;   // of queries, weights and products: bf16 or f16
  int head_dim = 128;            // columns of a row in shared memory
  int columns = 128;             // of products: at most head_dim
  int block_k = 128;             // keys of a block
  int math_warpgroups = 2;       // each has 64 rows of the tile
  bool tma = false;              // TMA loads K and V; else the threads of the first warpgroup do
  bool modified = false;         // scores need more than a scale, or weights are dropped
  bool split_kv = false;         // few rows, over splits of their keys (attention_decode_m64)
  bool quantized = false;        // K and V are codes, which become elements on their way to shared memory
  bool dense = false;            // sequences of one length, whose results TMA stores
  bool warp_specialized = true;  // a warpgroup loads; else the warpgroups that multiply do

  friend constexpr bool operator==(const PrefillConfig&, const PrefillConfig&) = default;
};

// The kernel for a call whose rows TMA cannot store, or not load.
constexpr PrefillConfig without_dense(PrefillConfig c) {
  if (!c.warp_specialized) c.block_k = 128;
  c.dense = false, c.warp_specialized = true;
  return c;
}
// The kernel for a call whose keys TMA cannot load.
constexpr PrefillConfig without_tma(PrefillConfig c) {
  if (c.head_dim == 96) c.head_dim = 128;  // the widths in between are TMA's
  c.columns = c.head_dim, c.math_warpgroups = c.split_kv ? 1 : 2, c.tma = false;
  return c;
}

}  // namespace rapt::cuda
