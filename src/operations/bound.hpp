// A call whose tensors have been checked against its operation's table.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory_resource>
#include <span>
#include <string>
#include <vector>

#include "operations/arguments.hpp"

namespace rapt {

// A tensor that was given, and the bytes that it spans.
struct BoundTensor {
  const Argument* argument;
  const TensorView* view;
  std::int64_t bytes;
  std::uint32_t index;    // in a list of tensors
  bool is_alias = false;  // of another tensor of the call or a part of it, which stands for it in checks of overlaps

  std::string name() const { return argument->name_of(index); }
};

// The tensors of a call, and the sizes that their shapes give the dimensions.
struct Bound {
  const ArgumentList& table;
  const void* args;
  unsigned features;  // of the call, as bits
  Device device;
  std::array<std::int64_t, kMaxDimensions> sizes;  // -1: not known yet
  std::array<std::int64_t, kMaxDims> rows{};       // of "...", the first `row_dims`
  int row_dims = -1;                               // -1: not known yet

  Bound(const ArgumentList& list, const void* arguments, unsigned call_features, Device place);
  Bound(const Bound&) = delete;
  Bound& operator=(const Bound&) = delete;

  std::int64_t operator[](int dimension) const { return sizes[static_cast<std::size_t>(dimension)]; }
  // A size that follows from others.
  void derive(int dimension, std::int64_t size);
  // The last three of the dimensions that "..." stands for, 1 for those there are none.
  std::array<std::int64_t, 3> last_rows() const;
  std::span<const BoundTensor> tensors() const { return tensors_; }
  bool writes_nothing() const;
  // The tensor of this name, if it was given, is an alias of another one.
  void set_alias(std::string_view name);

  // Checks every argument of the table in its order. Throws Error that names one, as what follows does.
  void check();
  void check_overlaps() const;  // outputs overlap nothing
  // Throws Error for a workspace that shares memory with a tensor: it is written while every tensor is in use.
  void check_apart(std::span<const std::byte> workspace) const;

 private:
  void bind(const Argument& argument, const TensorView& view, std::size_t index);
  void check_type(const BoundTensor& tensor) const;
  void check_gradient(const BoundTensor& tensor) const;
  void bind_shape(const BoundTensor& tensor);
  void bind_rows(const BoundTensor& tensor, int count);
  [[noreturn]] void refuse_missing(const BoundTensor& tensor) const;
  [[noreturn]] void refuse_shape(const BoundTensor& tensor, const Dimension& dim) const;
  std::string owner_text(const Dimension& dim) const;
  std::string features_text(unsigned bits, const char* last) const;
  bool is_permuted(const BoundTensor& tensor) const;

  static constexpr std::size_t kTensors = 26;       // more than a call has, lists apart
  std::array<std::int32_t, kMaxDimensions> owner_;  // of a size, in tensors_; -1: it follows from others
  // On the stack, as every call comes here.
  alignas(BoundTensor) std::array<std::byte, kTensors * sizeof(BoundTensor)> memory_;
  std::pmr::monotonic_buffer_resource resource_{memory_.data(), memory_.size()};
  std::pmr::vector<BoundTensor> tensors_{&resource_};
};

// "[b, hq, sq, d]".
std::string shape_text(const Shape& shape);

// The steps along b, h, s and d of [b, h, s, d], ragged [total, h, d] or fewer dimensions, right-aligned at s or, with
// `has_elements`, at d: 0 along dimensions of one element, and in tensors without any, where strides may be any number
// (1 for d).
Strides aligned_strides(const Layout& layout, bool has_elements);
// The same given which of the layout's dimensions they are; -1: none.
Strides strides_along(const Layout& layout, int b, int h, int s, int d);

}  // namespace rapt
