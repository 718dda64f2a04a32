// Two keys with scores 0 and ln 3 weigh 1/4 and 3/4, so values 0 and 4 give 3.
#include <cmath>
#include <cstdio>
#include <rapt/rapt.hpp>

#if __has_include("operations/all.hpp") || __has_include("core/span.hpp")
#error "rapt's own headers are in reach"
#endif

int main() {
  const float q[] = {1.f}, k[] = {0.f, std::log(3.f)}, v[] = {0.f, 4.f};
  float out[] = {-1.f};
  rapt::attention({q, {1, 1, 1, 1}}, {k, {1, 1, 2, 1}}, {v, {1, 1, 2, 1}}, {out, {1, 1, 1, 1}});
  std::printf("rapt %s: %.7g, wanted 3\n", rapt::version().data(), out[0]);
  return std::abs(out[0] - 3.f) < 1e-5f ? 0 : 1;
}
