// Part of attention_decode.cpp: the state of one work item, and its scratch. The other decode_*.hpp have functions
// that work on it.
#pragma once

#include "cpu/kernels/attention_table.hpp"
#include "cpu/tile/bump_allocator.hpp"
#include "cpu/tile/decode_products.hpp"
#include "cpu/tile/decode_scores.hpp"
#include "cpu/tile/pack.hpp"

namespace rapt::cpu::RAPT_ISA {
namespace {

constexpr std::int64_t kMaxRows = 64, kMaxQueryBlocks = kMaxRows / kLanes;

// Keys of a block: half as many where rows are long, so that K and V of a block stay in L1 or L2. It depends on the
// problem alone, since blocks decide the order of sums.
inline std::int64_t block_keys(const AttentionParams& p) {
  return p.kv_type == DType::f32 && p.d + p.dv > 256 ? kKeysOfBlock / 2 : kKeysOfBlock;
}

struct AttentionDecodeScratch {
  std::int64_t q_stride, o_stride;    // of rows, padded to whole vectors
  QueryBlock* q_blocks;               // [rows / kLanes]
  Row* row;                           // of all query blocks
  float* q;                           // Q in tiles of a query block's rows, as DotsTile has them
  float* o;                           // [rows][o_stride] O of this accumulation interval
  float* o_accum;                     // [rows][o_stride] O of earlier accumulation intervals
  float *neg_m, *l, *l_compensation;  // [rows] as in QueryBlock
  float* q_row;                       // a query, widened
  float* scaled_row;                  // a key times its scale
  float* s;              // [keys, and those that a tile computes past the last][stride] scores, then weights
  float* scores_before;  // the scores before they became weights
  float* sums;           // [kLanes][kLanes] scratch of to_weights()
  float *block_max, *block_max_exponent, *zero;  // [kLanes]
  float *k, *v;                                  // a block's rows, where they are packed
  RowScales k_scales, v_scales;

  AttentionDecodeScratch(BumpAllocator& allocator, const AttentionShape& shape) {
    const std::int64_t rows = round_up(shape.rows, kLanes);
    q_stride = round_up(shape.d, kLanes), o_stride = round_up(shape.dv, kLanes);
    q_blocks = allocator.take<QueryBlock>(rows / kLanes);
    row = allocator.take<Row>(rows);
    q = allocator.take<float>(rows * q_stride);
    q_row = allocator.take<float>(q_stride), scaled_row = allocator.take<float>(q_stride);
    o = allocator.take<float>(rows * o_stride);
    o_accum = allocator.take<float>(rows * o_stride);
    neg_m = allocator.take<float>(rows);
    l = allocator.take<float>(rows);
    l_compensation = allocator.take<float>(rows);
    s = allocator.take<float>((kKeysOfBlock + kMaxKeysOfTile) * kLanes);
    scores_before = allocator.take<float>(kKeysOfBlock * kLanes);
    sums = allocator.take<float>(kLanes * kLanes);
    for (float** lanes : {&block_max, &block_max_exponent, &zero}) *lanes = allocator.take<float>(kLanes);
    k = allocator.take<float>(kKeysOfBlock * q_stride);
    v = allocator.take<float>(kKeysOfBlock * o_stride);
    k_scales = take_scales(allocator, q_stride), v_scales = take_scales(allocator, o_stride);
  }
  static RowScales take_scales(BumpAllocator& allocator, std::int64_t n) {
    const std::int64_t count = round_up(n, kMinGroup) / kMinGroup * kKeysOfBlock + kMaxKeysOfTile;
    float* const scale = allocator.take<float>(count);
    return {scale, allocator.take<float>(count), 0};
  }
};

// Whether a row has one scale and no zero. Then the scale multiplies scores or weights.
inline bool one_scale_per_row(const Quantization& quant, std::int64_t n) {
  return quant.scale && !quant.zero && quant.group == n;
}

// Whether a block's rows are packed. Reading them in place saves a pass, but packing is needed for rows too short or
// strided for whole vectors, for groups that the products do not take, and where elements would be widened for too
// many tiles of rows.
inline bool must_pack(const AttentionParams& p, std::int64_t rows) {
  const auto in_place = [&](const Quantization& quant, std::int64_t n) {
    return !quant.scale || one_scale_per_row(quant, n) || has_products_of_groups(p.kv_type, quant, n);
  };
  if (!in_place(p.k_quant, p.d) || !in_place(p.v_quant, p.dv)) return true;
  // Widening costs most for e4m3, and for everything dequantised where vectors are short.
  const bool dequantized = p.kv_type == DType::i4x2 || p.k_quant.group < p.d || p.v_quant.group < p.dv;
  const std::int64_t tiles = p.kv_type == DType::f8e4m3 || (kLanes < 8 && dequantized) ? 1 : 4;
  return p.k_stride.d != 1 || p.v_stride.d != 1 || p.d < kLanes || p.dv < kLanes || p.k_tail.size > 0 ||
         (p.kv_type != DType::f32 && rows > tiles * kMaxRowsOfTile);
}

// The addresses of a block's rows, indexed by key.
struct BlockRows {
  std::int64_t k0, from, end;  // keys; those before `from` must not be read, since their pages may not exist
  const std::byte *k[kKeysOfBlock], *v[kKeysOfBlock], *tail[kKeysOfBlock];
};

struct DecodeItem {
  DecodeItem(const AttentionParams& params, const WorkItem& work_item, std::byte* scratch)
      : p(params),
        item(work_item),
        head(params, work_item),
        allocator(scratch),
        w(allocator, {params.sk, params.d, params.dv, work_item.row_end - work_item.row_begin}),
        packed(must_pack(params, work_item.row_end - work_item.row_begin)),
        shared(packed && p.dv >= kLanes && keys_begin_with_values(p) && !one_scale_per_row(p.k_quant, p.d) &&
               !one_scale_per_row(p.v_quant, p.dv) && !deinterleaves_keys()),
        k_products(products_of_rows(keys_of(p))),
        v_products(products_of_rows(values_of(p))),
        d(max(p.d, kLanes)),
        dv(max(p.dv, kLanes)) {
    store(w.zero, vec(0.f));
    for (std::int64_t j = 0; packed && j < kKeysOfBlock; ++j) {
      packed_k[j] = reinterpret_cast<const std::byte*>(w.k + j * w.q_stride);
      packed_v[j] = reinterpret_cast<const std::byte*>(w.v + j * w.o_stride);
    }
  }

  const AttentionParams& p;
  const WorkItem& item;
  Head head;
  BumpAllocator allocator;
  AttentionDecodeScratch w;
  bool packed, shared;  // a block's rows are packed; a packed row is both key and value
  const Products &k_products, &v_products;
  const std::byte *packed_k[kKeysOfBlock], *packed_v[kKeysOfBlock];
  std::int64_t d, dv;  // row lengths that the products read: at least a whole vector
  QueryBlock* const q_blocks = w.q_blocks;
  std::int64_t
      score_stride[kMaxQueryBlocks];  // of the query block's scores, from key to key: a power of two up to kLanes
  Prefetcher prefetch_with_dots{nullptr, 0, 0}, prefetch_with_values{nullptr, 0, 0};  // during each product

  // Keys of bf16, and the queries, are deinterleaved even where they are packed, so that sums have the same order and
  // bits as in place.
  bool deinterleaves_keys() const { return p.kv_type == DType::bf16; }

  float* q(std::int64_t q_block) const { return w.q + q_block * kLanes * w.q_stride; }
  float* o(std::int64_t q_block) const { return w.o + q_block * kLanes * w.o_stride; }
  float* o_accum(std::int64_t q_block) const { return w.o_accum + q_block * kLanes * w.o_stride; }

  // The rows that the products read: packed or in place.
  const std::byte* const* keys(const BlockRows& block) const { return packed ? packed_k : block.k; }
  const std::byte* const* values(const BlockRows& block) const {
    return !packed ? block.v : shared ? packed_k : packed_v;
  }

 private:
  const Products& products_of_rows(const KeyRows& rows) const {
    if (packed) return products_of(DType::f32);
    const bool groups = rows.quant.scale && !one_scale_per_row(rows.quant, rows.n);
    return groups ? products_of_groups(p.kv_type, rows.quant.zero) : products_of(p.kv_type);
  }
};

}  // namespace
}  // namespace rapt::cpu::RAPT_ISA
