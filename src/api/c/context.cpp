// Contexts of the C interface.
#include <algorithm>
#include <memory>

#include "api/c/c_api.hpp"

namespace {

using namespace rapt::c;
using rapt::Error;

class UserExecutor final : public rapt::Executor {
 public:
  explicit UserExecutor(const rapt_user_executor& user) : user_(user), name_(user.name ? user.name : "user") {
    deref(user.concurrency, "user_executor.concurrency");
    deref(user.run, "user_executor.run");
  }
  std::string_view name() const noexcept override { return name_; }
  int concurrency() const override { return std::max(1, user_.concurrency(user_.user)); }
  void run(int workers, void (*work)(void*, int), void* argument) override {
    user_.run(user_.user, workers, work, argument);
  }

 private:
  rapt_user_executor user_;
  std::string name_;
};

std::shared_ptr<rapt::Executor> to_executor(const rapt_context_options& o) {
  switch (o.executor) {
    case RAPT_EXECUTOR_DEFAULT:
      return nullptr;
    case RAPT_EXECUTOR_SERIAL:
      return rapt::serial_executor();
    case RAPT_EXECUTOR_TBB:
      return rapt::tbb_executor();
    case RAPT_EXECUTOR_OPENMP:
      return rapt::openmp_executor();
    case RAPT_EXECUTOR_LOADED_OPENMP:
      if (std::shared_ptr<rapt::Executor> executor = rapt::loaded_openmp_executor()) return executor;
      throw Error("executor", "loaded openmp", "an executor of this process (it has loaded no OpenMP runtime)");
    case RAPT_EXECUTOR_USER:
      return std::make_shared<UserExecutor>(o.user_executor);
    default:
      throw Error("executor", std::to_string(o.executor), "a rapt_executor_kind");
  }
}

rapt::ContextOptions to_options(const rapt_context_options* given) {
  if (!given) return {};
  const rapt_context_options o = known_part(*given, "rapt_context_options");
  rapt::ContextOptions options;
  options.executor = to_executor(o);
  options.threads = o.threads;
  if (o.has_isa) options.isa = to_enum(o.isa, rapt::Isa::amx, "isa");
  if (o.kernel) options.kernel = o.kernel;
  if (o.tuning) options.tuning = *o.tuning ? rapt::read_tuning(o.tuning) : rapt::Tuning();
  options.stream = o.stream;
  if (o.allocator.allocate || o.allocator.deallocate) {
    deref(o.allocator.allocate, "allocator.allocate");
    deref(o.allocator.deallocate, "allocator.deallocate");
    options.allocator = rapt::Allocator{o.allocator.allocate, o.allocator.deallocate, o.allocator.user};
  }
  if (o.observer) {
    options.observer = [observer = o.observer, user = o.observer_user](std::string_view text) {
      observer(user, std::string(text).c_str());
    };
  }
  return options;
}

}  // namespace

rapt_status rapt_context_create(const rapt_context_options* options, rapt_context** context) noexcept {
  return guard([&] {
    deref(context, "context") = nullptr;
    *context = new rapt_context{rapt::Context(to_options(options))};
  });
}

void rapt_context_destroy(rapt_context* context) noexcept {
  delete context;
}
