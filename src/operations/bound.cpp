#include "operations/bound.hpp"

#include <algorithm>
#include <limits>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "core/span.hpp"
#include "core/text.hpp"

namespace rapt {
namespace {

using std::int64_t;

// What a dimension counts, beside its name.
constexpr std::pair<std::string_view, std::string_view> kNouns[] = {
    {"b", "batch"},           {"sq", "rows"},
    {"sk", "rows"},           {"h", "heads"},
    {"hq", "heads"},          {"hk", "heads"},
    {"hv", "heads"},          {"d", "head dimension"},
    {"dk", "head dimension"}, {"dv", "head dimension"},
    {"total_q", "rows"},      {"total_k", "rows"},
    {"total", "rows"},        {"pages", ""},
    {"t", "tokens"},          {"page_size", "rows"},
    {"k_groups", "groups"},   {"v_groups", "groups"},
    {"cache_rows", "rows"},   {"h_out", "max(hq, hk, hv) heads"},
};

// "[1, 2, sk]", of the sizes that are known.
std::string sizes_text(const Bound& bound, const Shape& shape) {
  std::string text;
  for (const Dimension& dim : shape.dimensions()) {
    const int64_t size = dim.name.empty() ? 0 : bound[dim.id];
    text += (text.empty() ? "[" : ", ") + (size < 0 ? std::string(dim.name) : std::to_string(size + dim.plus));
  }
  return text + "]";
}

}  // namespace

std::string shape_text(const Shape& shape) {
  std::string text = shape.has_rows ? ".." : "";
  for (const Dimension& dim : shape.dimensions()) {
    text.append(text.empty() ? "" : ", ").append(dim.name);
    if (dim.name.empty()) text += std::to_string(dim.plus);
    else if (dim.plus) text += " + 1";
    else if (dim.broadcastable) text += " or 1";
  }
  if (shape.optional_count != 1) return "[" + text + "]";
  return "[" + text.substr(text.find(", ") + 2) + "] or [" + text + "]";
}

Strides aligned_strides(const Layout& t, bool has_elements) {
  const int rows = has_elements ? t.ndim - 1 : t.ndim;
  return strides_along(t, rows - 3, rows - 2, rows - 1, has_elements ? rows : -1);
}

Strides strides_along(const Layout& t, int b, int h, int s, int d) {
  // Strides of a tensor without elements may be any numbers, too, and offsets of its rows are computed.
  const auto end = t.shape.begin() + t.ndim;
  const bool is_empty = std::find(t.shape.begin(), end, 0) != end;
  const auto step = [&](int dim, int64_t of_one) {
    if (dim < 0) return int64_t{0};
    const auto i = static_cast<std::size_t>(dim);
    return is_empty || t.shape[i] == 1 ? of_one : t.strides[i];
  };
  return {step(b, 0), step(h, 0), step(s, 0), step(d, 1)};
}

Bound::Bound(const ArgumentList& list, const void* arguments, unsigned call_features, Device place)
    : table(list), args(arguments), features(call_features), device(place) {
  sizes.fill(-1), owner_.fill(-1);
  tensors_.reserve(kTensors);
}

void Bound::derive(int dimension, int64_t size) {
  const auto i = static_cast<std::size_t>(dimension);
  sizes[i] = size, owner_[i] = -1;
}

std::array<int64_t, 3> Bound::last_rows() const {
  std::array<int64_t, 3> last{1, 1, 1};
  for (int i = 0; i < row_dims && i < 3; ++i)
    last[static_cast<std::size_t>(2 - i)] = rows[static_cast<std::size_t>(row_dims - 1 - i)];
  return last;
}

bool Bound::writes_nothing() const {
  return std::none_of(tensors_.begin(), tensors_.end(),
                      [&](const BoundTensor& t) { return t.argument->is_output(features) && t.bytes > 0; });
}

void Bound::set_alias(std::string_view name) {
  for (BoundTensor& t : tensors_)
    if (t.argument->name == name) t.is_alias = true;
}

// "q's batch b", "the rows sk".
std::string Bound::owner_text(const Dimension& dim) const {
  const std::int32_t owner = owner_[static_cast<std::size_t>(dim.id)];
  std::string text = owner < 0 ? "the " : tensors_[static_cast<std::size_t>(owner)].name() + "'s ";
  for (const auto& [name, noun] : kNouns)
    if (name == dim.name && !noun.empty()) text.append(noun).append(" ");
  return text.append(dim.name);
}

std::string Bound::features_text(unsigned bits, const char* last) const {
  std::vector<std::string_view> names;
  for (std::size_t i = 0; i < table.feature_names.size(); ++i)
    if (bits >> i & 1) names.emplace_back(table.feature_names[i]);
  return list_text(names, last);
}

// Whether a tensor has the right sizes in another order.
bool Bound::is_permuted(const BoundTensor& t) const {
  const Shape& shape = t.argument->shapes.in(features);
  std::array<int64_t, kMaxDims> wanted{};
  std::size_t n = 0;
  for (const Dimension& dim : shape.dimensions()) wanted[n++] = (dim.name.empty() ? 0 : (*this)[dim.id]) + dim.plus;
  const auto& given = t.view->shape;
  return !shape.has_rows && t.view->ndim == shape.count &&
         std::is_permutation(wanted.begin(), wanted.begin() + shape.count, given.begin());
}

void Bound::refuse_shape(const BoundTensor& t, const Dimension& dim) const {
  const Shape& shape = t.argument->shapes.in(features);
  const std::string given = "shape " + rapt::shape_text(static_cast<const Layout&>(*t.view));
  if (shape.optional_count > 1) {
    std::string names;
    for (const Dimension& d : shape.dimensions())
      if (d.broadcastable) names.append(names.empty() ? "" : ", ").append(d.name);
    throw Error(t.name(), given, "a shape that broadcasts over " + names + " to " + sizes_text(*this, shape));
  }
  if (dim.name.empty()) throw Error(t.name(), given, shape_text(shape));
  int64_t size = (*this)[dim.id] + dim.plus;
  const bool halved = t.argument->is_packed && t.view->dtype == DType::i4x2 && &dim == &shape.dimensions().back();
  if (halved) size /= 2;
  throw Error(t.name(), given,
              (is_permuted(t) ? shape_text(shape) + " with " : "") + (dim.broadcastable ? "1 or " : "") +
                  owner_text(dim) + (dim.plus ? " + 1" : "") + (halved ? ", in bytes," : "") + " = " +
                  std::to_string(size));
}

void Bound::refuse_missing(const BoundTensor& t) const {
  const Argument& a = *t.argument;
  std::string wanted = a.of_name ? "the gradient of " + std::string(a.of_name) : shape_text(a.shapes.in(features));
  if (a.needed_in != kAlways) wanted += " for " + features_text(a.needed_in & features, " and ");
  throw Error(t.name(), "no tensor", wanted);
}

void Bound::bind_rows(const BoundTensor& t, int count) {
  const Layout& layout = *t.view;
  if (row_dims < 0) {
    row_dims = count;
    std::copy_n(layout.shape.begin(), count, rows.begin());
  }
  const Shape& shape = t.argument->shapes.in(features);
  if (count != row_dims)
    throw Error(t.name(), "shape " + rapt::shape_text(layout),
                tensors_.front().name() + "'s dimensions before the last, " + shape_text(shape));
  for (std::size_t i = 0; i < static_cast<std::size_t>(count); ++i)
    if (layout.shape[i] != rows[i])
      throw Error(t.name(), "shape " + rapt::shape_text(layout),
                  tensors_.front().name() + "'s size there = " + std::to_string(rows[i]));
}

void Bound::bind_shape(const BoundTensor& t) {
  const Shape& shape = t.argument->shapes.in(features);
  const Layout& layout = *t.view;
  const int missing = shape.has_rows ? 0 : shape.count - layout.ndim;
  const int in_front = shape.has_rows ? layout.ndim - shape.count : 0;
  if (missing < 0 || missing > shape.optional_count || in_front < 0) {
    const auto is_derived = [&](const Dimension& dim) {
      return !dim.name.empty() && (*this)[dim.id] >= 0 && owner_[static_cast<std::size_t>(dim.id)] < 0;
    };
    // Sizes that no tensor shows.
    const bool any_derived = std::ranges::any_of(shape.dimensions(), is_derived);
    throw Error(t.name(), "shape " + rapt::shape_text(layout),
                shape_text(shape) + (any_derived ? " = " + sizes_text(*this, shape) : ""));
  }
  if (t.argument->types == kIntegers && shape.count == 1 && layout.shape[0] > std::numeric_limits<std::int32_t>::max())
    throw Error(t.name(), "shape " + rapt::shape_text(layout), "less than 2^31 elements");
  if (shape.has_rows) bind_rows(t, in_front);
  const bool halves_last = t.argument->is_packed && t.view->dtype == DType::i4x2;
  for (int i = missing; i < shape.count; ++i) {
    const Dimension& dim = shape.dims[static_cast<std::size_t>(i)];
    const int given = i - missing + in_front;
    int64_t size = layout.shape[static_cast<std::size_t>(given)];
    if (dim.broadcastable && size == 1) continue;
    if (dim.name.empty()) {
      if (size != dim.plus) refuse_shape(t, dim);
      continue;
    }
    if (halves_last && i == shape.count - 1) size *= 2;
    int64_t& known = sizes[static_cast<std::size_t>(dim.id)];
    if (known < 0) {
      if (size < dim.plus) throw Error(t.name(), "no elements", shape_text(shape));
      known = size - dim.plus;
      owner_[static_cast<std::size_t>(dim.id)] = static_cast<std::int32_t>(&t - tensors_.data());
    } else if (dim.at_least) {
      // On a device the longest sequence is not known: what is there has to do.
      if (size < known && device.type == DeviceType::cpu) refuse_shape(t, dim);
    } else if (size - dim.plus != known) {
      refuse_shape(t, dim);
    }
  }
}

void Bound::check_type(const BoundTensor& t) const {
  const Argument& a = *t.argument;
  const DType dtype = t.view->dtype;
  if (!has(a.types, dtype)) refuse_type(t.name(), dtype, a.types, a.wanted_types);
  if (a.like < 0) return;
  const TensorView& other = *table.arguments[static_cast<std::size_t>(a.like)].get(args, 0);
  if (other.dtype != dtype)
    throw Error(t.name(), "dtype " + std::string(to_string(dtype)),
                a.like_name + ("'s, " + std::string(to_string(other.dtype))));
}

void Bound::check_gradient(const BoundTensor& t) const {
  const char* const name = t.argument->of_name;
  const TensorView& primal = *table.arguments[static_cast<std::size_t>(t.argument->of)].get(args, 0);
  if (!primal) throw Error(t.name(), "a tensor", "none without " + std::string(name));
  if (!same_shape(*t.view, primal))
    throw Error(t.name(), "shape " + rapt::shape_text(static_cast<const Layout&>(*t.view)),
                name + ("'s, " + rapt::shape_text(static_cast<const Layout&>(primal))));
}

void Bound::bind(const Argument& argument, const TensorView& view, std::size_t index) {
  BoundTensor t{&argument, &view, 0, static_cast<std::uint32_t>(index)};
  const bool is_output = argument.is_output(features);
  t.bytes = plain_span_of(view, is_output);
  if (t.bytes < 0) t.bytes = span_of(t.name(), view, is_output);
  if (view.device != device) {
    if (device.type == DeviceType::cpu && view.device.type != device.type)
      throw Error(t.name(), "a tensor that is not on the cpu",
                  "host memory" + (tensors_.empty() ? "" : ", as of " + tensors_.front().name()));
    if (!tensors_.empty())
      throw Error(t.name(), "a tensor on another device than " + tensors_.front().name(), "all tensors on one device");
    device = view.device;  // a CPU's of another index
  }
  tensors_.push_back(t);
  check_type(t);
  if (argument.of >= 0) check_gradient(t);
  else bind_shape(tensors_.back());
}

void Bound::check() {
  for (const Argument& a : table.arguments) {
    if (a.step) {
      a.step(args, *this);
      continue;
    }
    if (a.is_unchecked) continue;
    const std::size_t n = a.count_in(args);
    if (n == 0 && a.is_needed(features)) throw Error(a.name, "no tensors", "one or more");
    for (std::size_t i = 0; i < n; ++i) {
      const TensorView& view = *a.get(args, i);
      if (view.ndim == 0) {
        if (a.is_needed(features)) refuse_missing(BoundTensor{&a, &view, 0, static_cast<std::uint32_t>(i)});
        continue;
      }
      if (!(a.only_in & features)) throw Error(a.name, "a tensor", "one only with " + features_text(a.only_in, " or "));
      bind(a, view, i);
    }
  }
}

void Bound::check_overlaps() const {
  for (const BoundTensor& output : tensors_) {
    if (!output.argument->is_output(features) || output.is_alias) continue;
    for (const BoundTensor& other : tensors_) {
      // Of two outputs the later is named.
      if (&other == &output || other.is_alias || (other.argument->is_output(features) && &output < &other)) continue;
      if (may_overlap(*output.view, output.bytes, *other.view, other.bytes))
        throw Error(output.name(), "memory shared with " + other.name(), "outputs that overlap nothing");
    }
  }
}

void Bound::check_apart(std::span<const std::byte> workspace) const {
  if (workspace.empty()) return;
  const auto begin = reinterpret_cast<std::uintptr_t>(workspace.data());
  std::uintptr_t end = 0;
  if (__builtin_add_overflow(begin, workspace.size(), &end))
    throw Error("workspace", std::to_string(workspace.size()) + " bytes", "memory within the address space");
  for (const BoundTensor& t : tensors_) {
    const auto at = reinterpret_cast<std::uintptr_t>(t.view->data);
    if (t.bytes > 0 && at < end && begin < at + static_cast<std::uintptr_t>(t.bytes))
      throw Error("workspace", "memory shared with " + t.name(), "memory of its own");
  }
}

}  // namespace rapt
