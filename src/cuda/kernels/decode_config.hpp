// Which kernels attention_decode has: plain data, by which operations/attention/cuda_choice.cpp names one and
// attention_decode.cu compiles it.
#pragma once

#include "core/pod.hpp"

namespace rapt::cuda {

// What a kernel may take for granted, so that it finds its keys with fewer instructions.
enum class DecodePath : std::uint8_t {
  general,
  same_keys,         // all rows of a sequence see the same keys, and rows of q, k and v are whole times 16 bytes
  dense,             // and sequences have one length, and are not in pages
  shared_modifiers,  // as same_keys, with a mask or a bias that all rows of a sequence share
};

struct DecodeConfig {
  DType kv_type = DType::bf16;  // of keys and values: 16-bit elements, or codes
  int head_dim = 128;           // columns of a row in shared memory
  int row_tiles = 1;            // of 8 query rows
  int query_components = 1;     // numbers of bf16 whose sum is a query's element
  DecodePath path = DecodePath::general;

  friend constexpr bool operator==(const DecodeConfig&, const DecodeConfig&) = default;
};

constexpr DecodeConfig with_path(DecodeConfig c, DecodePath path) {
  c.path = path;
  return c;
}

}  // namespace rapt::cuda
