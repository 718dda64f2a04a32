// What a collector, the half of ITT that profilers bring along, was told by the half that is linked into rapt.
#pragma once

#include <string>
#include <thread>
#include <tuple>
#include <vector>

namespace rapt::testing {

using IttId = std::tuple<unsigned long long, unsigned long long, unsigned long long>;

struct IttEvent {
  std::string what;  ///< the function, "task_begin"
  std::thread::id thread;
  std::string name{};
  IttId id{}, parent{};
};

/// Of the domain "rapt". Found in the collector by its name, so that it is the one that rapt has loaded.
using IttEvents = std::vector<IttEvent> (*)();

}  // namespace rapt::testing
