// A line on the terminal that says how far a command is.
#pragma once

#include <chrono>
#include <cstddef>
#include <string>

namespace rapt::tools {

/// A bar on standard error that is rewritten in place, with the time that is left; nothing when that is no terminal.
class Progress {
 public:
  explicit Progress(std::size_t total);
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  /// The next of `total` begins; the one before it is done.
  void begin(const std::string& text);
  /// Makes room for a line of output; show() puts the bar back.
  void clear();
  void show();

 private:
  bool on_;
  std::string line_;
  std::size_t total_, begun_ = 0;
  std::chrono::steady_clock::time_point start_;
};

}  // namespace rapt::tools
