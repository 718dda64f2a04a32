#include "core/span.hpp"

#include <algorithm>
#include <array>
#include <cstddef>
#include <functional>
#include <limits>
#include <span>
#include <tuple>

namespace rapt {
namespace {

using std::int64_t;

constexpr int64_t kMaxSpan = int64_t{1} << 56;  // bytes: more than any address space

struct Dim {
  int64_t stride, size;
};

// Dimensions by rising stride, without memory of the heap: every call comes here.
struct Dims {
  std::array<Dim, kMaxDims + 1> all{};
  std::size_t count = 0;

  void insert(int64_t stride, int64_t size) {
    std::size_t at = count++;
    for (; at > 0 && all[at - 1].stride > stride; --at) all[at] = all[at - 1];
    all[at] = {stride, size};
  }
  const Dim* begin() const { return all.data(); }
  const Dim* end() const { return all.data() + count; }
};

// The dimensions of more than one element by rising stride, in bytes, those of an element included; `merge`: as few as
// describe the same bytes.
Dims byte_dims(const TensorView& t, bool merge) {
  const auto element = static_cast<int64_t>(size_of(t.dtype));
  Dims dims;
  dims.insert(1, element);
  for (std::size_t i = 0; i < static_cast<std::size_t>(t.ndim); ++i)
    if (t.shape[i] > 1 && t.strides[i] > 0) dims.insert(t.strides[i] * element, t.shape[i]);
  std::size_t n = 0;
  for (std::size_t i = 1; i < dims.count; ++i) {
    Dim& last = dims.all[n];
    const Dim& dim = dims.all[i];
    if (dim.stride == last.stride) last.size += dim.size - 1;
    else if (merge && dim.stride == last.stride * last.size) last.size *= dim.size;
    else dims.all[++n] = dim;
  }
  dims.count = n + 1;
  return dims;
}

int64_t size_at(const Dims& dims, int64_t stride) {
  const auto* found = std::find_if(dims.begin(), dims.end(), [&](const Dim& dim) { return dim.stride == stride; });
  return found == dims.end() ? 1 : found->size;
}

// Writes `delta`, the bytes from low's beginning to high's, in the mixed radix of the strides. If no digit carries,
// bytes coincide only where all digits do. False when it cannot tell.
bool apart(const Dims& low, const Dims& high, int64_t delta) {
  std::array<int64_t, 2 * std::tuple_size_v<decltype(Dims::all)>> strides;
  std::size_t count = 0;
  for (const auto* dims : {&low, &high})
    for (const Dim& dim : *dims) strides[count++] = dim.stride;
  const auto end = strides.begin() + static_cast<std::ptrdiff_t>(count);
  std::sort(strides.begin(), end, std::greater<>());
  bool result = false;
  int64_t above = std::numeric_limits<int64_t>::max();
  for (const int64_t stride : std::span(strides.begin(), std::unique(strides.begin(), end))) {
    const int64_t digit = delta / stride;
    delta %= stride;
    const int64_t reach = std::max(size_at(low, stride), digit + size_at(high, stride));
    if (reach > above / stride) return false;
    result |= digit >= size_at(low, stride);
    above = stride;
  }
  return result;
}

}  // namespace

std::string shape_text(const Layout& t) {
  std::string text = "[";
  for (int i = 0; i < t.ndim; ++i) text += (i ? ", " : "") + std::to_string(t.shape[static_cast<std::size_t>(i)]);
  return text + "]";
}

bool same_shape(const Layout& a, const Layout& b) {
  return a.ndim == b.ndim && std::equal(a.shape.begin(), a.shape.begin() + a.ndim, b.shape.begin());
}

int64_t span_of(const std::string& name, const TensorView& t, bool writable) {
  if (t.ndim < 0 || t.ndim > kMaxDims)
    throw Error(name, std::to_string(t.ndim) + " dimensions", "1 to " + std::to_string(kMaxDims));
  int64_t last = 0;
  bool empty = false;
  for (std::size_t i = 0; i < static_cast<std::size_t>(t.ndim); ++i) {
    if (t.shape[i] < 0 || t.shape[i] > kMaxSize)
      throw Error(name, "size " + std::to_string(t.shape[i]) + " in dimension " + std::to_string(i), "0 to 2^48");
    if (t.strides[i] < 0) throw Error(name, "stride " + std::to_string(t.strides[i]), "strides of 0 or more");
    empty |= t.shape[i] == 0;
  }
  if (empty) return 0;
  for (std::size_t i = 0; i < static_cast<std::size_t>(t.ndim); ++i) {
    int64_t step = 0;
    if (__builtin_mul_overflow(t.shape[i] - 1, t.strides[i], &step) || __builtin_add_overflow(last, step, &last))
      throw Error(name, "strides that reach past int64", "a view within the address space");
  }
  int64_t bytes = 0, end = 0;
  const auto size = static_cast<int64_t>(size_of(t.dtype));
  const auto address = reinterpret_cast<std::uintptr_t>(t.data);
  if (size == 0) throw Error(name, "an unknown dtype", "one of rapt::DType");
  if (__builtin_mul_overflow(last, size, &bytes) || __builtin_add_overflow(bytes, size, &bytes) || bytes > kMaxSpan ||
      __builtin_add_overflow(static_cast<int64_t>(address), bytes, &end))
    throw Error(name, "strides that reach past the address space", "a view within it");
  if (t.data == nullptr) throw Error(name, "a null pointer for " + shape_text(t), "memory");
  if (address % static_cast<std::uintptr_t>(size) != 0)
    throw Error(name, "an address that is no multiple of " + std::to_string(size), "aligned elements");
  if (!writable) return bytes;
  // Every stride of an output must step over all that the smaller ones reach.
  Dims dims;
  for (std::size_t i = 0; i < static_cast<std::size_t>(t.ndim); ++i)
    if (t.shape[i] > 1) dims.insert(t.strides[i], t.shape[i]);
  int64_t reach = 0;
  for (const auto& [stride, count] : dims) {
    if (stride <= reach)
      throw Error(name, "strides by which elements of " + shape_text(t) + " overlap", "an output without overlap");
    reach += stride * (count - 1);
  }
  return bytes;
}

int64_t plain_span_of(const TensorView& t, bool writable) {
  if (t.ndim < 0 || t.ndim > kMaxDims) return -1;
  int64_t last = 0;
  bool empty = false;
  for (std::size_t i = 0; i < static_cast<std::size_t>(t.ndim); ++i) {
    const int64_t size = t.shape[i], stride = t.strides[i];
    if (size < 0 || size > kMaxSize || stride < 0) return -1;
    int64_t step = 0;
    if (size == 0) empty = true;
    else if (__builtin_mul_overflow(size - 1, stride, &step) || __builtin_add_overflow(last, step, &last)) return -1;
  }
  if (empty) return 0;
  const std::size_t size = size_of(t.dtype);
  const auto address = reinterpret_cast<std::uintptr_t>(t.data);
  if (size == 0 || t.data == nullptr || address % size != 0 || address >> 62 != 0 || last > (int64_t{1} << 52))
    return -1;
  int64_t reach = 0;  // of an output's inner dimensions, which each outer stride has to step over
  for (std::size_t i = static_cast<std::size_t>(t.ndim); writable && i-- > 0;) {
    if (t.shape[i] <= 1) continue;
    if (t.strides[i] <= reach) return -1;
    reach += t.strides[i] * (t.shape[i] - 1);
  }
  return (last + 1) * static_cast<int64_t>(size);
}

bool may_overlap(const TensorView& a, int64_t a_bytes, const TensorView& b, int64_t b_bytes) {
  if (a_bytes == 0 || b_bytes == 0) return false;
  const auto at = reinterpret_cast<std::uintptr_t>(a.data), bt = reinterpret_cast<std::uintptr_t>(b.data);
  if (at >= bt + static_cast<std::uintptr_t>(b_bytes) || bt >= at + static_cast<std::uintptr_t>(a_bytes)) return false;
  const TensorView &low = at <= bt ? a : b, &high = at <= bt ? b : a;
  const auto delta = static_cast<int64_t>(at <= bt ? bt - at : at - bt);
  const auto told_apart = [&](bool merge) { return apart(byte_dims(low, merge), byte_dims(high, merge), delta); };
  return !told_apart(false) && !told_apart(true);
}

int64_t check_starts(const std::string& name, const Integers& starts, int64_t count, int64_t total) {
  if (count == 0 || starts[0] != 0) throw Error(name, "a list that does not start with 0", "[0, ..., total]");
  int64_t longest = 0;
  for (int64_t i = 1; i < count; ++i) {
    const int64_t before = starts[i - 1], start = starts[i];
    if (start < before)
      throw Error(name,
                  "the decreasing " + std::to_string(before) + ", " + std::to_string(start) + " of sequence " +
                      std::to_string(i - 1),
                  "starts that never decrease");
    longest = std::max(longest, start - before);
  }
  if (const int64_t last = starts[count - 1]; last != total)
    throw Error(name, "a last element of " + std::to_string(last), "the tensor's rows, " + std::to_string(total));
  return longest;
}

void check_ragged(const char* name, int64_t total, const char* rows, int64_t b, int64_t longest) {
  if (total == -1) return;
  if (total < longest || (longest > 0 ? (total - 1) / longest >= b : total > 0))
    throw Error(name, std::to_string(total) + " " + rows, "between the longest sequence's and b times it");
}
void check_row_count(int64_t b, int64_t heads, int64_t tokens) {
  int64_t rows = 1;
  for (const int64_t size : {b, heads, tokens})  // a size of 0 must not hide the others
    if (__builtin_mul_overflow(rows, std::max<int64_t>(size, 1), &rows) || rows > kMaxOffset)
      throw Error("q", "more than 2^52 rows", "a smaller problem");
}

void refuse_page(const char* table, const char* keys, int64_t count, int64_t page, const std::string& place) {
  throw Error(table, "page " + std::to_string(page) + place,
              count == 0 ? std::string("no keys, as ") + keys + " has no pages"
                         : "0 to " + std::to_string(count - 1) + ", one of " + keys + "'s pages");
}

}  // namespace rapt
