// What a backend is to the rest: a list of entries, each able to refuse a problem, to plan it and to run it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "call.hpp"
#include "context_impl.hpp"

namespace rapt {

// Why the OS does not let this process run an entry, as lasting text; empty if it does or has not been asked. With
// `ask`, for an entry that is about to run, it is: the answer then holds for the process.
using Withheld = std::string_view (*)(bool ask);

struct Entry {
  std::string name;      // "attention_forward.f32.avx2.q24k128"
  std::string unusable;  // why this machine cannot run it; empty if it can
  std::string opt_in;    // why dispatch does not choose it unless its name, or RAPT_ISA, is forced; empty if it may
  Isa isa{};             // CPU entries only
  int id = 0;            // the backend's own
  Withheld withheld = nullptr;  // null: nobody has to be asked
};

// How one problem is carried out. Backends derive from it to keep what they need.
struct Schedule {
  std::size_t workspace_bytes = 0;
  int threads = 1;
  std::int64_t work_items = 0;
  virtual ~Schedule() = default;
  virtual std::string note() const = 0;  // how, for explain()
};

class Backend {
 public:
  virtual ~Backend() = default;
  virtual std::string_view name() const noexcept = 0;
  // In order of preference.
  virtual std::span<const Entry> entries() const noexcept = 0;
  // Why the entry will not take the problem, as static text; empty if it will.
  virtual std::string_view refuse(const Entry&, const Problem&, const Context::Impl&) const = 0;
  // A pure function of its arguments.
  virtual std::unique_ptr<Schedule> plan(const Entry&, const Problem&, const Context::Impl&) const = 0;
  // At least the workspace_bytes of the entry's schedules for all problems that are no larger in b, sq, sk and ragged
  // rows, and otherwise the same.
  virtual std::size_t max_workspace_bytes(const Entry&, const Problem& largest, const Context::Impl&) const = 0;
  // `workspace` has the schedule's bytes of the device's memory, 64-byte aligned. On a device other than the host it
  // may be null: the backend then takes its own; and the call returns before the work is done.
  virtual void run(const Entry&, const Schedule&, const Call&, const Context::Impl&, std::byte* workspace) const = 0;
};

const Backend& cpu_backend();
// Why the instruction set of this name cannot be used in this process; empty if it can or is not in this build.
std::string why_unusable(std::string_view isa);
#ifdef RAPT_HAVE_CUDA
const Backend& cuda_backend();
#endif

}  // namespace rapt
