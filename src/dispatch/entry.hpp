// Entries: the kernels that dispatch chooses among, each able to refuse a problem, to plan it and to run it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "core/context.hpp"
#include "operations/call.hpp"

namespace rapt {

// Why the OS does not let this process run an entry (AMX's tile registers have to be asked for), as lasting text; empty
// if it does or has not been asked. With `ask`, for an entry that is about to run, it is: the answer then holds for the
// process.
using Denied = std::string_view (*)(bool ask);

// How the calls with one problem are carried out. Entries derive from it to keep what they need.
struct EntryPlan {
  std::size_t workspace_bytes = 0;
  int threads = 1;
  std::int64_t work_items = 0;
  virtual ~EntryPlan() = default;
  virtual std::string note() const = 0;  // how, for explain()
};

class CallTasks;

class Entry {
 public:
  KernelFacts facts{};
  std::string name;         // "attention_prefill.f32.avx2.q24k128"
  std::string isa;          // "avx2"; of GPUs "cuda" where any will do
  std::string unusable;     // why this machine cannot run it; empty if it can
  std::string opt_in;       // why dispatch does not choose it unless it is forced; empty if it may
  Denied denied = nullptr;  // null: the OS has no say

  virtual ~Entry() = default;
  // Why the entry will not take a problem of its operation, as lasting text; empty if it will. What `facts` say has
  // been checked.
  virtual std::string_view refuse(const Problem&, const Context::Impl&) const = 0;
  // A pure function of its arguments.
  virtual std::unique_ptr<EntryPlan> plan(const Problem&, const Context::Impl&) const = 0;
  // At least the workspace of all problems that are no larger than this one.
  virtual std::size_t max_workspace_bytes(const Problem& largest, const Context::Impl&) const = 0;
  // `workspace` has the plan's bytes of the device's memory, 64-byte aligned. On a device other than the host it may be
  // null: the entry then takes its own; and the call returns before the work is done.
  // `tasks` are the call's where somebody watches it, else null.
  virtual void run(const EntryPlan&, const Call&, const Context::Impl&, const CallTasks* tasks,
                   std::byte* workspace) const = 0;
};

// "attention_prefill.f32.avx2.q24k128".
std::string entry_name(const KernelFacts& facts, std::string_view isa);

struct Backend {
  std::string_view name;
  std::vector<std::unique_ptr<const Entry>> entries;  // of each operation in the order of preference
};

const Backend& cpu_backend();
// Why the instruction set of this name cannot be used in this process; empty if it can or is not in this build.
std::string why_unusable(std::string_view isa);
// The CPUs, as a file that holds for them names them. `isas`: those of this build that they have, the best first.
struct CpuIdentity {
  std::string model, isas;
  std::int64_t count;
};
CpuIdentity cpu_identity();

}  // namespace rapt
