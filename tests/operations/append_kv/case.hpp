// The tensors of an AppendKvProblem, filled with reproducible values, and what append_kv() must make of them.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "rapt/append_kv.hpp"
#include "support/cache.hpp"
#include "support/case_of.hpp"
#include "support/device.hpp"

namespace rapt::testing {

/// New rows are normal, at sizes from 2^-12 to 2^12; one in eleven is zeros. Sequences have had no keys, as many as
/// leave just the room for the new ones (those of rings, more than the ring has rows), or any number between. Scales
/// and zeros that are given broadcast over rows or over entries too, depending on the seed, and are too small for some
/// rows. Pages of new keys lie in random order, and three pages are nobody's; table entries that no new key needs are
/// no pages. The cache, and scales that are computed, are poisoned before the call.
struct AppendCase {
  /// New rows and the cache that they go to.
  struct Side {
    Tensor fresh, cache, scale, zero;
    std::vector<float> given_scale, given_zero;  ///< what they hold where they are inputs
  };

  /// Throws Error for ragged totals that b sequences with that longest one cannot have.
  explicit AppendCase(const AppendKvProblem& problem, std::uint64_t seed = 1, Placement placement = Placement::heap,
                      Spacing spacing = Spacing::dense);

  AppendKvArgs args();
  void run(const Context& context) { append_kv(args(), context); }
  void run(const Forced& context) { testing::run(args(), context); }
  /// Makes inputs read-only where the placement allows it.
  void protect_inputs();
  /// Poisons the cache, and the scales and zeros that are outputs, again.
  void clear();
  std::vector<Tensor*> outputs();
  /// Reads back every row_step-th new row of each sequence, and the last, in float64 and compares it with what went in,
  /// by the bounds that include/rapt/append_kv.hpp states; and every other row with what was there before.
  Verdict verdict(std::int64_t row_step = 1) const;

  AppendKvProblem problem;
  Side k, v;    ///< v has no tensors where values are columns of the keys
  Tensor tail;  ///< where the last columns of keys go, if not to k
  Tensor seqlens, cu_seqlens, block_table;
  /// Of calls that do something to new keys first: f32 of k_new's shape, what they become and what that may be off by.
  struct Made {
    Tensor x, off;
  };
  /// Adds what verdict() says to `tally`.
  void compare(std::int64_t row_step, Tally& tally, const Made* keys = nullptr) const;

  std::int64_t keys_before(std::int64_t i) const { return before_[static_cast<std::size_t>(i)]; }
  /// New rows of sequence i, and the first of them in ragged tensors, else 0.
  std::int64_t count(std::int64_t i) const;
  std::int64_t first_row(std::int64_t i) const { return first_.empty() ? 0 : first_[static_cast<std::size_t>(i)]; }

 private:
  /// Of rows of `size` elements, of which the last `tail_size` go elsewhere.
  Side make(std::int64_t size, std::int64_t tail_size, std::int64_t groups, bool zeros, std::uint64_t seed,
            Placement placement, Spacing spacing) const;
  /// Where new row t of sequence i goes: nowhere if it is not among the last ones that a ring keeps.
  Slot slot(std::int64_t i, std::int64_t t) const;
  void compare(const Side& side, std::int64_t row_step, Tally& tally, const Made* made) const;
  void compare_row(const Side& side, std::int64_t i, std::int64_t t, std::int64_t h, Tally& tally,
                   const Made* made) const;
  float row_at(const Tensor& fresh, std::int64_t i, std::int64_t t, std::int64_t h, std::int64_t c) const;

  Dims before_, first_;       // keys of each sequence, and its first new row if they are ragged
  std::vector<Dims> pages_;   // of each sequence, -1 where no new key goes
  std::int64_t entries_ = 0;  // of the cache: sequences or pages
  std::int64_t rows_ = 0;     // of an entry
  std::int64_t first_column_ = 0;
};

template <>
struct CaseOf<AppendKvProblem> : CaseTraits<AppendKvProblem, AppendCase> {
  static std::vector<DType> types(const AppendKvProblem& problem);  ///< inputs first
  static double tensor_bytes(const AppendKvProblem& problem);
  static Sizes sizes(const AppendKvProblem& problem);
  static std::int64_t rows(const AppendKvProblem& problem) { return problem.n; }
};

/// For DeviceCallOf.
void move_tensors(AppendKvArgs& args, DeviceTensors& tensors);

}  // namespace rapt::testing
