#include "progress.hpp"

#include <fmt/format.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <cmath>

namespace rapt::tools {
namespace {

constexpr std::size_t kBar = 20;

/// A longer line would break, and could not be rewritten.
std::size_t columns() {
  winsize size{};
  return ::ioctl(STDERR_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0 ? size.ws_col : 80;
}

}  // namespace

Progress::Progress(std::size_t total)
    : on_(::isatty(STDERR_FILENO) != 0), total_(total), start_(std::chrono::steady_clock::now()) {}

Progress::~Progress() {
  clear();
}

void Progress::begin(const std::string& text) {
  const std::size_t done = begun_++;
  if (!on_) return;
  const std::chrono::duration<double> spent = std::chrono::steady_clock::now() - start_;
  std::string left;
  if (done != 0) {
    const double seconds = spent.count() / static_cast<double>(done) * static_cast<double>(total_ - done);
    const auto whole = static_cast<int>(std::ceil(seconds));
    left = fmt::format("  {}:{:02} left", whole / 60, whole % 60);
  }
  const std::size_t filled = kBar * done / total_;
  line_ = fmt::format("[{:#<{}}{:.<{}}] {}/{}{}  {}", "", filled, "", kBar - filled, begun_, total_, left, text);
  show();
}

void Progress::clear() {
  if (on_) fmt::print(stderr, "\r\033[K");
}

void Progress::show() {
  if (on_) fmt::print(stderr, "\r\033[K{}", line_.substr(0, columns() - 1));
}

}  // namespace rapt::tools
