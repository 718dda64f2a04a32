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

/// Runs workers side by side. Implement it to run rapt on threads of your own.
class RAPT_API Executor {
 public:
  virtual ~Executor();
  virtual std::string_view name() const noexcept = 0;
  /// The most workers worth starting now; at least 1.
  virtual int concurrency() const = 0;
  /// Calls work(argument, i) once for every i in [0, workers) and returns when all have returned. Workers may run at
  /// the same time, in any order, or one after another: any schedule is correct and gives the same bits, but a worker
  /// that is left out leaves results unwritten. `work` does not throw, and waits for nobody but workers that have begun
  /// and are not done. run() may throw, as concurrency() may, while no worker is running: the call that it serves then
  /// throws the same.
  virtual void run(int workers, void (*work)(void* argument, int worker), void* argument) = 0;
};

/// The executors that come with rapt. They live as long as the process and are safe to share.
RAPT_API std::shared_ptr<Executor> serial_executor();
RAPT_API std::shared_ptr<Executor> tbb_executor();     ///< oneTBB, in the arena of the calling thread
RAPT_API std::shared_ptr<Executor> openmp_executor();  ///< throws Error if rapt was built without OpenMP
/// Of the OpenMP runtime that the process has loaded, whatever rapt was built with: PyTorch's where that is loaded,
/// else the first that is found. Null if there is none. Its name() has the file's: "openmp (libgomp.so.1)".
RAPT_API std::shared_ptr<Executor> loaded_openmp_executor();

struct Task;  // rapt/task.hpp

/// Where workspace comes from. `allocate` returns null on failure, which becomes std::bad_alloc, or throws.
struct Allocator {
  void* (*allocate)(void* user, std::size_t bytes, std::size_t alignment);
  void (*deallocate)(void* user, void* data, std::size_t bytes, std::size_t alignment) noexcept;
  void* user = nullptr;
};

struct ContextOptions {
  /// Default: tbb_executor(), which shares the CPUs with other work and nests. Choose OpenMP where the process already
  /// computes with it, as inside PyTorch: its threads spin for a while after their work, and two pools that take turns
  /// on the same CPUs slow each other down. By itself neither is faster, but beside busy processes OpenMP's barriers
  /// wait for threads that the scheduler has put aside. On OpenMP a call runs on the team of the calling thread
  /// (omp_get_max_threads()), on fewer of its threads while other calls run on the same executor, and serially within a
  /// parallel region and in forked children.
  std::shared_ptr<Executor> executor;
  int threads = 0;         ///< most workers per call; 0: as many as the executor offers
  std::optional<Isa> isa;  ///< highest instruction set to use; default: the environment's RAPT_ISA, else any
  /// Of calls on CUDA memory: the cudaStream_t that their work is queued on; null is the legacy default stream.
  void* stream = nullptr;
  std::string kernel;                  ///< use this entry only; default: the environment's RAPT_KERNEL, else the best
  std::optional<Allocator> allocator;  ///< of host memory; default: aligned operator new
  /// Called after dispatch of every call with a one-line text: problem and chosen entry. Must be thread-safe.
  std::function<void(std::string_view)> observer;
  /// Called after every Task of a call, on the thread that did it. Must be thread-safe and must not throw; whatever it
  /// points to may be gone when it returns, but for the name of the entry.
  std::function<void(const Task&)> task_observer;
  /// Checks of every call's numbers (rapt/guards.hpp); default: the environment's RAPT_GUARDS, else none. A call that
  /// no guard watches pays for one comparison.
  std::optional<Guards> guards;
};

/// A cheap handle; copies share one state and may be used from several threads at once. Keeps the
/// workspace of one earlier call for the next. After fork() a child that uses a context of its parent runs serially.
class Context {
 public:
  /// Throws Error when options or environment ask for an ISA this CPU or build lacks. The environment is read here,
  /// once.
  RAPT_API explicit Context(ContextOptions options = {});

  struct Impl;
  const Impl& impl() const noexcept { return *impl_; }

 private:
  std::shared_ptr<const Impl> impl_;
};

/// The context of calls that name none, made at first use.
RAPT_API const Context& default_context();

}  // namespace rapt
