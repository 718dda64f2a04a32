// What a call would do and why, and doing it many times.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

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
#define RAPT_OPERATION(name, Name, NAME) \
  RAPT_API explicit Plan(const Name##Args& args, const Context& context = default_context());
#include "rapt/operations.def"
  /// The same from the problem alone, without any tensor: what would run? Throws Error for problems that no arguments
  /// could give (hq % hk != 0, d = 0, ...) and when no entry takes it.
  RAPT_API explicit Plan(const Problem& problem, const Context& context = default_context());

  RAPT_API std::string_view entry() const noexcept;    ///< "attention_prefill.f32.avx2.q24k128"
  RAPT_API std::string_view backend() const noexcept;  ///< "cpu"
  RAPT_API const Problem& problem() const noexcept;
  RAPT_API std::size_t workspace_bytes() const noexcept;  ///< that run() needs
  RAPT_API int threads() const noexcept;                  ///< workers that the call is spread over
  RAPT_API std::string_view executor() const noexcept;    ///< the context's, which runs them, of calls on the CPU
  RAPT_API std::int64_t work_items() const noexcept;
  RAPT_API const std::vector<Candidate>& candidates() const noexcept;  ///< best first
  RAPT_API std::string explain() const;                                ///< all of the above for people

  /// Runs on `args`, which must give this plan's problem (else Error), in `workspace` as attention() does. With one,
  /// attention allocates nothing, but for what the executor does and for lists of gathered keys that are not full.
#define RAPT_OPERATION(name, Name, NAME) \
  RAPT_API void run(const Name##Args& args, std::span<std::byte> workspace = {}) const;
#include "rapt/operations.def"

 private:
  struct Impl;
  std::shared_ptr<const Impl> impl_;
};

/// Bytes that are enough for every call with this problem, and for every problem that differs from it only in smaller
/// batches and lengths: the comment of an operation's problem (of gradients: of the forward's) names these fields. What
/// a server allocates once, for its largest batch and length (of pages: for as many as its block tables have room for).
/// Holds for as many threads as the context now has. Throws Error as Plan does.
RAPT_API std::size_t max_workspace_bytes(const Problem& largest, const Context& context = default_context());

/// One kernel that this build of rapt has.
struct EntryInfo {
  std::string name;     ///< a label, the same in logs, tests and bench rows; the fields below say what it is
  std::string backend;  ///< "cpu", "cuda"
  Operation operation{};
  Phase phase{};
  std::string arithmetic;     ///< what it multiplies in: "f32"; "f16x3" is fp16 by three products of bf16 components
  std::string isa;            ///< "avx2", "amx"; of GPUs "cuda" where any will do, else "sm90a"
  std::vector<DType> dtypes;  ///< that it takes: of q, k and v, or of the first tensors of an operation without them
  std::int64_t min_head_size = 1;        ///< of d and dv
  std::int64_t max_head_size = 0;        ///< of d and dv
  std::int64_t max_value_head_size = 0;  ///< of dv alone
  int block_q = 0, block_k = 0;          ///< query rows and keys of its innermost block; 0: it has none, or it varies
  bool dropout = false;                  ///< of attention and its gradients: takes dropout
  std::string unusable;  ///< empty, or why this machine cannot run it, or the OS does not let this process
  std::string opt_in;    ///< empty, or why it runs only where its name, or RAPT_ISA, is forced
};

/// Every entry of this build, in dispatch order.
RAPT_API std::vector<EntryInfo> entries();
/// Instruction sets that are built in and usable on this machine, best first. AMX is among them where the CPU and the
/// OS have it, until the OS has refused its registers to this process, which is asked for them at the first call that
/// would run on them (docs/contract.md, "Threads").
RAPT_API std::vector<Isa> usable_isas();
/// Library version, "0.2.0".
RAPT_API std::string_view version() noexcept;

}  // namespace rapt
