#include "rapt/plan.hpp"

namespace rapt {
std::string_view version() noexcept {
  return RAPT_VERSION;
}
}  // namespace rapt
