// Guards: checks of what calls read and compute, for those who ask for them. docs/guide/guards.md has their cost.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "rapt/export.h"

namespace rapt {

/// What a guard has to say of a call.
struct GuardReport {
  enum class Guard : std::uint8_t { nan, shadow, determinism };
  enum class Kind : std::uint8_t {
    finding,      ///< the call read or computed what it should not have
    not_watched,  ///< the guard does not look at calls like this one. Said once of a context, operation and reason,
                  ///< unless Guards::repeat_not_watched
  };
  /// An element: its tensor by the name that errors have for it, "scores" for one of those, and its index there.
  /// Scores are [b, hq, sq, sk], rows and keys counted within their sequence.
  struct Place {
    std::string tensor;
    std::vector<std::int64_t> index;
  };

  Guard guard = Guard::nan;
  Kind kind = Kind::finding;
  std::string problem;  ///< its text
  std::string entry;
  Place place{};       ///< of `value`; not_watched: empty
  double value = 0;    ///< what is there
  double wanted = 0;   ///< shadow: what the reference has; determinism: what the second run gave; nan: 0
  double bound = 0;    ///< shadow: how far `value` may be from `wanted`; else 0
  Place seen{};        ///< nan: the first result that is not finite, if that is not `place` itself
  std::string reason;  ///< not_watched: why
};

RAPT_API std::string_view to_string(GuardReport::Guard guard) noexcept;  ///< "nan", "shadow" or "determinism"
/// On one line: "nan: k[0, 1, 7, 3] is nan, first seen in out[0, 1, 9, 0]; attention b=1 ... ->
/// attention_prefill.f32...".
RAPT_API std::string to_string(const GuardReport& report);

/// Which guards watch the calls of a context. Each looks at calls on the CPU, after their work is done, on the thread
/// that called, and has one finding of a call at most. None changes a bit of a result.
struct Guards {
  /// Results that are not finite (-inf is, where it stands for "no key"), and what of the inputs made them so. Reads
  /// results once; inputs only where something is wrong. All operations.
  bool nan = false;
  /// So many rows of each call, others in every call, are computed again in float64 and compared with what the contract
  /// allows (docs/contract.md, "Numerics"); 0: none. Of attention(), out and lse; of attention_backward(), dq.
  int shadow = 0;
  /// The factor of the shadow's bounds. 1 is what every kernel promises; below it the alarm comes before a promise is
  /// broken. Without a shadow nothing but 1.
  double tolerance = 1;
  /// Every call runs a second time, with one worker if it had several and else with several, into memory of its own;
  /// all bits have to be the same. All operations but append_kv(), rotary_append_kv() with a cache or in place, and
  /// delta_rule() in pools of states.
  bool determinism = false;
  /// Gets the reports, on the thread that called, when results are written. What it throws, the call throws. Must be
  /// thread-safe. Empty: each report is a line on standard error.
  std::function<void(const GuardReport&)> handler{};
  /// Calls that are not watched are reported every time, for a handler that knows better than once of a context what it
  /// has heard. Each costs the text of its problem.
  bool repeat_not_watched = false;

  bool any() const noexcept { return nan || shadow > 0 || determinism; }
  /// Of words with commas between them, in any order: "nan", "shadow=16", "tolerance=0.5", "determinism". None for an
  /// empty text. Throws Error that names a word it does not know, or that is there twice.
  RAPT_API static Guards parse(std::string_view words);
  /// The same of the environment's RAPT_GUARDS, which contexts read that are given no guards.
  RAPT_API static Guards of_environment();
};

/// What Guards::parse() reads; "" where no guard is on. Handler and repeat_not_watched are no part of it.
RAPT_API std::string to_string(const Guards& guards);

}  // namespace rapt
