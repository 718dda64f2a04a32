// Attention on every entry that a GPU has. Skipped, by name, where there is no GPU.
#pragma once

#include <functional>
#include <span>
#include <string_view>

#include "streams.hpp"
#include "support/check.hpp"

namespace rapt::testing {

/// Calls test(entry, case) for every entry that runs on a GPU and whose name begins with `named`, every problem and
/// type; of quantised caches queries have it, of f8e4m3 queries results.
inline void each_case(std::span<const char* const> problems, const std::function<void(const std::string&, Case&)>& test,
                      std::string_view named = "") {
  bool any = false;
  for (const char* text : problems)
    for (DType dtype : kFloatTypes) {
      const AttentionProblem given = AttentionProblem::parse(text);
      AttentionProblem problem = typed(text, dtype);
      if (given.kv_dtype != DType::f32) problem.kv_dtype = given.kv_dtype;
      if (given.q_dtype == DType::f8e4m3) problem.q_dtype = given.q_dtype;
      for (const std::string& entry : every_entry(problem)) {
        if (device_of(entry) != DeviceType::cuda || !entry.starts_with(named)) continue;
        any = true;
        INFO(entry << ": " << problem.to_string());
        Case c(problem);
        test(entry, c);
      }
    }
  for (const EntryInfo& entry : entries())
    if (!any && entry.backend == "cuda" && entry.name.starts_with(named))
      WARN("skipped: " << entry.name << ": " << entry.unusable);
}

/// Whether the entry is there, selected and usable; says its name where it is only not usable.
inline bool is_usable(const std::string& entry) {
  for (const EntryInfo& info : entries()) {
    if (info.name != entry || !selected(entry)) continue;
    if (info.unusable.empty()) return true;
    WARN("skipped: " << entry << ": " << info.unusable);
  }
  return false;
}

/// Every way to keep queries and keys, and every kernel.
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

/// The same numbers, each row so many elements behind the one before.
inline Tensor with_rows_apart(const Tensor& t, std::int64_t row) {
  const auto& shape = t.layout().shape;
  Tensor apart(t.dtype(), Layout(std::vector<std::int64_t>(shape.begin(), shape.begin() + 4),
                                 std::vector<std::int64_t>{shape[1] * shape[2] * row, shape[2] * row, row, 1}));
  for (std::int64_t i = 0; i < t.size(); ++i) apart.flat(i) = t.flat(i);
  return apart;
}

/// Puts numbers where a case has none, for a test that chooses the lengths itself.
inline void fill_past_lengths(Case& c) {
  AttentionProblem without_lengths = c.problem;
  without_lengths.kv_lengths = false;
  Case plain(without_lengths);
  for (std::int64_t i = 0; i < c.k.size(); ++i) c.k.flat(i) = plain.k.flat(i);
  for (std::int64_t i = 0; i < c.v.size(); ++i) c.v.flat(i) = plain.v.flat(i);
}

/// Holds the entry's result to the oracle.
inline void check_on(const std::string& entry, Case& c) {
  const Errors errors = run_and_compare(c, entry, oracle(c.args()));
  INFO(describe(errors));
  CHECK(errors.ok());
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
