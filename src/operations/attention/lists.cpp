#include "operations/attention/lists.hpp"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <new>
#include <string>

#include "core/span.hpp"
#include "rapt/types.hpp"

namespace rapt {
namespace {

using std::int64_t;

// As the tensors have them, with entries of type T. Tokens are counted over the batch.
template <class T>
class Lists {
 public:
  explicit Lists(const AttentionParams& params) : f_(params) {}

  int64_t tokens() const { return f_.b; }  // each is a sequence of its own
  int64_t entries() const { return f_.sk; }

  const T* of(int64_t token) const {
    return static_cast<const T*>(f_.pages.data) + batch_of(token) * f_.pages_stride_b +
           row_of(token) * f_.pages_stride_token;
  }

  // How many entries of a list count.
  int64_t count_of(int64_t token) const {
    if (!f_.counts) return entries();
    const int64_t b = batch_of(token), row = row_of(token);
    const int64_t count = f_.counts.element(b * f_.counts_stride_b + row * f_.counts.stride);
    if (count < 0 || count > entries())
      throw Error("kv.counts",
                  std::to_string(count) + " keys of token " + std::to_string(row) + " of sequence " + std::to_string(b),
                  "0 to n = " + std::to_string(entries()));
    return count;
  }

  // Among the first `count` of a list. All of them are checked.
  int64_t valid_entries(int64_t token, int64_t count) const {
    const T* const list = of(token);
    const int64_t step = f_.pages.stride;
    int64_t valid = 0;
    T largest = -1;
    for (int64_t j = 0; j < count; ++j) {
      const T row = list[j * step];
      valid += row >= 0, largest = std::max(largest, row);
    }
    if (largest < f_.page_count) return valid;
    int64_t j = 0;
    while (list[j * step] != largest) ++j;
    throw Error("kv.indices",
                "key " + std::to_string(largest) + " at [" + std::to_string(batch_of(token)) + ", " +
                    std::to_string(row_of(token)) + ", " + std::to_string(j) + "]",
                f_.page_count == 0
                    ? "negative, for no key, as k has no rows"
                    : "0 to " + std::to_string(f_.page_count - 1) + ", one of k's rows, or negative, for no key");
  }

 private:
  int64_t batch_of(int64_t token) const { return token / f_.tokens; }
  int64_t row_of(int64_t token) const { return token % f_.tokens; }

  const AttentionParams& f_;
};

// Copies of the lists that kernels see instead.
template <class T>
struct KeptLists {
  std::unique_ptr<int64_t[]> length;
  std::unique_ptr<T[]> rows;
};

template <class T>
std::shared_ptr<const void> read(AttentionParams& f) {
  const Lists<T> lists(f);
  const int64_t tokens = lists.tokens(), n = lists.entries();
  std::shared_ptr<KeptLists<T>> kept;  // from the first list on that is not full
  int64_t longest = 0;
  bool has_gaps = false;
  for (int64_t i = 0; i < tokens; ++i) {
    const int64_t count = lists.count_of(i), valid = lists.valid_entries(i, count);
    if (valid < n && !kept) {
      kept = std::make_shared<KeptLists<T>>();
      kept->length = std::make_unique_for_overwrite<int64_t[]>(static_cast<std::size_t>(tokens));
      std::fill_n(kept->length.get(), i, n);
    }
    if (kept) kept->length[static_cast<std::size_t>(i)] = valid;
    has_gaps = has_gaps || (valid < count && lists.valid_entries(i, valid) < valid);
    longest = std::max(longest, valid);
  }
  if (!kept) return nullptr;
  if (has_gaps) {
    int64_t size = 0;
    if (__builtin_mul_overflow(tokens, longest, &size)) throw std::bad_alloc();
    kept->rows = std::make_unique_for_overwrite<T[]>(static_cast<std::size_t>(size));
    for (int64_t i = 0; i < tokens; ++i) {
      const T* const list = lists.of(i);
      T* const rows = kept->rows.get() + i * longest;
      const int64_t length = kept->length[static_cast<std::size_t>(i)];
      for (int64_t j = 0, at = 0; at < length && j < n; ++j)
        if (const T row = list[j * f.pages.stride]; row >= 0) rows[at++] = row;
    }
    f.pages = {kept->rows.get(), 1, f.pages.is_int64};
    f.pages_stride_b = f.tokens * longest, f.pages_stride_token = longest;
  }
  f.k_len = {kept->length.get(), 1, true};
  return kept;
}

}  // namespace

std::shared_ptr<const void> read_lists(AttentionParams& params) {
  return params.pages.is_int64 ? read<int64_t>(params) : read<std::int32_t>(params);
}

}  // namespace rapt
