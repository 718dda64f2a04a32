// What the decoding of quantised caches is compiled for, and its launch.
#include "cuda/kernels/decode_quantised.cuh"

namespace rapt::cuda {
namespace {

// Rows of `size` codes of k or v, with scales and zeros from `at` bytes behind the step's K on, which is where they end
// then.
QuantisedSide side_of(const void* data, DType type, const Strides& stride, std::int64_t size, const Quantization& quant,
                      int step_keys, int& at) {
  QuantisedSide side{static_cast<const std::uint8_t*>(data), stride, quant};
  const auto in = [](std::int64_t unit, const Strides& s) {
    const auto count = [&](std::int64_t stride) { return static_cast<std::uint32_t>(stride / unit); };
    return ShortStrides{count(s.b), count(s.h), count(s.s), count(s.d)};
  };
  side.of_rows = in(16, stride), side.of_scales = in(1, quant.scale_stride), side.of_zeros = in(1, quant.zero_stride);
  const bool whole = quant.group >= size;
  side.bytes = static_cast<int>(type == DType::i4x2 ? size / 2 : size);
  side.columns = static_cast<int>(ceil_div(size, kGroupUnit) * kGroupUnit);
  side.group = whole ? side.columns : static_cast<int>(quant.group);
  side.groups = !quant.scale ? 0 : whole ? 1 : static_cast<int>(size / quant.group);
  const int bytes = side.groups * step_keys * 4;
  side.scale_at = at, side.zero_at = at + bytes;
  at += quant.zero ? 2 * bytes : bytes;
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
cudaError_t launch(const AttentionParams& p, std::byte* workspace, cudaStream_t stream) {
  QuantisedParams params{p, partials_of(p, workspace)};
  params.modified = has_modifiers(p.score);
  params.tiles = static_cast<int>(ceil_div(p.sq * p.group, C::kRows));
  params.page_size = Divisor(p.page_size);
  int at = 2 * C::kTileBytes;
  params.k = side_of(p.k, p.kv_type, p.k_stride, p.d, p.k_quant, C::kStepKeys, at);
  params.v = side_of(p.v, p.kv_type, p.v_stride, p.dv, p.v_quant, C::kStepKeys, at);
  params.vector = is_simple(p, params.k) && is_simple(p, params.v);
  params.slot_bytes = static_cast<int>(ceil_div(at, 128) * 128);
  const auto blocks = static_cast<unsigned>(p.b * p.hk * params.tiles * params.partials.splits);
  const int shared_bytes = kQuantisedWarps * C::kStages * params.slot_bytes + C::kQueryBytes;
  const cudaError_t status =
      launch_kernel(false, decode_quantised<C>, blocks, kQuantisedThreads, shared_bytes, stream, params);
  return status == cudaSuccess ? attention_combine(p, params.partials, stream) : status;
}

template <DType kType, int kTiles, int kParts>
cudaError_t launch(const AttentionParams& p, std::byte* workspace, cudaStream_t stream) {
  const std::int64_t size = std::max(p.d, p.dv);
  if (size <= 64) return launch<QuantisedConfig<kType, 64, kTiles, kParts>>(p, workspace, stream);
  if (size <= 128) return launch<QuantisedConfig<kType, 128, kTiles, kParts>>(p, workspace, stream);
  return launch<QuantisedConfig<kType, 256, kTiles, kParts>>(p, workspace, stream);
}

// As many parts as make queries exact. Where they are several, registers are for 8 rows.
template <DType kType>
cudaError_t launch(const AttentionParams& p, std::byte* workspace, cudaStream_t stream) {
  if (p.q_type == DType::f32) return launch<kType, 1, 3>(p, workspace, stream);
  if (p.q_type == DType::f16) return launch<kType, 1, 2>(p, workspace, stream);
  if (p.sq * p.group > 8) return launch<kType, 2, 1>(p, workspace, stream);
  return launch<kType, 1, 1>(p, workspace, stream);
}

}  // namespace

bool quantised_groups_fit(const AttentionParams& p) {
  const auto fit = [](std::int64_t group, std::int64_t size) { return group == size || group % kGroupUnit == 0; };
  return fit(p.k_quant.group, p.d) && fit(p.v_quant.group, p.dv);
}

cudaError_t attention_decode_quantised(const AttentionParams& p, std::byte* workspace, cudaStream_t stream) {
  switch (p.kv_type) {
    case DType::i8:
      return launch<DType::i8>(p, workspace, stream);
    case DType::i4x2:
      return launch<DType::i4x2>(p, workspace, stream);
    case DType::f8e4m3:
      return launch<DType::f8e4m3>(p, workspace, stream);
    default:
      return launch<DType::f8e5m2>(p, workspace, stream);
  }
}

}  // namespace rapt::cuda
