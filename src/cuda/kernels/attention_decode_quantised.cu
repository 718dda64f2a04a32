// What the decoding of quantised caches is compiled for, and its launch.
#include "cuda/kernels/decode_quantised.cuh"

namespace rapt::cuda {
namespace {

// Rows of `size` codes of k or v, whose tiles have so many bytes. Raises `slot_bytes` to what they take with scales.
QuantisedSide side_of(const void* data, DType type, const Strides& stride, std::int64_t size, const Quantization& quant,
                      int step_keys, int tile_bytes, int& slot_bytes) {
  QuantisedSide side{static_cast<const std::uint8_t*>(data), stride, quant};
  const auto in = [](std::int64_t unit, const Strides& s) {
    const auto count = [&](std::int64_t stride) { return static_cast<std::uint32_t>(stride / unit); };
    return ShortStrides{count(s.b), count(s.h), count(s.s), count(s.d)};
  };
  side.of_rows = in(16, stride), side.of_scales = in(1, quant.scale_stride), side.of_zeros = in(1, quant.zero_stride);
  side.bytes = static_cast<int>(type == DType::i4x2 ? size / 2 : size);
  side.groups = quant.scale ? static_cast<int>(size / quant.group) : 0;
  side.grouped = side.groups > 1 || quant.zero;
  for (int unit = 0; unit < kMaxUnits; ++unit)
    side.group_of_unit[unit] = static_cast<int>(std::min<std::int64_t>(unit * kGroupUnit, size - 1) / quant.group);
  const int bytes = side.groups * step_keys * 4;
  side.scale_at = tile_bytes, side.zero_at = tile_bytes + bytes;
  constexpr std::int64_t kAligned = 256;  // as long as the longest row
  const std::int64_t end = tile_bytes + (quant.zero ? 2 * bytes : bytes);
  slot_bytes = std::max(slot_bytes, static_cast<int>(ceil_div(end, kAligned) * kAligned));
  return side;
}

// Whether rows are whole times 16 bytes, and 32 bits count these and their scales.
bool is_simple(const AttentionParams& p, const QuantisedSide& side) {
  const std::int64_t entries = p.page_size > 0 && !p.ring ? p.page_count : p.b;
  const std::int64_t rows = p.page_size > 0 ? p.page_size : std::max(p.sk, p.total_k);
  const auto fits = [&](const Strides& s, std::int64_t columns, std::int64_t unit) {
    return entries * s.b + p.hk * s.h + rows * s.s + columns * s.d < unit << 32;
  };
  const Quantization& q = side.quant;
  return is_vector(side.data, side.stride, 1) && side.bytes % 16 == 0 && fits(side.stride, side.bytes, 16) &&
         fits(q.scale_stride, side.groups, 1) && fits(q.zero_stride, side.groups, 1);
}

template <class C>
cudaError_t launch(QuantisedParams params, cudaStream_t stream) {
  const AttentionParams& p = params.p;
  params.code_offset = C::Coding::kOffset;
  params.grid = SplitGrid(p, params.partials, ceil_div(most_rows(p), C::kRows));
  const auto side = [&](const void* data, const Strides& stride, std::int64_t size, const Quantization& quant) {
    return side_of(data, p.kv_type, stride, size, quant, C::kStepKeys, C::kTileBytes, params.slot_bytes);
  };
  params.k = side(p.k, p.k_stride, p.d, p.k_quant), params.v = side(p.v, p.v_stride, p.dv, p.v_quant);
  params.vector = is_simple(p, params.k) && is_simple(p, params.v);
  const int shared_bytes = kQuantisedWarps * C::kSlots * params.slot_bytes + C::kQueryBytes;
  return launch_kernel(false, decode_quantised<C>, params.grid.blocks, kQuantisedThreads, shared_bytes, stream, params);
}

template <DType kType, int kTiles, int kComponents>
cudaError_t launch(const QuantisedParams& params, cudaStream_t stream) {
  const std::int64_t size = std::max(params.p.d, params.p.dv);
  if (size <= 64) return launch<QuantisedConfig<kType, 64, kTiles, kComponents>>(params, stream);
  if (size <= 128) return launch<QuantisedConfig<kType, 128, kTiles, kComponents>>(params, stream);
  return launch<QuantisedConfig<kType, 256, std::min(kTiles, 2), kComponents>>(params, stream);
}

// As many components as make queries exact, of 16 bits or of 32. Where they are several, registers are for 8 rows. No
// bit depends on how many rows a block has: of ragged sequences, whose rows the host does not know, it has 16.
template <DType kType>
cudaError_t launch(const QuantisedParams& params, cudaStream_t stream) {
  const AttentionParams& p = params.p;
  if (p.q_type != DType::bf16 && p.q_type != DType::f8e4m3) return launch<kType, 1, 3>(params, stream);
  const std::int64_t rows = p.total_q < 0 ? p.sq * p.group : 16;
  if (rows > 16) return launch<kType, 4, 1>(params, stream);
  return rows > 8 ? launch<kType, 2, 1>(params, stream) : launch<kType, 1, 1>(params, stream);
}

cudaError_t launch(const QuantisedParams& params, cudaStream_t stream) {
  switch (params.p.kv_type) {
    case DType::i8:
      return launch<DType::i8>(params, stream);
    case DType::i4x2:
      return launch<DType::i4x2>(params, stream);
    case DType::f8e4m3:
      return launch<DType::f8e4m3>(params, stream);
    default:
      return launch<DType::f8e5m2>(params, stream);
  }
}

}  // namespace

bool quantised_groups_fit(const AttentionParams& p) {
  const auto fit = [](std::int64_t group, std::int64_t size) { return group == size || group % kGroupUnit == 0; };
  return fit(p.k_quant.group, p.d) && fit(p.v_quant.group, p.dv);
}

cudaError_t attention_decode_quantised(const AttentionParams& p, std::byte* workspace, cudaStream_t stream) {
  return for_each_part(p, partials_of(p, workspace), [&](const Partials& partials) {
    QuantisedParams params{p, partials};
    params.modified = has_modifiers(p.score);
    params.page_size = Divisor(p.page_size);
    const cudaError_t status = launch(params, stream);
    return status == cudaSuccess && partials.splits > 1 ? attention_combine(p, partials, stream) : status;
  });
}

}  // namespace rapt::cuda
