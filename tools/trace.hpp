// A timeline of calls, in the JSON that chrome://tracing and Perfetto (ui.perfetto.dev) open.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "common.hpp"

namespace rapt::tools {

class Trace {
 public:
  /// Calls call(context) a few times, with contexts of so many threads and this entry, and keeps what their tasks were:
  /// as a process of the timeline, whose time begins at 0.
  void add(const Problem& problem, const std::string& entry, int threads,
           const std::function<void(const Context&)>& call);

  /// The file's text.
  std::string text(const Machine& machine) const;

 private:
  std::string events_;
  int processes_ = 0;
};

}  // namespace rapt::tools
