// What samplers of problems choose by.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <iterator>
#include <random>

namespace rapt::testing {

using Random = std::mt19937_64;

inline std::int64_t between(Random& random, std::int64_t low, std::int64_t high) {
  return low + static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(high - low + 1));
}

inline bool one_in(Random& random, std::int64_t n) {
  return between(random, 1, n) == 1;
}

inline std::int64_t pick(Random& random, std::initializer_list<std::int64_t> values) {
  return *std::next(values.begin(), between(random, 0, static_cast<std::int64_t>(values.size()) - 1));
}

template <class T, std::size_t kCount>
T any_of(Random& random, const std::array<T, kCount>& values) {
  return values[static_cast<std::size_t>(random() % kCount)];
}

/// A total that b sequences of which the longest is `longest` can have.
inline std::int64_t total(Random& random, std::int64_t b, std::int64_t longest) {
  return between(random, longest, b * longest);
}

}  // namespace rapt::testing
