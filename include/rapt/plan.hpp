// Plans: which kernel a call runs and why, and repeated calls without dispatch.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "rapt/problem.hpp"

namespace rapt {

/// An entry that dispatch considered, and why it was passed over. The refusal is empty for the chosen entry and for
/// usable ones later in the order.
struct Candidate {
  std::string entry;
  std::string refusal;
};

/// A validated, dispatched call, for use by all calls with the same problem (shapes, types, features). Immutable and
/// thread-safe.
class Plan {
 public:
#define RAPT_OPERATION(name, Name, NAME) \
  RAPT_API explicit Plan(const Name##Args& args, const Context& context = default_context());
#include "rapt/operations.def"
  /// A plan from the problem alone, without tensors. Throws Error for problems that no arguments could have (hq % hk !=
  /// 0, d = 0, ...) and if no entry takes the problem.
  RAPT_API explicit Plan(const Problem& problem, const Context& context = default_context());

  RAPT_API std::string_view entry() const noexcept;    ///< "attention_prefill.f32.avx2.q24k128"
  RAPT_API std::string_view backend() const noexcept;  ///< "cpu"
  RAPT_API const Problem& problem() const noexcept;
  RAPT_API std::size_t workspace_bytes() const noexcept;  ///< bytes that run() needs
  RAPT_API int threads() const noexcept;                  ///< number of workers of the call
  RAPT_API std::string_view executor() const noexcept;  ///< name of the context's executor, which runs calls on the CPU
  RAPT_API std::int64_t work_items() const noexcept;
  RAPT_API const std::vector<Candidate>& candidates() const noexcept;  ///< best first
  RAPT_API std::string explain() const;                                ///< all of the above, as text for people

  /// Runs on `args`, which must have this plan's problem (otherwise throws Error), in `workspace` as attention() does.
  /// With a workspace, attention allocates nothing itself, except for gathered keys on CPUs with lists that are not
  /// full.
#define RAPT_OPERATION(name, Name, NAME) \
  RAPT_API void run(const Name##Args& args, std::span<std::byte> workspace = {}) const;
#include "rapt/operations.def"

 private:
  struct Impl;
  std::shared_ptr<const Impl> impl_;
};

/// Bytes of workspace that are enough for every call with this problem, and for every problem that differs only in
/// smaller batches and lengths: what a server allocates once, for its largest batch and length (with pages: for the
/// room of its block tables). The comment of an operation's problem (for gradients: of the forward's) names these
/// fields. Holds for the context's current number of threads. Throws Error as Plan does.
RAPT_API std::size_t max_workspace_bytes(const Problem& largest, const Context& context = default_context());

/// A kernel of this build of rapt.
struct EntryInfo {
  std::string name;     ///< a label, the same in logs, tests and benchmarks; the fields below describe the entry
  std::string backend;  ///< "cpu", "cuda"
  Operation operation{};
  Phase phase{};
  std::string arithmetic;  ///< the type of its products: "f32"; "f16x3" is fp16 by three products of bf16 components
  std::string isa;         ///< "avx2", "amx"; GPUs: "cuda" for any GPU, otherwise "sm90a"
  std::vector<DType>
      dtypes;  ///< types that it takes for q, k and v, or for the first tensors of operations without them
  std::int64_t min_head_dim = 1;        ///< smallest head dimension, of d and dv
  std::int64_t max_head_dim = 0;        ///< largest head dimension, of d and dv
  std::int64_t max_value_head_dim = 0;  ///< largest dv
  int block_q = 0, block_k = 0;         ///< query rows and keys of its innermost block; 0: none, or they vary
  bool dropout = false;                 ///< attention and its gradients: takes dropout
  std::string unusable;  ///< empty, or why this machine cannot run it or the OS denies it to this process
  std::string opt_in;    ///< empty, or why it runs only if its name or RAPT_ISA is forced
};

/// Every entry of this build, in dispatch order; of GPUs, if their backend was found.
RAPT_API std::vector<EntryInfo> entries();

/// The code for one kind of device. The GPU backend is a separate library, librapt_cuda. rapt looks for it when a
/// program first asks for entries or backends, or makes a call on a GPU's memory.
struct BackendInfo {
  std::string name;     ///< "cpu", "cuda"
  std::string library;  ///< the file that was opened; empty: rapt itself, or none was found
  std::string version;  ///< of that library; empty: unknown
  std::string missing;  ///< empty, or why it is not there, and how to get it
};
/// Every backend that rapt knows.
RAPT_API std::vector<BackendInfo> backends();
/// Instruction sets that are built in and usable on this machine, best first. They include AMX if the CPU and the OS
/// have it and the OS has not denied its registers to this process. rapt asks for them at the first call that would use
/// them (docs/contract.md, "Threads").
RAPT_API std::vector<Isa> usable_isas();
/// Library version: "0.2.0", or "0.3.0.dev0" before the release of 0.3.0.
RAPT_API std::string_view version() noexcept;

}  // namespace rapt
