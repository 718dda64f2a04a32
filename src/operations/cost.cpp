#include "operations/cost.hpp"

#include <algorithm>

namespace rapt {

double row_bytes(double rows, std::int64_t n, DType dtype) {
  return rows * static_cast<double>(n) * bytes_of(dtype);
}

double whole_bytes(const TensorView& t) {
  double bytes = t ? bytes_of(t.dtype) : 0;
  for (int dim = 0; dim < t.ndim; ++dim) bytes *= static_cast<double>(t.shape[static_cast<std::size_t>(dim)]);
  return bytes;
}

double scale_bytes(const TensorView& t, double rows) {
  return t ? std::min(whole_bytes(t), row_bytes(rows, t.shape[static_cast<std::size_t>(t.ndim - 1)], t.dtype)) : 0;
}

double whole_bytes(const ArgumentList& table, const void* args, std::initializer_list<std::string_view> but) {
  double bytes = 0;
  for (const Argument& a : table.arguments) {
    if (a.step || a.is_unchecked || a.types == kIntegers || std::find(but.begin(), but.end(), a.name) != but.end())
      continue;
    for (std::size_t i = 0; i < a.count_in(args); ++i) bytes += whole_bytes(*a.get(args, i));
  }
  return bytes;
}

#define RAPT_OPERATION(name, Name, NAME)  \
  Cost cost_of(const Name##Args& args) {  \
    return cost_of(args, validate(args)); \
  }
#include "rapt/operations.def"

}  // namespace rapt
