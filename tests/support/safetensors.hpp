// Reads safetensors files: the captured tensors of tests/data, for tests and the demo.
#pragma once

#include <cstddef>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "rapt/tensor.hpp"

namespace rapt::testing {

/// One file, read whole. Views point into this object's memory and live as long as it (or what it was moved to) does.
/// Every error is a std::runtime_error "<path>: <reason>".
class SafeTensors {
 public:
  /// Throws for a file that cannot be read, or that is not well formed: a header or tensor beyond the end of the file,
  /// tensors that overlap or leave bytes unclaimed, offsets that are not shape x dtype long or not aligned to dtype,
  /// dtypes other than F32, I32, I64 and BOOL, booleans other than 0 and 1, more than kMaxDims dimensions or none.
  static SafeTensors load(const std::filesystem::path& path);

  SafeTensors(SafeTensors&&) = default;
  SafeTensors& operator=(SafeTensors&&) = default;

  /// A contiguous tensor. Throws when the file has none of that name.
  const TensorView& view(const std::string& name) const;
  /// Every tensor by name.
  const std::map<std::string, TensorView>& tensors() const noexcept { return tensors_; }
  /// The free-form "__metadata__" of the header; empty if it has none.
  const std::map<std::string, std::string>& metadata() const noexcept { return metadata_; }

 private:
  SafeTensors() = default;

  std::filesystem::path path_;
  std::vector<std::byte> data_;
  std::map<std::string, TensorView> tensors_;
  std::map<std::string, std::string> metadata_;
};

}  // namespace rapt::testing
