// What calls of attention give, to be compared bit for bit.
#pragma once

#include <cstring>
#include <string>
#include <vector>

#include "support/device.hpp"

namespace rapt::testing {

/// Equal when all bits are, NaN's too.
struct Result {
  std::vector<float> out, lse;
  friend bool operator==(const Result& a, const Result& b) {
    const auto same = [](const std::vector<float>& x, const std::vector<float>& y) {
      return x.size() == y.size() && (x.empty() || std::memcmp(x.data(), y.data(), x.size() * sizeof(float)) == 0);
    };
    return same(a.out, b.out) && same(a.lse, b.lse);
  }
};

/// What `args`, whose outputs belong to `c`, give in `context`, into fresh poison.
inline Result run(Case& c, const AttentionArgs& args, const Forced& context) {
  c.poison_outputs();
  run(args, context);
  return {c.out.values(), c.lse.values()};
}
/// The same of what `c` holds, on `entry`, serially.
inline Result run(Case& c, const std::string& entry) {
  return run(c, c.args(), forced(entry));
}

}  // namespace rapt::testing
