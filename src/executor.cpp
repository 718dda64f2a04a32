#include <oneapi/tbb/parallel_for.h>
#include <oneapi/tbb/partitioner.h>
#include <oneapi/tbb/task_arena.h>
#include <unistd.h>

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
  void run(int strands, void (*strand)(void*, int), void* argument) override {
    for (int i = 0; i < strands; ++i) strand(argument, i);
  }
};

class Tbb final : public Executor {
 public:
  std::string_view name() const noexcept override { return "tbb"; }
  int concurrency() const override { return oneapi::tbb::this_task_arena::max_concurrency(); }
  void run(int strands, void (*strand)(void*, int), void* argument) override {
    // Isolated: while it waits, the caller must not pick up a task of somebody else's and come back late.
    // A context of its own: cancelling the caller's task group must not leave outputs unwritten.
    oneapi::tbb::task_group_context context(oneapi::tbb::task_group_context::isolated);
    // Static: from call to call a strand goes to the same thread where it can, whose cache has its scratch.
    oneapi::tbb::this_task_arena::isolate([&] {
      oneapi::tbb::parallel_for(
          0, strands, 1, [&](int i) { strand(argument, i); }, oneapi::tbb::static_partitioner(), context);
    });
  }
};

#if RAPT_HAVE_OPENMP
class OpenMp final : public Executor {
 public:
  std::string_view name() const noexcept override { return "openmp"; }
  int concurrency() const override { return getpid() == process_ ? omp_get_max_threads() : 1; }
  void run(int strands, void (*strand)(void*, int), void* argument) override {
#pragma omp parallel for num_threads(strands) schedule(static, 1) if (getpid() == process_)
    for (int i = 0; i < strands; ++i) strand(argument, i);
  }

 private:
  pid_t process_ = getpid();  // OpenMP's threads do not survive a fork, and its runtime hangs in the child
};
#endif

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
  static const auto executor = std::make_shared<OpenMp>();
  return executor;
#else
  throw Error("executor", "openmp", "an executor of this build (it has no OpenMP)");
#endif
}

}  // namespace rapt
