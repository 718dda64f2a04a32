// A call for profilers that listen by ITT, as Intel's VTune and Advisor do: in the domain "rapt" two tasks (validate,
// plan) until its entry is known, then a region, named after the entry, with the workers' tasks. Builds without
// ittnotify are never heard.
#pragma once

#include <cstdint>
#include <string>

#include "rapt/task.hpp"

#ifdef RAPT_HAVE_ITT
#include <ittnotify.h>

namespace rapt {

class IttCall {
 public:
  // Whether a profiler was there at the process's first call.
  static bool is_heard() noexcept { return domain() != nullptr; }

  explicit IttCall(std::uint64_t number) : region_(__itt_id_make(this, number)) {
    begin_outside_region(Task::Kind::validate);
  }
  ~IttCall() { end_open(); }
  IttCall(const IttCall&) = delete;
  IttCall& operator=(const IttCall&) = delete;

  void begin_plan() {
    end_open();
    begin_outside_region(Task::Kind::plan);
  }
  void begin_work(const std::string& entry) {
    end_open();
    for (const Task::Kind kind : {Task::Kind::worker, Task::Kind::item, Task::Kind::combine})
      names_[static_cast<int>(kind)] = named(entry + ": " + std::string(to_string(kind)));
    __itt_id_create(domain(), region_);
    __itt_region_begin(domain(), region_, __itt_null, named(entry));
    open_ = Open::region;
  }

  // Tasks of the calling thread within the region; they nest.
  void begin_task(Task::Kind kind) const {
    __itt_task_begin(domain(), __itt_null, region_, names_[static_cast<int>(kind)]);
  }
  static void end_task() { __itt_task_end(domain()); }

 private:
  static const __itt_domain* domain() noexcept {
    static const __itt_domain* const heard = []() -> const __itt_domain* {
      [[maybe_unused]] const __itt_timestamp now = __itt_get_timestamp();  // loads the profiler's library, if any
      const __itt_domain* const created = __itt_domain_create("rapt");
      return created && created->flags != 0 && __itt_task_begin_ptr ? created : nullptr;
    }();
    return heard;
  }
  static __itt_string_handle* named(const std::string& text) { return __itt_string_handle_create(text.c_str()); }

  void begin_outside_region(Task::Kind kind) {
    __itt_task_begin(domain(), __itt_null, __itt_null, named(std::string(to_string(kind))));
    open_ = Open::task;
  }
  void end_open() {
    if (open_ == Open::task) end_task();
    if (open_ == Open::region) {
      __itt_region_end(domain(), region_);
      __itt_id_destroy(domain(), region_);
    }
    open_ = Open::nothing;
  }

  enum class Open { nothing, task, region } open_ = Open::nothing;
  __itt_id region_;
  __itt_string_handle* names_[static_cast<int>(Task::Kind::call)]{};  // by kind
};

}  // namespace rapt
#else
namespace rapt {

class IttCall {
 public:
  static bool is_heard() noexcept { return false; }
  explicit IttCall(std::uint64_t) {}
  void begin_plan() {}
  void begin_work(const std::string&) {}
  void begin_task(Task::Kind) const {}
  static void end_task() {}
};

}  // namespace rapt
#endif
