// Guards: optional checks of what calls read and compute. docs/guide/guards.md states their cost.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "rapt/export.h"

namespace rapt {

/// A guard's report of a call.
struct GuardReport {
  /// The guard that reports.
  enum class Guard : std::uint8_t { nan, shadow, determinism };
  /// The kind of report.
  enum class Kind : std::uint8_t {
    finding,      ///< the call read or computed a wrong value
    not_watched,  ///< the guard does not check calls like this one. Reported once per context, operation and reason,
                  ///< unless Guards::repeat_not_watched
  };
  /// An element: its tensor by the name that errors use, or "scores" for an element of the scores, and its index.
  /// Scores are [b, hq, sq, sk]; rows and keys count within their sequence.
  struct Place {
    std::string tensor;
    std::vector<std::int64_t> index;
  };

  Guard guard = Guard::nan;
  Kind kind = Kind::finding;
  std::string problem;  ///< the problem of the call, as text
  std::string entry;    ///< the name of the entry that computed the call
  Place place{};        ///< the element with `value`; not_watched: empty
  double value = 0;     ///< the element's value
  double wanted = 0;    ///< shadow: the reference's value; determinism: the second run's value; nan: 0
  double bound = 0;     ///< shadow: the largest allowed difference of `value` and `wanted`; otherwise 0
  Place seen{};         ///< nan: the first result that is not finite, if it is not `place` itself
  std::string reason;   ///< not_watched: the reason
};

RAPT_API std::string_view to_string(GuardReport::Guard guard) noexcept;  ///< "nan", "shadow" or "determinism"
/// The report on one line: "nan: k[0, 1, 7, 3] is nan, first seen in out[0, 1, 9, 0]; attention b=1 ... ->
/// attention_prefill.f32...".
RAPT_API std::string to_string(const GuardReport& report);

/// The guards that check the calls of a context. A guard checks calls on the CPU, on the calling thread, after the
/// call's work is done, and reports at most one finding per call. No guard changes a bit of a result.
struct Guards {
  /// The nan guard reports a result that is not finite, and the input that caused it. A -inf that stands for "no key"
  /// counts as finite. The guard reads results once, and inputs only if a result is not finite. It checks all
  /// operations.
  bool nan = false;
  /// The shadow guard recomputes this many rows of each call in float64, different rows in every call, and compares
  /// them with the bounds of the contract (docs/contract.md, "Numerics"); 0: none. It checks out and lse of
  /// attention(), and dq of attention_backward().
  int shadow = 0;
  /// A factor of the shadow guard's bounds. With 1 they are the promise of every kernel; a smaller factor reports
  /// errors before they break a promise. Must be 1 without the shadow guard.
  double tolerance = 1;
  /// The determinism guard runs every call a second time, into its own memory, and compares all bits. The second run
  /// has one worker if the first had several, and several otherwise. It checks all operations except append_kv(),
  /// rotary_append_kv() with a cache or in place, and delta_rule() with pools of states.
  bool determinism = false;
  /// Receives the reports, on the calling thread, after results are written. If it throws, the call throws the same
  /// exception. Must be thread-safe. Empty: each report is one line on standard error.
  std::function<void(const GuardReport&)> handler{};
  /// Report `not_watched` for every call, for handlers that count these calls. Each report costs the text of its
  /// problem.
  bool repeat_not_watched = false;

  /// Whether any guard is on.
  bool any() const noexcept { return nan || shadow > 0 || determinism; }
  /// Reads words separated by commas, in any order: "nan", "shadow=16", "tolerance=0.5", "determinism". An empty text
  /// is no guard. Throws Error, which names an unknown or repeated word.
  RAPT_API static Guards parse(std::string_view words);
  /// Reads the environment's RAPT_GUARDS, which contexts without guards use.
  RAPT_API static Guards of_environment();
};

/// The text that Guards::parse() reads; "" if no guard is on. It omits handler and repeat_not_watched.
RAPT_API std::string to_string(const Guards& guards);

}  // namespace rapt
