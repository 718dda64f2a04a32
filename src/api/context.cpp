#include "rapt/context.hpp"

#include <algorithm>
#include <cstdlib>
#include <new>
#include <utility>

#include "core/context.hpp"
#include "core/process.hpp"
#include "core/text.hpp"
#include "dispatch/dispatch.hpp"
#include "guards/guards.hpp"
#include "rapt/plan.hpp"

namespace rapt {
namespace {

void* new_aligned(void*, std::size_t bytes, std::size_t alignment) {
  return ::operator new(bytes, std::align_val_t(alignment), std::nothrow);
}
void delete_aligned(void*, void* data, std::size_t, std::size_t alignment) noexcept {
  ::operator delete(data, std::align_val_t(alignment));
}

std::string list(const std::vector<Isa>& isas) {
  std::string text;
  for (Isa isa : isas) text += (text.empty() ? "" : ", ") + std::string(to_string(isa));
  return text;
}

Isa usable_isa(const char* argument, std::string_view name) {
  const std::vector<Isa> isas = usable_isas();
  for (Isa isa : isas)
    if (to_string(isa) == name) return isa;
  const std::string reason = why_unusable(name);
  throw Error(argument, "\"" + std::string(name) + "\"",
              "an ISA of this build and CPU: " + list(isas) + (reason.empty() ? "" : " (" + reason + ")"));
}

// Throws Error unless it is the name of an entry that this machine can run.
EntryInfo usable_entry(const char* argument, const std::string& name) {
  const std::optional<EntryInfo> entry = find_entry(name);
  if (!entry) {
    std::vector<std::string> names;
    for (const EntryInfo& info : entries()) names.push_back(info.name);
    std::string wanted = "an entry that `rapt info` lists", separator = " (perhaps ";
    for (const std::string& similar : nearest_names(name, names)) wanted += separator + similar, separator = ", ";
    throw Error(argument, "\"" + name + "\"", wanted + (separator == ", " ? ")" : ""));
  }
  if (!entry->unusable.empty()) throw Error(argument, name, "an entry this machine can run (" + entry->unusable + ")");
  return *entry;
}

}  // namespace

Context::Impl::Impl(ContextOptions given)
    : options(std::move(given)),
      allocator(options.allocator.value_or(Allocator{new_aligned, delete_aligned, nullptr})),
      forks_before(forks()) {
  if (options.threads < 0) throw Error("threads", std::to_string(options.threads), "0 (all) or more");
  if (allocator.allocate == nullptr || allocator.deallocate == nullptr)
    throw Error("allocator", "a null function", "both functions");
  if (options.isa) {
    usable_isa("isa", to_string(*options.isa));
  } else if (const char* isa = std::getenv("RAPT_ISA"); isa != nullptr && *isa != '\0') {
    options.isa = usable_isa("RAPT_ISA", isa);
    isa_forced = true;
  }
  const char* argument = "kernel";
  if (const char* kernel = std::getenv("RAPT_KERNEL"); options.kernel.empty() && kernel != nullptr) {
    options.kernel = kernel;
    argument = "RAPT_KERNEL";
  }
  if (!options.kernel.empty()) kernel_operation = usable_entry(argument, options.kernel).operation;
  if (!options.executor) options.executor = tbb_executor();
  guards = ContextGuards::of(*this);
}

Context::Context(ContextOptions options) : impl_(std::make_shared<const Impl>(std::move(options))) {}

const Context& default_context() {
  static const Context context;
  return context;
}

}  // namespace rapt
