// What the decode kernels take, for the host's choice among kernels too.
#pragma once

#include <cstdint>

namespace rapt::cuda {

// Rows (query tokens times heads of a group) of a sequence and kv head, up to which attention_decode does 16-bit types:
// for more, most rows of a tile of 64 are in use.
inline constexpr int kFewRows = 16;
// Rows up to which the keys of a sequence are split, dense or ragged.
inline constexpr int kDecodeMaxRows = 64;
inline constexpr std::int64_t kDecodeMaxHeadDim = 256;

// Gathered keys of a batch entry with so many query tokens are not split.
inline constexpr std::int64_t kManyListTokens = 128;

}  // namespace rapt::cuda
