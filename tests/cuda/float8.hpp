// Cases of q, k and v of f8e4m3 on every entry that a GPU has.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <limits>
#include <span>
#include <string>
#include <vector>

#include "cases.hpp"

namespace rapt::testing {

inline constexpr const char* kPrefill = "attention_prefill.bf16.cuda.sm90a";
inline constexpr const char* kDecode = "attention_decode.bf16.cuda.sm90a";
inline constexpr const char* kProducts = "attention_prefill.f8e4m3.cuda.sm90a";  // multiplies the codes
inline constexpr const char* kSimt = "attention_simt.f32.cuda.q64k64";
inline constexpr const char* kScales[] = {"", " q_scale", " groups=1 head_scales", " groups=1 head_scales q_scale"};

inline void check_on_gpu(Case& c) {
  check_on(on_gpu(c.problem), c);
}

/// Whether an entry has to take a problem whose q, k and v are f8e4m3, with scales of heads or none.
inline bool should_take(const std::string& entry, const AttentionProblem& p) {
  const std::int64_t size = std::max(p.d, p.dv);
  if (entry == kDecode) return size <= 256 && p.ragged_q < 0 && p.sq * (p.hq / p.hk) <= 64;
  if (entry != kProducts) return entry == kSimt || size <= 256;
  const bool is_modified = p.softcap != 0 || p.bias != p.kNone || p.mask != p.kNone || p.alibi || p.sinks;
  return (p.d == 64 || p.d == 128) && p.dv == p.d && p.ragged_q < 0 && p.ragged_k < 0 && !p.kv_lengths &&
         !is_modified && p.window_left < 0;
}

/// Calls test(case) for these words with each of `scales`, and results of each type in turn.
inline void each(std::span<const char* const> problems, std::span<const char* const> scales,
                 const std::function<void(Case&)>& test) {
  for (const EntryInfo& entry : entries())
    if (!has_gpu() && entry.backend == "cuda") WARN("skipped: " << entry.name << ": " << entry.unusable);
  std::size_t type = 0;
  for (const char* words : problems)
    for (const char* of : scales) {
      AttentionProblem problem = AttentionProblem::parse("attention q=f8e4m3 kv=f8e4m3 lse " + std::string(words) + of);
      problem.out_dtype = kFloatTypes[type++ % kFloatTypes.size()];
      if (!has_gpu()) continue;
      INFO(problem.to_string());
      const std::vector<std::string> names = on_gpu(problem);
      // One that refused too much would be left out in silence.
      for (const char* entry : {kPrefill, kDecode, kProducts, kSimt}) {
        INFO(entry);
        if (is_usable(entry))
          CHECK((std::find(names.begin(), names.end(), entry) != names.end()) == should_take(entry, problem));
      }
      if (names.empty()) continue;
      Case c(problem);
      test(c);
    }
}
inline void each(std::span<const char* const> problems, const std::function<void(Case&)>& test) {
  each(problems, std::array{kScales[0], kScales[3]}, test);
}

inline void fill(Tensor& tensor, float value) {
  for (std::int64_t i = 0; i < tensor.size(); ++i) tensor.flat(i) = value;
}
inline void make_positive(Tensor& tensor) {
  for (std::int64_t i = 0; i < tensor.size(); ++i) tensor.flat(i) = std::abs(tensor.flat(i));
}

/// Sequence n of dense arguments, and of its keys the first `keys`.
inline AttentionArgs sequence(AttentionArgs args, std::int64_t n, std::int64_t keys) {
  for (TensorView* t : {&args.q, &args.q_scale, &args.kv.k, &args.kv.v, &args.kv.k_scale, &args.kv.v_scale})
    if (*t && t->shape[0] > 1) *t = slice(*t, 0, n, 1);
  for (TensorView* t : {&args.kv.k, &args.kv.v}) *t = slice(*t, 2, 0, keys);
  args.kv.seqlens = {};
  args.out = slice(args.out, 0, n, 1), args.lse = slice(args.lse, 0, n, 1);
  return args;
}

inline std::string refusal(AttentionProblem problem, const std::string& entry) {
  problem.device = DeviceType::cuda;
  return refused_text([&] { Plan(problem, forced(entry)); });
}

}  // namespace rapt::testing
