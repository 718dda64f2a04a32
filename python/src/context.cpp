#include "context.hpp"

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <list>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "rapt/plan.hpp"

namespace rapt::python {
namespace nb = nanobind;
namespace {

const pid_t process = getpid();

Isa isa_named(const std::string& name) {
  std::string known;
  for (const Isa isa : usable_isas()) {
    if (to_string(isa) == name) return isa;
    known += (known.empty() ? "" : ", ") + std::string(to_string(isa));
  }
  throw Error("isa", "\"" + name + "\"", "an ISA of this build and CPU: " + known);
}

std::mutex mutex;  // of what follows
std::optional<std::string> guard_words;

nb::tuple to_tuple(const std::vector<std::int64_t>& index) {
  nb::list list;
  for (const std::int64_t i : index) list.append(i);
  return nb::tuple(list);
}

void deliver(const GuardReport& r) {
  const nb::gil_scoped_acquire locked;
  nb::module_::import_("rapt._guards")
      .attr("deliver")(std::string(to_string(r.guard)), r.kind == GuardReport::Kind::finding, to_string(r), r.problem,
                       r.entry, r.place.tensor, to_tuple(r.place.index), r.seen.tensor, to_tuple(r.seen.index), r.value,
                       r.wanted, r.bound, r.reason);
}

Guards guards_now() {
  return guard_words ? Guards::parse(*guard_words) : Guards::of_environment();
}

Context make(int threads, const std::string& isa, Pool pool, void* stream, const std::string& kernel) {
  if (!kernel.empty())  // or every process would look for the GPU backend
    for (const EntryInfo& entry : entries())
      if (entry.name == kernel && entry.operation != Operation::attention)
        throw Error("kernel", "\"" + kernel + "\"", "an entry of attention");
  ContextOptions options;
  options.kernel = kernel;
  options.threads = threads;
  options.stream = stream;
  if (!isa.empty()) options.isa = isa_named(isa);
  options.executor = executor_of(pool);
  options.guards = guards_now();
  options.guards->handler = deliver;
  options.guards->repeat_not_watched = true;  // contexts outlive blocks of guards, each of which is to hear of it
  return Context(std::move(options));
}

}  // namespace

std::shared_ptr<Executor> executor_of(Pool pool) {
  // The thread pools of the process that loaded this module did not survive a fork.
  if (getpid() != process) return serial_executor();
  std::shared_ptr<Executor> executor = pool == Pool::torch ? loaded_openmp_executor() : nullptr;
  return executor ? executor : tbb_executor();
}

Context context_for(int threads, const std::string& isa, Pool pool, void* stream, const std::string& kernel) {
  struct Kept {
    int threads;
    Pool pool;
    void* stream;
    std::string isa, kernel;
    std::optional<std::string> guard_words;
    Context context;
  };
  constexpr std::size_t kMaxContexts = 64;
  static std::list<Kept> contexts;  // the one used last comes first
  // Counts past the machine's are alike. Asked once, as it reads a file.
  static const int max_threads = static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
  threads = std::min(threads, max_threads);
  const std::lock_guard lock(mutex);
  const auto found = std::find_if(contexts.begin(), contexts.end(), [&](const Kept& kept) {
    return kept.threads == threads && kept.pool == pool && kept.stream == stream && kept.isa == isa &&
           kept.kernel == kernel && kept.guard_words == guard_words;
  });
  if (found != contexts.end()) {
    contexts.splice(contexts.begin(), contexts, found);
  } else {
    contexts.push_front({threads, pool, stream, isa, kernel, guard_words, make(threads, isa, pool, stream, kernel)});
    if (contexts.size() > kMaxContexts) contexts.pop_back();
  }
  return contexts.front().context;
}

void set_guards(const std::optional<std::string>& words) {
  if (words) Guards::parse(*words);
  const std::lock_guard lock(mutex);
  guard_words = words;
}

std::string guards() {
  const std::lock_guard lock(mutex);
  return to_string(guards_now());
}

}  // namespace rapt::python
