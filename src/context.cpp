#include "rapt/context.hpp"

#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <new>
#include <utility>

#include "backend.hpp"
#include "context_impl.hpp"
#include "dispatch.hpp"
#include "rapt/plan.hpp"

namespace rapt {
namespace {

constexpr std::size_t kAlignment = 64;

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

Isa usable(const char* argument, std::string_view name) {
  const std::vector<Isa> isas = usable_isas();
  for (Isa isa : isas)
    if (to_string(isa) == name) return isa;
  const std::string reason = why_unusable(name);
  throw Error(argument, "\"" + std::string(name) + "\"",
              "an ISA of this build and CPU: " + list(isas) + (reason.empty() ? "" : " (" + reason + ")"));
}

std::string known(const char* argument, const std::string& name) {
  const std::optional<EntryInfo> entry = find_entry(name);
  if (!entry) {
    std::string wanted = "an entry that `rapt info` lists", separator = " (perhaps ";
    for (const std::string& near : entries_like(name)) wanted += separator + near, separator = ", ";
    throw Error(argument, "\"" + name + "\"", wanted + (separator == ", " ? ")" : ""));
  }
  if (!entry->unusable.empty()) throw Error(argument, name, "an entry this machine can run (" + entry->unusable + ")");
  return name;
}

}  // namespace

Workspace::Workspace(const Allocator& allocator, std::size_t bytes) : allocator_(allocator), size_(bytes) {
  if (bytes == 0) return;
  data_ = static_cast<std::byte*>(allocator.allocate(allocator.user, bytes, kAlignment));
  if (data_ == nullptr) throw std::bad_alloc();
}
Workspace::~Workspace() {
  if (data_ != nullptr) allocator_.deallocate(allocator_.user, data_, size_, kAlignment);
}
void Workspace::swap(Workspace& other) noexcept {
  std::swap(allocator_, other.allocator_);
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
}

Context::Impl::Impl(ContextOptions given)
    : options(std::move(given)),
      allocator(options.allocator.value_or(Allocator{new_aligned, delete_aligned, nullptr})),
      process(getpid()) {
  if (options.threads < 0) throw Error("threads", std::to_string(options.threads), "0 (all) or more");
  if (allocator.allocate == nullptr || allocator.deallocate == nullptr)
    throw Error("allocator", "a null function", "both functions");
  if (options.isa) {
    usable("isa", to_string(*options.isa));
  } else if (const char* isa = std::getenv("RAPT_ISA"); isa != nullptr && *isa != '\0') {
    options.isa = usable("RAPT_ISA", isa);
    isa_forced = true;
  }
  if (!options.kernel.empty()) {
    known("kernel", options.kernel);
  } else if (const char* kernel = std::getenv("RAPT_KERNEL"); kernel != nullptr && *kernel != '\0') {
    options.kernel = known("RAPT_KERNEL", kernel);
  }
  if (!options.executor) options.executor = tbb_executor();
}

// A caller that finds the mutex taken goes without the spare block rather than wait.
Workspace Context::Impl::borrow(std::size_t bytes) const {
  Workspace workspace;
  if (const std::unique_lock lock(spare_mutex_, std::try_to_lock); lock) workspace = std::move(spare_);
  if (workspace.size() < bytes) {
    workspace = Workspace();  // given up first: never two at a time
    workspace = Workspace(allocator, bytes);
  }
  return workspace;
}
void Context::Impl::give_back(Workspace workspace) const noexcept {
  if (const std::unique_lock lock(spare_mutex_, std::try_to_lock); lock) std::swap(spare_, workspace);
}

Executor& Context::Impl::executor() const {
  static const std::shared_ptr<Executor> serial = serial_executor();
  return getpid() == process ? *options.executor : *serial;
}
int Context::Impl::concurrency() const {
  const int offered = std::max(executor().concurrency(), 1);
  return options.threads > 0 ? std::min(options.threads, offered) : offered;
}

Context::Context(ContextOptions options) : impl_(std::make_shared<const Impl>(std::move(options))) {}

const Context& default_context() {
  static const Context context;
  return context;
}

}  // namespace rapt
