// attention_decode's sizes for a DecodeConfig, and the parameters of its launches.
#pragma once

#include "cuda/hopper/codes.cuh"
#include "cuda/hopper/split_block.cuh"
#include "cuda/kernels/decode_config.hpp"
#include "cuda/kernels/kernels.hpp"
#include "cuda/tile/divisor.hpp"

namespace rapt::cuda {

constexpr int kDecodeWarps = 4, kDecodeThreads = 32 * kDecodeWarps;
constexpr int kGroupUnit = 32;  // columns; groups of scales are multiples, or whole rows
constexpr int kMaxUnits = kDecodeMaxHeadDim / kGroupUnit;

// The sizes of a kernel's tiles and rings.
template <DecodeConfig kConfig>
struct Decode {
  static constexpr DType kType = kConfig.kv_type;
  static constexpr bool kSameKeys = kConfig.path != DecodePath::general, kDense = kConfig.path == DecodePath::dense;
  static constexpr bool kModified = kConfig.path == DecodePath::shared_modifiers;
  using Coding = Codes<kType>;
  using Element = std::conditional_t<kType == DType::f16, __half, __nv_bfloat16>;  // of products
  static constexpr bool kIs16Bit = Coding::kIs16Bit;
  // Weights are 2^kShift times as large as in the formula: fp16 has a short range below 1.
  static constexpr float kShift = kType == DType::f16 ? 7 : 0;
  static constexpr int kSize = kConfig.head_dim, kTiles = kConfig.row_tiles;
  static constexpr int kComponents = kConfig.query_components;
  static constexpr int kRows = 8 * kTiles;
  static constexpr int kRowBytes = kSize / Coding::kChunk * 16, kChunks = kRowBytes / 16;
  static constexpr int kStepKeys = kRowBytes > 128 ? 16 : 32, kKeyTiles = kStepKeys / 16;
  static constexpr int kTileBytes = kStepKeys * kRowBytes;
  static constexpr int kOut = kRows * kSize;  // elements of a warp's O
  // Tiles of K or V in a warp's ring: as many as let four thread blocks share a multiprocessor where tiles have 4 KiB.
  static constexpr int kSlots = std::max(kTileBytes > 2048 ? 3 : 4, 4 * kOut / kTileBytes);
  static constexpr int kQueryPitch = 2 * kSize + 16;  // neighbouring rows lie in other banks
  static constexpr int kQueryBytes = kComponents * kRows * kQueryPitch;
  // Thread blocks on a multiprocessor, for which registers are limited.
  static constexpr int kFewBlocks = kOut > 2048 || kTiles > 2 ? 2 : 3, kManyBlocks = kTileBytes > 2048 ? 4 : 5;
  static constexpr int kBlocksPerMultiprocessor = kOut > 1024 || kComponents > 1 ? kFewBlocks : kManyBlocks;
  static_assert(kSplitUnit % kStepKeys == 0);
};

// Strides in units of 16 bytes, or of scales in floats. Products and sums may wrap; the addresses they lead to do not.
struct ShortStrides {
  std::uint32_t b, h, s, d;
};

// k or v of a call: its rows, and where a step's scales and zeros lie in a slot of the ring.
struct DecodeOperand {
  const std::uint8_t* data;
  ShortStrides of_rows;
  int bytes;  // of a row
  Strides stride;
  Quantization quant;
  ShortStrides of_scales, of_zeros;
  int groups;             // of columns, each with a scale; 0: no scales
  bool grouped, zeros;    // grouped: there are several scales or zeros, which apply to sums over units of 32 columns
  int scale_at, zero_at;  // offsets in bytes from the tile: [groups][keys]
  int group_of_unit[kMaxUnits];
};
// In the order in which thread blocks need them: each cache line of parameters is fetched from memory.
struct DecodeParams {
  SplitGrid grid;
  bool in_blocks;     // keys are in pages or a ring
  Divisor page_size;  // keys of a page
  // attention_decode_same_keys: a kv head's rows, its thread blocks for each tile of rows, and the most splits that it
  // has.
  int rows;
  Divisor blocks;
  int splits;
  float scale_log2;
  ShortStrides of_queries;  // if `vector_queries`
  DecodeOperand k, v;
  AttentionParams p;
  PartialResults partials;
  std::uint32_t code_offset;  // Codes::offset
  int slot_bytes;             // a tile, its scales and its zeros
  bool writes_output;         // every sequence has one split, and results go to out instead of partial results
  bool combines_in_cluster;   // the splits of a kv head are a cluster (or one block), which combines their partial
                              // results
  bool overlap_previous;      // starts while the previous launch of the call ends (programmatic dependent launch)
  bool modified;              // scores need more than a scale
  bool scaled_queries;        // queries have q_scale
  bool vector;                // rows of k and v are multiples of 16 bytes, and 32 bits address them and their scales
  bool vector_queries;        // the same of q
};

}  // namespace rapt::cuda
