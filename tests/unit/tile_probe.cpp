#include "unit/tile_probe.hpp"

#include "cpu/tile/components.hpp"
#include "cpu/tile/dtype.hpp"

namespace rapt::cpu::RAPT_ISA {
namespace {

constexpr std::int64_t kRowBytes = 64, kTile = 16;  // rows

template <int kFirst>
void load_all(Tiles& tiles, const char* from, std::int64_t stride, bool once) {
  if constexpr (kFirst < 8) {
    const char* at = from + kFirst * kTile * stride;
    once ? tiles.load_once<kFirst>(at, stride) : tiles.load<kFirst>(at, stride);
    load_all<kFirst + 1>(tiles, from, stride, once);
  }
}
template <int kFirst>
void store_all(Tiles& tiles, char* to, std::int64_t stride) {
  if constexpr (kFirst < 8) {
    tiles.store<kFirst>(to + kFirst * kTile * stride, stride);
    store_all<kFirst + 1>(tiles, to, stride);
  }
}

void round_trip(const char* from, std::int64_t from_stride, bool once, char* to, std::int64_t to_stride) noexcept {
  Tiles tiles;
  load_all<0>(tiles, from, from_stride, once);
  store_all<0>(tiles, to, to_stride);
}

void zero(const char* from, char* to) noexcept {
  Tiles tiles;
  load_all<0>(tiles, from, kRowBytes, false);
  tiles.zero<0>(), tiles.zero<1>(), tiles.zero<2>(), tiles.zero<3>();
  tiles.zero<4>(), tiles.zero<5>(), tiles.zero<6>(), tiles.zero<7>();
  store_all<0>(tiles, to, kRowBytes);
}

void dot(const char* a, const char* b, char* c) noexcept {
  const std::int64_t next = kTile * kRowBytes;
  Tiles tiles;
  tiles.load<0>(c, kRowBytes), tiles.load<1>(c + next, kRowBytes);
  tiles.load<2>(c + 2 * next, kRowBytes), tiles.load<3>(c + 3 * next, kRowBytes);
  tiles.load<4>(a, kRowBytes), tiles.load<5>(a + next, kRowBytes);
  tiles.load<6>(b, kRowBytes), tiles.load<7>(b + next, kRowBytes);
  tiles.dot<0, 4, 6>(), tiles.dot<1, 4, 7>(), tiles.dot<2, 5, 6>(), tiles.dot<3, 5, 7>();
  tiles.store<0>(c, kRowBytes), tiles.store<1>(c + next, kRowBytes);
  tiles.store<2>(c + 2 * next, kRowBytes), tiles.store<3>(c + 3 * next, kRowBytes);
}

void int8_dot(const char* a, const char* b, char* c) noexcept {
  Tiles tiles;
  tiles.load<0>(c, kRowBytes), tiles.load<1>(a, kRowBytes), tiles.load<2>(b, kRowBytes);
  tiles.int8_dot<0, 1, 2>();
  tiles.store<0>(c, kRowBytes);
}

// Returns whether every element is representable.
template <int kComponents>
bool split(DType type, const void* from, std::int64_t stride, std::int64_t n, std::int64_t padded, bf16* to,
           std::int64_t component_stride) {
  RepresentableCheck<RepresentableFactor<kComponents>> check;
  const auto with_type = [&](auto f) {
    if constexpr (kComponents == 1) with_cache_type(type, f);
    else with_float_type(type, f);
  };
  with_type([&](auto element) {
    split_row<kComponents>(static_cast<const decltype(element)*>(from), stride, n, padded, to, component_stride, check);
  });
  return !check.failed();
}

bool split(int components, DType type, const void* from, std::int64_t stride, std::int64_t n, std::int64_t padded,
           std::uint16_t* to, std::int64_t component_stride) noexcept {
  const auto function = components == 1 ? split<1> : split<2>;
  return function(type, from, stride, n, padded, reinterpret_cast<bf16*>(to), component_stride);
}

}  // namespace

const TileProbe kTileProbe = {round_trip, zero, dot, int8_dot, split};

}  // namespace rapt::cpu::RAPT_ISA
