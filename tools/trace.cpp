#include "trace.hpp"

#include <fmt/format.h>

#include <chrono>
#include <map>
#include <mutex>
#include <thread>

namespace rapt::tools {
namespace {

using Kind = Task::Kind;

constexpr int kCalls = 3;
constexpr std::size_t kManyTasks = 30000;  // of one call: it is the only one then

/// A task and the thread that did it. Its problem may be gone.
struct FinishedTask {
  Task task;
  std::thread::id thread;
};

std::string quoted(const std::string& text) {
  return Json(text).dump(-1, ' ', false, Json::error_handler_t::replace);
}

Json arguments_of(const Task& task, const Problem& problem) {
  if (task.kind == Kind::call) {
    const double seconds = std::chrono::duration<double>(task.end - task.begin).count();
    return {{"problem", to_string(problem)},
            {"entry", task.entry},
            {"threads", task.threads},
            {"flops", task.cost.flops},
            {"bytes", task.cost.bytes},
            {"gflops", task.cost.flops / seconds / 1e9},
            {"gbs", task.cost.bytes / seconds / 1e9}};
  }
  Json arguments = {{"call", task.call}};
  if (task.worker >= 0) arguments["worker"] = task.worker;
  if (task.items > 0) arguments["item"] = task.item, arguments["items"] = task.items;
  return arguments;
}

}  // namespace

void Trace::add(const Problem& problem, const std::string& entry, int threads,
                const std::function<void(const Context&)>& call) {
  std::mutex mutex;
  std::vector<FinishedTask> tasks;
  const Context context = make_context(threads, entry, [&](const Task& task) {
    const std::lock_guard lock(mutex);
    tasks.push_back({task, std::this_thread::get_id()});
  });
  for (int i = 0; i < kCalls && tasks.size() < kManyTasks; ++i) call(context);

  const int process = ++processes_;
  const auto add_event = [&](const std::string& event) { events_ += (events_.empty() ? "\n" : ",\n") + event; };
  const auto add_name = [&](const char* of, int thread, const std::string& name) {
    add_event(fmt::format(R"({{"ph":"M","name":"{}","pid":{},"tid":{},"args":{{"name":{}}}}})", of, process, thread,
                          quoted(name)));
  };
  add_name("process_name", 0, fmt::format("{}, threads {}: {}", short_text(problem), threads, entry));
  std::map<std::thread::id, int> numbers{{std::this_thread::get_id(), 0}};
  add_name("thread_name", 0, "caller");
  const auto micros = [](auto duration) { return std::chrono::duration<double, std::micro>(duration).count(); };
  for (const auto& [task, thread] : tasks) {
    const auto [number, is_new] = numbers.try_emplace(thread, static_cast<int>(numbers.size()));
    if (is_new) add_name("thread_name", number->second, fmt::format("thread {}", number->second));
    const std::string name(task.kind == Kind::call ? task.entry : to_string(task.kind));
    add_event(fmt::format(R"({{"ph":"X","cat":"rapt","name":{},"pid":{},"tid":{},"ts":{:.3f},"dur":{:.3f},"args":{}}})",
                          quoted(name), process, number->second, micros(task.begin - tasks.front().task.begin),
                          micros(task.end - task.begin), arguments_of(task, problem).dump()));
  }
}

std::string Trace::text(const Machine& machine) const {
  return fmt::format("{{\"displayTimeUnit\":\"ns\",\n\"otherData\":{},\n\"traceEvents\":[{}\n]}}\n",
                     run_context(machine).dump(-1, ' ', false, Json::error_handler_t::replace), events_);
}

}  // namespace rapt::tools
