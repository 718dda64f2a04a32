// The keys or values of a Case: rows of any type, found in any way, with scales and zeros.
#pragma once

#include <cstdint>
#include <functional>
#include <random>
#include <string>

#include "rapt/problem.hpp"
#include "support/dtypes.hpp"
#include "support/tensor.hpp"

namespace rapt::testing {

/// A problem's words for a cache of this type: with `groups` scales a row if codes need them, or if more than one is
/// asked for and the type may have them.
std::string cache_words(DType dtype, int groups = 1);

/// Where a row lies: in an entry of the tensor's first dimension (batch, page, ragged row), at a row of that.
struct Slot {
  std::int64_t entry = -1;  ///< -1: nowhere
  std::int64_t row = 0;
};

/// The byte at which element i of head h of that row begins, in [entries, h, rows, n] whose sizes of 1 broadcast.
std::size_t byte_of(const Tensor& t, Slot slot, std::int64_t h, std::int64_t i);

/// k or v, and what it is quantised with.
struct Cache {
  Tensor rows, scale, zero;

  /// Which dimensions of rows scales broadcast over.
  struct Shared {
    bool rows, entries;
    /// One or another, or none, depending on the seed.
    static Shared some(std::uint64_t seed) { return {seed % 3 > 0, seed % 3 == 2}; }
  };

  /// Rows of `layout`, [entries, hk, rows, d] or ragged [entries, hk, d], whose last dimension counts elements: i4x2
  /// has half as many bytes. With groups, scales that broadcast as `shared` says, and with `zeros` zeros of the same
  /// shape or broadcast over both, depending on the seed. All of it is poisoned.
  Cache(DType dtype, const Layout& layout, std::int64_t groups, Shared shared, bool zeros, std::uint64_t seed,
        Placement placement);
  Cache() = default;

  /// Writes `values`, f32 [n, hk, j, d], to where `slot(n, j)` says, quantised to what spans the values of each scale:
  /// i8 and i4x2 use all their numbers, 8-bit floats get scales from 1/2 to 2. What no value goes to stays poisoned.
  void fill(const Tensor& values, const std::function<Slot(std::int64_t, std::int64_t)>& slot,
            std::mt19937_64 generator);

 private:
  void choose_scales(const Tensor& low, const Tensor& high, std::mt19937_64& generator);
};

}  // namespace rapt::testing
