#include <dlfcn.h>
#include <link.h>
#include <oneapi/tbb/parallel_for.h>
#include <oneapi/tbb/partitioner.h>
#include <oneapi/tbb/task_arena.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/process.hpp"
#include "rapt/context.hpp"

#if RAPT_HAVE_OPENMP
#include <omp.h>
#endif

namespace rapt {
namespace {

class Serial final : public Executor {
 public:
  std::string_view name() const noexcept override { return "serial"; }
  int concurrency() const override { return 1; }
  void run(int workers, void (*work)(void*, int), void* argument) override {
    for (int i = 0; i < workers; ++i) work(argument, i);
  }
};

class Tbb final : public Executor {
 public:
  std::string_view name() const noexcept override { return "tbb"; }
  int concurrency() const override { return oneapi::tbb::this_task_arena::max_concurrency(); }
  void run(int workers, void (*work)(void*, int), void* argument) override {
    // Isolated: while it waits, the caller must not pick up a task of somebody else's and come back late.
    // A context of its own: cancelling the caller's task group must not leave outputs unwritten.
    oneapi::tbb::task_group_context context(oneapi::tbb::task_group_context::isolated);
    // Static: from call to call a worker goes to the same thread where it can, whose cache has its scratch.
    oneapi::tbb::this_task_arena::isolate([&] {
      oneapi::tbb::parallel_for(
          0, workers, 1, [&](int i) { work(argument, i); }, oneapi::tbb::static_partitioner(), context);
    });
  }
};

// What rapt needs of an OpenMP runtime.
struct OpenMpRuntime {
  // GOMP_parallel, which runtimes other than GCC's export too: body(argument) on every thread of a team of `threads`;
  // 0: as many as the calling thread would get by default.
  void (*parallel)(void (*body)(void*), void* argument, unsigned threads, unsigned flags);
  int (*max_threads)();
  int (*in_parallel)();
  int (*thread_num)();
  int (*num_threads)();
};

class OpenMp final : public Executor {
 public:
  OpenMp(const OpenMpRuntime& runtime, std::string name) : runtime_(runtime), name_(std::move(name)) {}
  std::string_view name() const noexcept override { return name_; }
  // OpenMP's threads do not survive a fork, and a runtime that had some hangs in the child. Whether others had made it
  // start some cannot be asked, so that what counts is the process that loaded rapt.
  int concurrency() const override {
    return forks() > 0 || runtime_.in_parallel() ? 1 : std::max(runtime_.max_threads(), 1);
  }
  // Always on a team of full size: GCC's runtime ends the threads that a smaller one leaves out. Every thread that
  // calls has a team of its own, so that callers at the same time share the CPUs out by leaving threads of theirs idle.
  void run(int workers, void (*work)(void*, int), void* argument) override {
    const int callers = callers_.fetch_add(1, std::memory_order_relaxed) + 1;
    Call call{runtime_, workers, work, argument, std::min(workers, concurrency() / callers)};
    if (call.max_threads > 1) {
      runtime_.parallel([](void* user) { static_cast<const Call*>(user)->run_share(); }, &call, 0, 0);
    } else {
      call.run_workers(0, 1);
    }
    callers_.fetch_sub(1, std::memory_order_relaxed);
  }

 private:
  struct Call {
    const OpenMpRuntime& runtime;
    int workers;
    void (*work)(void*, int);
    void* argument;
    int max_threads;

    void run_workers(int first, int step) const {
      for (int i = first; i < workers; i += step) work(argument, i);
    }
    // The calling thread's share of the workers.
    void run_share() const {
      const int threads = std::min(runtime.num_threads(), max_threads), thread = runtime.thread_num();
      if (thread < threads) run_workers(thread, threads);
    }
  };

  OpenMpRuntime runtime_;
  std::string name_;
  std::atomic<int> callers_{0};
};

template <class Function>
bool find(void* library, const char* name, Function*& function) {
  function = reinterpret_cast<Function*>(dlsym(library, name));
  return function != nullptr;
}

// The one whose functions a look-up in `library` and what it was linked with finds. Null has none.
std::optional<OpenMpRuntime> runtime_of(void* library) {
  OpenMpRuntime r{};
  const bool found =
      library && find(library, "GOMP_parallel", r.parallel) && find(library, "omp_get_max_threads", r.max_threads) &&
      find(library, "omp_in_parallel", r.in_parallel) && find(library, "omp_get_thread_num", r.thread_num) &&
      find(library, "omp_get_num_threads", r.num_threads);
  return found ? std::optional(r) : std::nullopt;
}

std::string file_name(const char* path) {
  const std::string text = path ? path : "";
  return text.substr(text.rfind('/') + 1);
}

// A handle of the library with this path or soname if the process has loaded it; else null. Never closed: what was
// found in it stays in use.
void* handle_if_loaded(const char* name) {
  return dlopen(name, RTLD_NOLOAD | RTLD_LAZY | RTLD_LOCAL);
}

std::optional<OpenMpRuntime> loaded_runtime() {
  // What is global comes before a library's own dependencies: a preloaded runtime is PyTorch's, too.
  if (const auto global = runtime_of(dlopen(nullptr, RTLD_LAZY))) return global;
  if (void* torch = handle_if_loaded("libtorch_cpu.so")) return runtime_of(torch);
  std::vector<std::string> paths;
  dl_iterate_phdr(
      [](dl_phdr_info* info, std::size_t, void* user) {
        const std::string name = file_name(info->dlpi_name);
        for (const char* runtime : {"libgomp", "libomp", "libiomp"})
          if (name.starts_with(runtime)) static_cast<std::vector<std::string>*>(user)->emplace_back(info->dlpi_name);
        return 0;
      },
      &paths);
  for (const std::string& path : paths)
    if (const auto runtime = runtime_of(handle_if_loaded(path.c_str()))) return runtime;
  return {};
}

}  // namespace

Executor::~Executor() = default;

std::shared_ptr<Executor> serial_executor() {
  static const auto executor = std::make_shared<Serial>();
  return executor;
}
std::shared_ptr<Executor> tbb_executor() {
  static const auto executor = std::make_shared<Tbb>();
  return executor;
}
std::shared_ptr<Executor> openmp_executor() {
#if RAPT_HAVE_OPENMP
  const auto parallel = [](void (*body)(void*), void* argument, unsigned, unsigned) {
#pragma omp parallel
    body(argument);
  };
  static const auto executor = std::make_shared<OpenMp>(
      OpenMpRuntime{parallel, omp_get_max_threads, omp_in_parallel, omp_get_thread_num, omp_get_num_threads}, "openmp");
  return executor;
#else
  throw Error("executor", "openmp", "an executor of this build (it has no OpenMP)");
#endif
}
std::shared_ptr<Executor> loaded_openmp_executor() {
  static std::mutex mutex;
  static std::map<void*, std::shared_ptr<Executor>> executors;
  const std::optional<OpenMpRuntime> runtime = loaded_runtime();
  if (!runtime) return nullptr;
  void* const address = reinterpret_cast<void*>(runtime->parallel);
  const std::lock_guard lock(mutex);
  std::shared_ptr<Executor>& executor = executors[address];
  if (!executor) {
    Dl_info info{};
    const std::string file = dladdr(address, &info) != 0 ? file_name(info.dli_fname) : "";
    executor = std::make_shared<OpenMp>(*runtime, "openmp (" + file + ")");
  }
  return executor;
}

}  // namespace rapt
