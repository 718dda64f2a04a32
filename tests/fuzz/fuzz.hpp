// What the fuzz targets share: reading choices from bytes, and stating properties.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <stdexcept>
#include <string>
#include <string_view>

namespace rapt::testing {

/// Turns the fuzzer's bytes into choices; past their end every choice is the first.
class Choices {
 public:
  Choices(const std::uint8_t* data, std::size_t size) : data_(data), end_(data + size) {}

  /// A number in [0, count).
  int below(int count) { return data_ == end_ ? 0 : *data_++ % count; }
  bool one_in(int count) { return below(count) == count - 1; }
  template <class T>
  T one_of(std::initializer_list<T> values) {
    return values.begin()[below(static_cast<int>(values.size()))];
  }
  template <class T, std::size_t kCount>
  T one_of(const std::array<T, kCount>& values) {
    return values[static_cast<std::size_t>(below(static_cast<int>(kCount)))];
  }
  /// Any bits at all.
  template <class T>
  T raw() {
    T value{};
    const std::size_t bytes = std::min(sizeof value, static_cast<std::size_t>(end_ - data_));
    std::memcpy(&value, data_, bytes);
    data_ += bytes;
    return value;
  }

 private:
  const std::uint8_t* data_;
  const std::uint8_t* end_;
};

/// Throws when a property does not hold. Nothing catches it under libFuzzer, which then keeps the input.
inline void require(bool holds, std::string_view property) {
  if (!holds) throw std::logic_error("violated: " + std::string(property));
}

}  // namespace rapt::testing

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);
