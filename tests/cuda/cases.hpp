// Attention on every entry that a GPU has. Skipped, by name, where there is no GPU.
#pragma once

#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "streams.hpp"
#include "support/check.hpp"
#include "support/dtypes.hpp"
#include "support/fill.hpp"

namespace rapt::testing {

/// The entries on a GPU that take the problem, in dispatch order.
inline std::vector<std::string> on_gpu(const AttentionProblem& problem) {
  std::vector<std::string> names = every_entry(problem);
  std::erase_if(names, [](const std::string& entry) { return device_of(entry) != DeviceType::cuda; });
  return names;
}

/// What each_problem() makes cases of, and how.
struct Choice {
  std::string_view named = "";  ///< what the entries' names begin with
  std::span<const DType> types = kFloatTypes;
  std::function<Case(const AttentionProblem&)> make = [](const AttentionProblem& problem) { return Case(problem); };
};

/// Calls test(case, entries) for every problem and type that some of the chosen entries on a GPU take; of quantised
/// caches queries have the type, of f8e4m3 queries results.
inline void each_problem(std::span<const char* const> problems,
                         const std::function<void(Case&, const std::vector<std::string>&)>& test,
                         const Choice& choice = {}) {
  bool any = false;
  for (const char* text : problems)
    for (const DType dtype : choice.types) {
      const AttentionProblem given = AttentionProblem::parse(text);
      AttentionProblem problem = typed(text, dtype);
      if (given.kv_dtype != DType::f32) problem.kv_dtype = given.kv_dtype;
      if (given.q_dtype == DType::f8e4m3) problem.q_dtype = given.q_dtype;
      std::vector<std::string> names = on_gpu(problem);
      std::erase_if(names, [&](const std::string& entry) { return !entry.starts_with(choice.named); });
      if (names.empty()) continue;
      any = true;
      INFO(problem.to_string());
      Case c = choice.make(problem);
      test(c, names);
    }
  for (const EntryInfo& entry : entries())
    if (!any && entry.backend == "cuda" && entry.name.starts_with(choice.named))
      WARN("skipped: " << entry.name << ": " << entry.unusable);
}

/// Calls test(entry, case) for each of these entries. Every one gets the case as it was made.
inline void each_case(std::span<const char* const> problems, const std::function<void(const std::string&, Case&)>& test,
                      const Choice& choice = {}) {
  each_problem(
      problems,
      [&](const Case& made, const std::vector<std::string>& names) {
        for (const std::string& entry : names) {
          INFO(entry);
          Case c = made;
          test(entry, c);
        }
      },
      choice);
}

/// Holds the entries' results to the oracle.
inline void check_on(const std::vector<std::string>& names, Case& c) {
  const Reference reference = oracle(c.args());
  for (const std::string& entry : names) {
    const Errors errors = run_and_compare(c, entry, reference);
    INFO(entry << ": " << c.problem.to_string() << ": " << describe(errors));
    CHECK(errors.ok());
    CHECK(c.out.gaps_intact());
  }
}
/// Those of every problem.
inline void check_each(std::span<const char* const> problems, const Choice& choice = {}) {
  each_problem(
      problems, [](Case& c, const std::vector<std::string>& names) { check_on(names, c); }, choice);
}

/// Whether the entry exists, is selected and usable. Warns about one that is selected but not usable.
inline bool is_usable(const std::string& entry) {
  for (const EntryInfo& info : entries()) {
    if (info.name != entry || !selected(entry)) continue;
    if (info.unusable.empty()) return true;
    WARN("skipped: " << entry << ": " << info.unusable);
  }
  return false;
}

/// Every kind of queries and keys; together they run every kernel.
inline constexpr const char* kEveryWay[] = {
    "attention b=2 hq=4 hk=2 sq=150 sk=300 d=64 causal align=bottom_right lse",
    "attention b=3 hq=4 hk=1 sq=90 sk=120 d=40 ragged_q=200 ragged_k=250 lse",
    "attention b=6 hq=8 hk=2 sq=70 sk=912 d=64 ragged_q=90 page=16 seqlens causal align=bottom_right lse",
    "attention b=2 hq=6 hk=2 sq=3 sk=320 d=128 page=16 seqlens causal align=bottom_right lse",
    "attention b=1 hq=4 hk=2 sq=90 sk=200 d=256 dv=192 window=80,-1 align=bottom_right lse",
    "attention b=2 hq=6 hk=2 sq=3 sk=720 d=64 page=16 seqlens kv=i8 groups=2 zeros causal align=bottom_right lse",
    "attention b=2 hq=16 hk=1 sq=1 sk=4480 d=576 dv=512 latent page=64 seqlens lse",
    "attention q=f8e4m3 kv=f8e4m3 b=2 hq=4 hk=2 sq=150 sk=300 d=64 groups=1 head_scales q_scale causal "
    "align=bottom_right lse",
    "attention q=f8e4m3 kv=f8e4m3 b=2 hq=4 hk=2 sq=300 sk=700 d=128 groups=1 head_scales causal align=bottom_right lse",
    "attention q=f8e4m3 kv=f8e4m3 b=6 hq=8 hk=2 sq=70 sk=912 d=128 ragged_q=90 page=16 seqlens causal "
    "align=bottom_right lse",
    "attention q=f8e4m3 kv=f8e4m3 b=2 hq=6 hk=2 sq=3 sk=1200 d=128 page=16 seqlens groups=1 head_scales q_scale lse"};

/// The same elements, with a stride of `row` elements from row to row.
inline Tensor with_rows_apart(const Tensor& t, std::int64_t row) {
  const auto& shape = t.layout().shape;
  Tensor apart(t.dtype(), Layout(std::vector<std::int64_t>(shape.begin(), shape.begin() + 4),
                                 std::vector<std::int64_t>{shape[1] * shape[2] * row, shape[2] * row, row, 1}));
  for (std::int64_t i = 0; i < t.size(); ++i) apart.flat(i) = t.flat(i);
  return apart;
}

/// A case whose keys are numbers wherever they lie, for a test that chooses the lengths itself: all are sk.
inline Case with_all_keys(const AttentionProblem& problem) {
  AttentionProblem without_lengths = problem;
  without_lengths.kv_lengths = false;
  Case c(without_lengths);
  c.problem.kv_lengths = problem.kv_lengths;
  c.seqlens = index_tensor(Dims(static_cast<std::size_t>(problem.b), problem.sk), 1, Placement::heap);
  return c;
}

/// What a case's outputs are, to the bit.
struct Bytes {
  explicit Bytes(const Case& c) : out(copy(c.out)), lse(copy(c.lse)) {}
  static std::vector<std::byte> copy(const Tensor& t) {
    return {t.buffer().data(), t.buffer().data() + t.buffer().size()};
  }
  friend bool operator==(const Bytes&, const Bytes&) = default;
  std::vector<std::byte> out, lse;
};

inline Bytes expected(const std::string& entry, Case& c) {
  c.poison_outputs();
  run(c.args(), entry);
  return Bytes(c);
}

}  // namespace rapt::testing
