// The table of this ISA, and the loops that measure its roofs.
#include "cpu/kernels/all_tables.hpp"
#include "cpu/registry.hpp"
#include "cpu/tile/dtype.hpp"

namespace rapt::cpu::RAPT_ISA {
namespace {

// Enough independent chains to cover two FMA units of latency 4 to 5, few enough for the registers.
[[maybe_unused]] double fma_chains(std::int64_t iterations) noexcept {
  constexpr int kChains = kRegisters - 4;
  typename vec::register_type acc[kChains];
  const typename vec::register_type a = vec(0.999f).data, b = vec(0.001f).data;
#pragma GCC unroll 32
  for (int i = 0; i < kChains; ++i) acc[i] = vec(static_cast<float>(i)).data;
  for (std::int64_t it = 0; it < iterations; ++it) {
#pragma GCC unroll 32
    for (int i = 0; i < kChains; ++i) fma_in_place(acc[i], a, b);
  }
  return static_cast<double>(iterations) * kChains * kFmaFlops;
}

// Enough independent sums that loads from L1 are the bottleneck, not additions.
float read_stream(const float* data, std::int64_t n) noexcept {
  constexpr int kSums = 12;
  vec acc[kSums];
  for (vec& sum : acc) sum = vec(0.f);
  std::int64_t i = 0;
  for (; i + kSums * kLanes <= n; i += kSums * kLanes)
    for (int u = 0; u < kSums; ++u) acc[u] = acc[u] + load_any(data + i + u * kLanes);
  for (int u = 1; u < kSums; ++u) acc[0] = acc[0] + acc[u];
  alignas(64) float lane[kLanes];
  store(lane, acc[0]);
  float sum = 0;
  for (float x : lane) sum += x;
  for (; i < n; ++i) sum += data[i];
  return sum;
}

void exp2_array(const float* x, float* y, std::int64_t n) noexcept {
  const FlushDenormals flush;
  for (std::int64_t i = 0; i < n; i += kLanes) {
    const std::int64_t m = n - i < kLanes ? n - i : kLanes;
    store_strided(y + i, 1, m, exp2(load_strided(x + i, 1, m)));
  }
}

void convert_array(DType x_type, const void* x, DType y_type, void* y, std::int64_t n) noexcept {
  const FlushDenormals flush;
  with_float_type(x_type, [&](auto from) {
    with_float_type(y_type, [&](auto to) {
      for (std::int64_t i = 0; i < n; i += kLanes) {
        const std::int64_t m = n - i < kLanes ? n - i : kLanes;
        const vec wide = load_strided(static_cast<const decltype(from)*>(x) + i, 1, m);
        store_strided(static_cast<decltype(to)*>(y) + i, 1, m, wide);
      }
    });
  });
}

#if defined(RAPT_HAVE_TILES)
// Four independent sums cover the latency of the matrix unit.
double tile_chains(std::int64_t iterations) noexcept {
  Tiles tiles;
  tiles.zero<0>(), tiles.zero<1>(), tiles.zero<2>(), tiles.zero<3>();
  tiles.zero<4>(), tiles.zero<5>(), tiles.zero<6>(), tiles.zero<7>();
  for (std::int64_t it = 0; it < iterations; ++it)
    tiles.dot<0, 4, 6>(), tiles.dot<1, 4, 7>(), tiles.dot<2, 5, 6>(), tiles.dot<3, 5, 7>();
  return static_cast<double>(iterations) * 4 * 2 * 16 * 16 * 32;
}

double int8_chains(std::int64_t iterations, std::uint32_t& sum) noexcept {
  std::uint32_t words[2][256], sums[4][256];
  for (std::uint32_t& word : words[0]) word = kInt8Left;
  for (std::uint32_t& word : words[1]) word = kInt8Right;
  Tiles tiles;
  tiles.load<4>(words[0], 64), tiles.load<5>(words[0], 64), tiles.load<6>(words[1], 64), tiles.load<7>(words[1], 64);
  tiles.zero<0>(), tiles.zero<1>(), tiles.zero<2>(), tiles.zero<3>();
  for (std::int64_t it = 0; it < iterations; ++it)
    tiles.int8_dot<0, 4, 6>(), tiles.int8_dot<1, 4, 7>(), tiles.int8_dot<2, 5, 6>(), tiles.int8_dot<3, 5, 7>();
  tiles.store<0>(sums[0], 64), tiles.store<1>(sums[1], 64), tiles.store<2>(sums[2], 64), tiles.store<3>(sums[3], 64);
  sum = 0;
  for (const auto& tile : sums)
    for (const std::uint32_t x : tile) sum += x;
  return static_cast<double>(iterations) * 4 * 2 * 16 * 16 * 64;
}
#elif defined(RAPT_HAVE_INT8_DOTS)
double int8_chains(std::int64_t iterations, std::uint32_t& sum) noexcept {
  constexpr int kChains = kRegisters - 4;
  typename ivec::register_type acc[kChains];
  const typename ivec::register_type a = ivec(static_cast<std::int32_t>(kInt8Left)).data,
                                     b = ivec(static_cast<std::int32_t>(kInt8Right)).data;
#pragma GCC unroll 32
  for (int i = 0; i < kChains; ++i) acc[i] = ivec(0).data;
  for (std::int64_t it = 0; it < iterations; ++it) {
#pragma GCC unroll 32
    for (int i = 0; i < kChains; ++i) int8_dots_in_place(acc[i], a, b);
  }
  sum = 0;
#pragma GCC unroll 32
  for (int i = 0; i < kChains; ++i) {
    const typename ivec::register_type chain =
        acc[i];  // a copy, so that only its address is taken and acc stays in registers
    std::uint32_t lane[kLanes];
    __builtin_memcpy(lane, &chain, sizeof lane);
    for (const std::uint32_t x : lane) sum += x;
  }
  return static_cast<double>(iterations) * kChains * kLanes * 8;
}
#endif

}  // namespace

#if defined(RAPT_HAVE_TILES)
constexpr auto widest_chains = tile_chains;
#else
constexpr auto widest_chains = fma_chains;
#endif

constinit const IsaKernels kKernels = {
#define RAPT_OPERATION(name, Name, NAME) .name = name##_kernels(),
#include "rapt/operations.def"
    .peak_chains = widest_chains,
#if defined(RAPT_HAVE_TILES) || defined(RAPT_HAVE_INT8_DOTS)
    .int8_chains = int8_chains,
#endif
    .read_stream = read_stream,
    .exp2 = exp2_array,
    .convert = convert_array};

}  // namespace rapt::cpu::RAPT_ISA
