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
    non_null(user.concurrency, "user_executor.concurrency");
    non_null(user.run, "user_executor.run");
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

rapt_guard_place to_place(const rapt::GuardReport::Place& given) {
  rapt_guard_place place{given.tensor.c_str(), static_cast<int32_t>(given.index.size()), {}};
  std::copy(given.index.begin(), given.index.end(), place.index);
  return place;
}

rapt::Guards to_guards(const rapt_context_options& o) {
  rapt::Guards guards = o.guards ? rapt::Guards::parse(o.guards) : rapt::Guards::of_environment();
  if (!o.guard_handler) return guards;
  guards.handler = [handler = o.guard_handler, user = o.guard_user](const rapt::GuardReport& given) {
    const std::string text = to_string(given);
    const rapt_guard_report report{sizeof report,
                                   static_cast<int32_t>(given.guard),
                                   given.kind == rapt::GuardReport::Kind::finding,
                                   text.c_str(),
                                   given.problem.c_str(),
                                   given.entry.c_str(),
                                   to_place(given.place),
                                   to_place(given.seen),
                                   given.value,
                                   given.wanted,
                                   given.bound};
    handler(user, &report);
  };
  return guards;
}

rapt::ContextOptions to_options(const rapt_context_options* given) {
  if (!given) return {};
  const rapt_context_options o = to_this_version(*given, "rapt_context_options");
  rapt::ContextOptions options;
  options.executor = to_executor(o);
  options.threads = o.threads;
  constexpr rapt::Isa kLast = std::max({
#define RAPT_INSTRUCTION_SET(name, NAME, value) rapt::Isa::name,
#include "rapt/isas.def"
  });
  if (o.has_isa) options.isa = to_enum(o.isa, kLast, "isa");
  if (o.kernel) options.kernel = o.kernel;
  options.stream = o.stream;
  if (o.allocator.allocate || o.allocator.deallocate) {
    non_null(o.allocator.allocate, "allocator.allocate");
    non_null(o.allocator.deallocate, "allocator.deallocate");
    options.allocator = rapt::Allocator{o.allocator.allocate, o.allocator.deallocate, o.allocator.user};
  }
  if (o.observer) {
    options.observer = [observer = o.observer, user = o.observer_user](std::string_view text) {
      observer(user, std::string(text).c_str());
    };
  }
  options.guards = to_guards(o);
  return options;
}

}  // namespace

rapt_status rapt_context_create(const rapt_context_options* options, rapt_context** context) noexcept {
  return guard([&] {
    non_null(context, "context") = nullptr;
    *context = new rapt_context{rapt::Context(to_options(options))};
  });
}

void rapt_context_destroy(rapt_context* context) noexcept {
  delete context;
}
