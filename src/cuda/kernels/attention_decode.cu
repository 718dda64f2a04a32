// attention_decode: decoding over quantized caches, and of up to 16 rows for each kv head over 16-bit keys.
//
// The entries attention_decode.* call it with the kernel that operations/attention/cuda_choice.cpp chose, and
// attention_decode_m64 for the short sequences of ragged calls. A call reads K and V once and writes dv + 8 floats for
// each row and split; attention_combine, or a cluster of the splits' thread blocks, combines these.
#include <array>

#include "cuda/kernels/decode_same_keys.cuh"
#include "cuda/kernels/split_launches.cuh"
#include "cuda/tile/launch_one_of.cuh"

namespace rapt::cuda {
namespace {

// Bytes of an element of k or v; a byte of i4x2 holds two codes.
int bytes_of(DType kv_type) {
  return set_of(kv_type) & kFloatTypes ? 2 : 1;
}

// Strides in units of `vector_elements`.
ShortStrides short_strides(const Strides& s, std::int64_t vector_elements) {
  const auto count = [&](std::int64_t stride) { return static_cast<std::uint32_t>(stride / vector_elements); };
  return {count(s.b), count(s.h), count(s.s), count(s.d)};
}

// k or v, with rows of `size` elements and tiles of `tile_bytes`. Raises `slot_bytes` to what a tile takes with its
// scales and zeros.
DecodeOperand side_of(const void* data, DType type, const Strides& stride, std::int64_t size, const Quantization& quant,
                      int step_keys, int tile_bytes, int& slot_bytes) {
  DecodeOperand side{.data = static_cast<const std::uint8_t*>(data), .stride = stride, .quant = quant};
  const int element = bytes_of(type);
  side.of_rows = short_strides(stride, 16 / element);
  side.of_scales = short_strides(quant.scale_stride, 1), side.of_zeros = short_strides(quant.zero_stride, 1);
  side.bytes = static_cast<int>(type == DType::i4x2 ? size / 2 : size * element);
  side.groups = quant.scale ? static_cast<int>(size / quant.group) : 0;
  side.grouped = side.groups > 1 || quant.zero, side.zeros = quant.zero;
  for (int unit = 0; unit < kMaxUnits; ++unit)
    side.group_of_unit[unit] =
        side.grouped ? static_cast<int>(std::min<std::int64_t>(unit * kGroupUnit, size - 1) / quant.group) : 0;
  const int bytes = element == 1 ? std::max(side.groups, 1) * step_keys * 4 : 0;
  side.scale_at = tile_bytes, side.zero_at = tile_bytes + bytes;
  const std::int64_t kAligned = element == 1 ? 256 : 512;  // the longest row
  const std::int64_t end = tile_bytes + (quant.zero ? 2 * bytes : bytes);
  slot_bytes = std::max(slot_bytes, static_cast<int>(ceil_div(end, kAligned) * kAligned));
  return side;
}

// Whether rows are multiples of 16 bytes, and 32 bits address them and their scales.
bool is_simple(const AttentionParams& p, const DecodeOperand& side) {
  const std::int64_t entries = p.page_size > 0 && !p.ring ? p.page_count : p.b;
  const std::int64_t rows = p.page_size > 0 ? p.page_size : std::max(p.sk, p.total_k);
  const auto fits = [&](const Strides& s, std::int64_t columns, std::int64_t vector_elements) {
    return entries * s.b + p.hk * s.h + rows * s.s + columns * s.d < vector_elements << 32;
  };
  const Quantization& q = side.quant;
  const int element = bytes_of(p.kv_type);
  return is_vector(side.data, side.stride, element) && side.bytes % 16 == 0 &&
         fits(side.stride, side.bytes, 16 / element) && fits(q.scale_stride, side.groups, 1) &&
         fits(q.zero_stride, side.groups, 1);
}

// The same of queries, which are read 8 elements at a time.
void set_queries(const AttentionParams& p, DecodeParams& params) {
  const std::int64_t bytes = p.q_type == DType::f32 ? 4 : p.q_type == DType::f8e4m3 ? 1 : 2;
  const std::int64_t vector_elements = 16 / bytes;
  const Strides& s = p.q_stride;
  const std::int64_t end = p.b * s.b + p.hk * p.group * s.h + std::max(p.sq, p.total_q) * s.s;
  params.of_queries = short_strides(s, vector_elements);
  params.vector_queries = is_vector(p.q, s, bytes) && p.d % 8 == 0 && end < vector_elements << 32;
}

// Whether all rows of a sequence see the same keys, whatever its length.
bool rows_see_same_keys(const AttentionParams& p) {
  const bool open = p.score.left == kOpen && p.score.right == kOpen;
  return p.total_q < 0 && p.total_k < 0 && p.sq > 0 && p.sq <= p.score.modifier_rows && (p.sq == 1 || open);
}

// Whether attention_decode_same_keys takes the call: all rows of a sequence see the same keys, rows of q, k and v are
// multiples of 16 bytes, pages are multiples of 16 keys, and scores need no more than a scale (kMayModify: or modifiers
// that rows share).
template <bool kMayModify>
bool takes_same_keys(const DecodeParams& params) {
  const AttentionParams& p = params.p;
  constexpr std::int64_t kMax = 65535;  // the limit of a grid's y and z
  const bool finds_keys = !params.in_blocks || (!p.ring && p.page_size % 16 == 0);
  return (params.grid.same_keys || rows_see_same_keys(p)) && finds_keys && params.vector && params.vector_queries &&
         (!params.modified || (kMayModify && rows_share_modifiers(p))) && !params.scaled_queries &&
         !params.overlap_previous && std::max(p.hk, p.b) <= kMax;
}

// Whether `count` clusters of `cluster` thread blocks take at most half of the room: a cluster starts only when all of
// its thread blocks have room.
template <class C>
bool have_room(std::int64_t cluster, std::int64_t count) {
  return cluster <= kMaxCombineCluster && 2 * cluster * count <= C::kBlocksPerMultiprocessor * multiprocessors();
}

// How many thread blocks share a kv head's splits; each tile of rows counts as a head. The fewest that read memory at
// its full rate, about min_blocks on each multiprocessor, which has room for max_blocks, provided that the busiest
// multiprocessor reads at most a ninth more than the mean. Otherwise one block for each split. If even one block for
// each head exceeds the room, one: the others follow when these end.
int blocks_of_head(std::int64_t heads, int splits, int min_blocks, int max_blocks) {
  const std::int64_t processors = multiprocessors();
  if (heads > max_blocks * processors) return 1;
  for (int n = 1; n < splits && heads * n <= max_blocks * processors; ++n) {
    const std::int64_t busiest = ceil_div(heads * n, processors) * ceil_div(splits, n);
    if (8 * heads * n >= 7 * min_blocks * processors && 10 * heads * splits >= 9 * busiest * processors) return n;
  }
  return splits;
}

// The same where only the GPU knows the lengths. Sequences may be far shorter than the largest, so as many blocks as
// run at once; and far longer than others, so none with much more than kEnoughKeys keys. But blocks without keys take
// time, too.
template <class C>
std::int64_t blocks_of_any(const AttentionParams& p, std::int64_t heads, std::int64_t splits) {
  constexpr std::int64_t kEnoughKeys = 2048, kMaxBlocks = 2048, kFewest = 4;
  const std::int64_t at_once = C::kBlocksPerMultiprocessor * multiprocessors() / heads;
  const std::int64_t of_long = std::min(ceil_div(p.sk, kEnoughKeys), std::max(kMaxBlocks / heads, kFewest));
  return clamp_to(std::max(at_once, of_long), 1, splits);
}

// C: of a path other than `general`.
template <class C>
cudaError_t launch_same_keys(DecodeParams& params, std::int64_t tiles, int shared_bytes, cudaStream_t stream) {
  const AttentionParams& p = params.p;
  const bool same_keys = params.grid.same_keys;
  const std::int64_t heads = p.b * p.hk;
  params.rows = static_cast<int>(p.sq * p.group);
  params.scale_log2 = p.score.scale_log2;
  params.splits = same_keys
                      ? static_cast<int>(std::max<std::int64_t>(ceil_div(params.grid.all_keys, params.grid.keys), 1))
                      : params.partials.splits;
  // Where arithmetic bounds the call, one split for each thread block is faster: warps wait for each other at the end
  // of each. And if keys have fewer columns than the kernel, several splits would overwrite the padding of the ring
  // with O.
  const bool shares = C::kComponents == 1 && !params.k.grouped && !params.v.grouped && params.k.bytes == C::kRowBytes;
  std::int64_t blocks = params.splits;
  if (shares)
    blocks = same_keys ? blocks_of_head(heads * tiles, params.splits, C::kIs16Bit ? 2 : 4, C::kBlocksPerMultiprocessor)
                       : blocks_of_any<C>(p, heads * tiles, params.splits);
  params.blocks = Divisor(blocks);
  const std::int64_t cluster = tiles * blocks;
  const bool may_cluster = cluster <= 2 || (blocks == params.splits && have_room<C>(cluster, heads));
  params.combines_in_cluster = !params.writes_output && params.splits <= kMaxCombinedSplits && may_cluster;
  const auto of_tile = static_cast<unsigned>(blocks), of_head = static_cast<unsigned>(tiles);
  const dim3 grid = SameKeysBlock<C>::grid(of_tile, of_head, static_cast<unsigned>(p.hk), static_cast<unsigned>(p.b));
  const cudaError_t status =
      launch_clusters(params.combines_in_cluster ? SameKeysBlock<C>::cluster(of_tile, of_head) : dim3(1), false,
                      attention_decode_same_keys<C>, grid, kDecodeThreads, shared_bytes, stream, params);
  if (status != cudaSuccess || params.writes_output || params.combines_in_cluster) return status;
  return launch_attention_combine(p, params.partials, stream);
}

// Launches a kernel, by the fastest path that the call's rows allow.
template <DecodeConfig kConfig>
cudaError_t launch(DecodeParams params, cudaStream_t stream) {
  using C = Decode<kConfig>;
  const AttentionParams& p = params.p;
  params.code_offset = C::Coding::kOffset;
  const std::int64_t rows = C::kIs16Bit ? std::min<std::int64_t>(max_rows(p), kFewRows) : max_rows(p);
  const std::int64_t tiles = ceil_div(rows, C::kRows), cluster = tiles * params.partials.splits;
  params.grid = SplitGrid(p, params.partials, tiles);
  const auto side = [&](const void* data, const Strides& stride, std::int64_t size, const Quantization& quant) {
    return side_of(data, p.kv_type, stride, size, quant, C::kStepKeys, C::kTileBytes, params.slot_bytes);
  };
  params.k = side(p.k, p.k_stride, p.d, p.k_quant), params.v = side(p.v, p.v_stride, p.dv, p.v_quant);
  params.vector = is_simple(p, params.k) && is_simple(p, params.v);
  const int shared_bytes = kDecodeWarps * C::kSlots * params.slot_bytes + C::kQueryBytes;
  if (takes_same_keys<C::kIs16Bit>(params)) {
    if constexpr (C::kIs16Bit)
      if (params.modified)
        return launch_same_keys<Decode<with_path(kConfig, DecodePath::shared_modifiers)>>(params, tiles, shared_bytes,
                                                                                          stream);
    // Where the dense path is faster, and calls are not too few for more kernels.
    constexpr bool kHasDense = C::kSize < 256 && (C::kIs16Bit || (C::kTiles == 1 && C::kComponents == 1));
    if constexpr (kHasDense)
      if (params.grid.same_keys && !params.in_blocks)
        return launch_same_keys<Decode<with_path(kConfig, DecodePath::dense)>>(params, tiles, shared_bytes, stream);
    return launch_same_keys<Decode<with_path(kConfig, DecodePath::same_keys)>>(params, tiles, shared_bytes, stream);
  }
  params.combines_in_cluster = !params.writes_output && !params.overlap_previous &&
                               have_room<C>(cluster, params.grid.blocks / at_least_1(cluster));
  const cudaError_t status =
      launch_clusters(params.combines_in_cluster ? static_cast<unsigned>(cluster) : 1, params.overlap_previous,
                      attention_decode<C>, params.grid.blocks, kDecodeThreads, shared_bytes, stream, params);
  if (status != cudaSuccess || params.writes_output || params.combines_in_cluster) return status;
  return launch_attention_combine(p, params.partials, stream);
}

// Every kernel that operations/attention/cuda_choice.cpp may choose.
constexpr auto kKernels = [] {
  constexpr DTypeSet kCodes = kFp8Types | kIntegerCodes;
  std::array<DecodeConfig, 12 + 11 * __builtin_popcount(kCodes)> kernels{};
  std::size_t count = 0;
  for (const int size : {64, 128, 256}) {
    for (const DType type : {DType::bf16, DType::f16})
      for (const int tiles : {1, 2}) kernels[count++] = {.kv_type = type, .head_dim = size, .row_tiles = tiles};
    for (unsigned value = 0; value < 32; ++value) {
      const auto type = static_cast<DType>(value);
      if (!(set_of(type) & kCodes)) continue;
      kernels[count++] = {.kv_type = type, .head_dim = size, .row_tiles = 1, .query_components = 3};
      for (const int tiles : {1, 2, 4})
        if (size < 256 || tiles < 4) kernels[count++] = {.kv_type = type, .head_dim = size, .row_tiles = tiles};
    }
  }
  return kernels;
}();

}  // namespace

bool quantized_groups_fit(const AttentionParams& p) {
  const auto fit = [](std::int64_t group, std::int64_t size) { return group == size || group % kGroupUnit == 0; };
  return fit(p.k_quant.group, p.d) && fit(p.v_quant.group, p.dv);
}

cudaError_t launch_decode_part(const AttentionParams& p, const DecodeConfig& config, const PartialResults& partials,
                               bool writes_output, bool overlap_previous, cudaStream_t stream) {
  DecodeParams params{.p = p, .partials = partials};
  params.writes_output = writes_output, params.overlap_previous = overlap_previous;
  params.modified = has_modifiers(p.score), params.scaled_queries = p.q_scale;
  params.in_blocks = p.page_size > 0, params.page_size = Divisor(p.page_size);
  set_queries(p, params);
  return launch_one_of<kKernels>(config, [&](auto i) { return launch<kKernels[i]>(params, stream); });
}

cudaError_t launch_attention_decode(const AttentionParams& p, const DecodeConfig& config, std::byte* workspace,
                                    cudaStream_t stream) {
  return for_each_part(p, partials_of(p, workspace), [&](const PartialResults& partials) {
    return launch_decode_part(p, config, partials, partials.splits == 1, false, stream);
  });
}

}  // namespace rapt::cuda
