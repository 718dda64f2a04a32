// How calls are carried out: on which threads, with which instructions, from which memory.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "rapt/guards.hpp"
#include "rapt/types.hpp"

namespace rapt {

/// Runs the workers of a call. Implement it to run rapt on your own threads.
class RAPT_API Executor {
 public:
  virtual ~Executor();
  /// The name that Plan::executor() returns.
  virtual std::string_view name() const noexcept = 0;
  /// The largest number of workers worth starting now, at least 1.
  virtual int concurrency() const = 0;
  /// Calls work(argument, i) once for every i in [0, workers), and returns when all calls have returned. Workers may
  /// run simultaneously, in any order, or one after another; every schedule gives the same bits. Results of a worker
  /// that is never run are unwritten. `work` does not throw, and waits only for workers that have begun and are not
  /// done. run() and concurrency() may throw while no worker is running. The call that they serve then throws the same
  /// exception.
  virtual void run(int workers, void (*work)(void* argument, int worker), void* argument) = 0;
};

/// Built-in executors. They live as long as the process and may be shared by contexts. serial_executor() runs all
/// workers on the calling thread.
RAPT_API std::shared_ptr<Executor> serial_executor();
RAPT_API std::shared_ptr<Executor> tbb_executor();     ///< oneTBB, in the arena of the calling thread
RAPT_API std::shared_ptr<Executor> openmp_executor();  ///< throws Error if rapt was built without OpenMP
/// The executor of the OpenMP runtime that the process has loaded, also if rapt was built without OpenMP: PyTorch's if
/// loaded, otherwise the first one found. Null if the process has loaded none. Its name() includes the library: "openmp
/// (libgomp.so.1)".
RAPT_API std::shared_ptr<Executor> loaded_openmp_executor();

struct Task;  // rapt/task.hpp

/// Allocates workspace. `allocate` returns null on failure, which becomes std::bad_alloc, or throws.
struct Allocator {
  void* (*allocate)(void* user, std::size_t bytes, std::size_t alignment);
  void (*deallocate)(void* user, void* data, std::size_t bytes, std::size_t alignment) noexcept;
  void* user = nullptr;
};

/// Options of a Context. All have defaults.
struct ContextOptions {
  /// The threads of a call. Default: tbb_executor(), which shares the CPUs with other work and can be nested. Choose
  /// OpenMP if the process already computes with it, as PyTorch does: OpenMP threads spin for a while after their work,
  /// and two thread pools on the same CPUs slow each other down. Alone, neither is faster. Under load, oneTBB keeps
  /// making progress; OpenMP barriers wait for descheduled threads. On OpenMP, a call runs on the team of the calling
  /// thread (omp_get_max_threads()). It gives work to fewer of them while other calls run on the same executor, and one
  /// thread inside a parallel region and in forked children.
  std::shared_ptr<Executor> executor;
  int threads = 0;         ///< largest number of workers per call; 0: as many as the executor offers
  std::optional<Isa> isa;  ///< highest instruction set to use; default: the environment's RAPT_ISA, else any
  /// The cudaStream_t on which calls on CUDA memory are queued; null is the legacy default stream.
  void* stream = nullptr;
  std::string kernel;                  ///< use this entry only; default: the environment's RAPT_KERNEL, else the best
  std::optional<Allocator> allocator;  ///< of host memory; default: aligned operator new
  /// Called after dispatch of every call with one line: problem and chosen entry. Must be thread-safe.
  std::function<void(std::string_view)> observer;
  /// Called after every Task of a call, on the thread that did it. Must be thread-safe and must not throw. The Task and
  /// what it refers to are valid only during the call, except the entry's name.
  std::function<void(const Task&)> task_observer;
  /// Guards that check every call (rapt/guards.hpp). Default: the environment's RAPT_GUARDS, else none. Without guards
  /// a call pays one comparison.
  std::optional<Guards> guards;
};

/// How calls run: threads, ISA, memory, observers and guards. A cheap handle: copies share one state. Several threads
/// may use one context. It keeps the workspace of one earlier call for the next. After fork(), a child that uses a
/// context of its parent runs single-threaded.
class Context {
 public:
  /// Reads the environment once. Throws Error if the options or the environment ask for an ISA or a kernel that this
  /// CPU or build lacks.
  RAPT_API explicit Context(ContextOptions options = {});

  struct Impl;
  const Impl& impl() const noexcept { return *impl_; }

 private:
  std::shared_ptr<const Impl> impl_;
};

/// The context of calls without a context argument, made at first use.
RAPT_API const Context& default_context();

}  // namespace rapt
