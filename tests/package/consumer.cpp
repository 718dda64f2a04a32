// Two keys with scores 0 and ln 3 weigh 1/4 and 3/4, so values 0 and 4 give 3. The environment's RAPT_EXPECT_CUDA says
// whether the GPU backend is to be found.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <rapt/rapt.hpp>

#if __has_include("operations/all.hpp") || __has_include("core/span.hpp")
#error "rapt's own headers are in reach"
#endif

int main() {
  const float q[] = {1.f}, k[] = {0.f, std::log(3.f)}, v[] = {0.f, 4.f};
  float out[] = {-1.f};
  rapt::attention({q, {1, 1, 1, 1}}, {k, {1, 1, 2, 1}}, {v, {1, 1, 2, 1}}, {out, {1, 1, 1, 1}});
  std::printf("rapt %s: %.7g, wanted 3\n", rapt::version().data(), out[0]);
  if (const char* expected = std::getenv("RAPT_EXPECT_CUDA")) {
    const rapt::BackendInfo cuda = rapt::backends().at(1);
    std::printf("%s%s, wanted %s\n", cuda.library.c_str(), cuda.missing.c_str(), expected);
    if (cuda.missing.empty() != (expected[0] == '1')) return 1;
  }
  return std::abs(out[0] - 3.f) < 1e-5f ? 0 : 1;
}
