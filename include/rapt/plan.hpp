// What a call would do and why, and doing it many times.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "rapt/attention.hpp"
#include "rapt/problem.hpp"

namespace rapt {

/// One line of dispatch's reasoning: an entry, and why it was passed over (empty: chosen, or usable but later in
/// order).
struct Candidate {
  std::string entry;
  std::string refusal;
};

/// A validated, dispatched call, reusable for every call with the same problem (shapes, dtypes, features). Immutable
/// and thread-safe.
class Plan {
 public:
  RAPT_API explicit Plan(const AttentionArgs& args, const Context& context = default_context());
  /// The same from the problem alone, without any tensor: what would run? Throws Error for problems that no arguments
  /// could give (hq % hk != 0, d = 0, ...) and when no entry takes it.
  RAPT_API explicit Plan(const Problem& problem, const Context& context = default_context());

  RAPT_API std::string_view entry() const noexcept;    ///< "attention_forward.f32.avx2.q24k128"
  RAPT_API std::string_view backend() const noexcept;  ///< "cpu"
  RAPT_API const Problem& problem() const noexcept;
  RAPT_API std::size_t workspace_bytes() const noexcept;  ///< that run() needs
  RAPT_API int threads() const noexcept;                  ///< strands the call is spread over
  RAPT_API std::string_view executor() const noexcept;    ///< name of the context's: who runs them, of calls on the CPU
  RAPT_API std::int64_t work_items() const noexcept;
  RAPT_API const std::vector<Candidate>& candidates() const noexcept;  ///< best first
  RAPT_API std::string explain() const;                                ///< all of the above for people

  /// Runs on `args`, which must give this plan's problem (else Error), in `workspace` as attention() does. With one it
  /// allocates nothing, but for what the executor does.
  RAPT_API void run(const AttentionArgs& args, std::span<std::byte> workspace = {}) const;

 private:
  struct Impl;
  std::shared_ptr<const Impl> impl_;
};

/// Bytes that are enough for every call with this problem, or with one that differs from it in smaller b, sq, sk,
/// ragged_q or ragged_k only: what a server allocates once for its largest batch and length (of pages: for as many as
/// its block tables have room for). Holds for as many threads as the context now has. Throws Error as Plan does.
RAPT_API std::size_t max_workspace_bytes(const Problem& largest, const Context& context = default_context());

/// One kernel a build of rapt has, for listing.
struct EntryInfo {
  std::string name;
  std::string backend;
  std::string unusable;  ///< empty, or why this machine cannot run it, or the OS does not let this process
  std::string opt_in;    ///< empty, or why it runs only where its name, or RAPT_ISA, is forced
};

/// Every entry of this build, in dispatch order.
RAPT_API std::vector<EntryInfo> entries();
/// Instruction sets that are built in and usable on this machine, best first. AMX is among them where the CPU and the
/// OS have it, until the OS has refused its registers to this process, which is asked for them at the first call that
/// would run on them (docs/contract.md, "Threads").
RAPT_API std::vector<Isa> usable_isas();
/// Library version, "0.1.0".
RAPT_API std::string_view version() noexcept;

}  // namespace rapt
