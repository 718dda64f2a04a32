#include "context.hpp"

#include <unistd.h>

#include <algorithm>
#include <list>
#include <mutex>
#include <thread>
#include <utility>

#include "rapt/plan.hpp"

namespace rapt::python {
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

Context make(int threads, const std::string& isa, Pool pool, void* stream) {
  ContextOptions options;
  options.threads = threads;
  options.stream = stream;
  if (!isa.empty()) options.isa = isa_named(isa);
  options.executor = executor_of(pool);
  return Context(std::move(options));
}

}  // namespace

std::shared_ptr<Executor> executor_of(Pool pool) {
  // The thread pools of the process that loaded this module did not survive a fork.
  if (getpid() != process) return serial_executor();
  std::shared_ptr<Executor> executor = pool == Pool::torch ? loaded_openmp_executor() : nullptr;
  return executor ? executor : tbb_executor();
}

Context context_for(int threads, const std::string& isa, Pool pool, void* stream) {
  struct Kept {
    int threads;
    Pool pool;
    void* stream;
    std::string isa;
    Context context;
  };
  constexpr std::size_t kMost = 64;
  static std::mutex mutex;
  static std::list<Kept> contexts;  // the one used last comes first
  if (threads < 0) throw Error("threads", std::to_string(threads), "1 or more, or None for all");
  // Counts past the machine's are alike. Asked once, as it reads a file.
  static const int most = static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
  threads = std::min(threads, most);
  const std::lock_guard lock(mutex);
  const auto found = std::find_if(contexts.begin(), contexts.end(), [&](const Kept& kept) {
    return kept.threads == threads && kept.pool == pool && kept.stream == stream && kept.isa == isa;
  });
  if (found != contexts.end()) {
    contexts.splice(contexts.begin(), contexts, found);
  } else {
    contexts.push_front({threads, pool, stream, isa, make(threads, isa, pool, stream)});
    if (contexts.size() > kMost) contexts.pop_back();
  }
  return contexts.front().context;
}

}  // namespace rapt::python
