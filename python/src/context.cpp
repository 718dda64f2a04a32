#include "context.hpp"

#include <unistd.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <thread>
#include <tuple>
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
  static std::mutex mutex;
  static std::map<std::tuple<int, std::string, Pool>, Context> contexts;
  if (threads < 0) throw Error("threads", std::to_string(threads), "1 or more, or None for all");
  if (stream != nullptr) return make(threads, isa, pool, stream);  // of streams there is no end
  // Counts past the machine's are alike, so that the number of contexts is bounded. Asked once, as it reads a file.
  static const int most = static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
  const std::tuple key(std::min(threads, most), isa, pool);
  const std::lock_guard lock(mutex);
  auto found = contexts.find(key);
  if (found == contexts.end()) found = contexts.emplace(key, make(std::get<0>(key), isa, pool, nullptr)).first;
  return found->second;
}

}  // namespace rapt::python
