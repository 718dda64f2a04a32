// select_topk's kernels for GPUs, on the CPU: the warps of a thread block run in random order.
#include <limits>

#include "cuda/kernels/select_topk.cu"
#include "support/catch.hpp"

namespace rapt::cuda {
namespace {

alignas(16) std::byte memory[228 << 10];  // the shared memory of a thread block

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// Scores that are hard to select from; the last ones have many equal ones, the best of which begin late.
enum class Kind { normal, few, zeros, rising, falling, hidden, special, relu, constant, late, steps };
constexpr int kKinds = 11;

float score(Kind kind, std::int64_t position, std::int64_t size, std::mt19937& random) {
  const float normal = std::normal_distribution<float>()(random), at = static_cast<float>(position);
  const unsigned any = random();
  switch (kind) {
    case Kind::normal:
      return normal;
    case Kind::few:
      return static_cast<float>(any % 5) - 2;
    case Kind::zeros:
      return any % 50 == 0 ? normal : any % 3 == 0 ? 0.f : -0.f;
    case Kind::rising:
      return at - 100.5f;
    case Kind::falling:
      return 100.5f - at;
    case Kind::hidden:
      return any % 20 == 0 ? normal : -kInfinity;
    case Kind::special:
      return any % 8 == 0 ? kNan : any % 8 == 1 ? kInfinity : any % 8 == 2 ? -kInfinity : normal;
    case Kind::relu:
      return std::max(normal - 1.9f, 0.f);
    case Kind::constant:
      return 1;
    case Kind::late:
      return position >= std::min<std::int64_t>(10000, size / 4) ? 1.f : 0.f;
    case Kind::steps:
      return std::floor(at / 100);
  }
  return 0;
}

// Selects from one row of each kind, which begins `skipped` floats behind a multiple of 16 bytes.
void check_rows(std::int64_t size, std::int64_t n, int skipped) {
  INFO("size " << size << ", n " << n << ", skipped " << skipped);
  std::mt19937 random(11);
  const std::int64_t stride = round_up(size, 4) + 4;
  std::vector<float4> floats(static_cast<std::size_t>(kKinds * stride / 4 + 2));
  float* const scores = reinterpret_cast<float*>(floats.data()) + skipped;
  for (int row = 0; row < kKinds; ++row)
    for (std::int64_t i = 0; i < size; ++i) scores[row * stride + i] = score(Kind(row), i, size, random);
  std::vector<std::int32_t> indices(static_cast<std::size_t>(kKinds * n), 77);
  SelectTopkParams p{};
  p.scores = scores, p.scores_stride = {0, 0, stride, 1};
  p.indices = indices.data(), p.indices_stride = {0, 0, n, 1};
  p.b = p.h = 1, p.s = kKinds, p.sk = size, p.n = n;
  std::vector<Candidate> workspace(select_topk_workspace(p) / sizeof(Candidate) + 2);
  REQUIRE(launch_select_topk(p, reinterpret_cast<std::byte*>(workspace.data()), nullptr) == cudaSuccess);

  for (int row = 0; row < kKinds; ++row) {
    const auto at = [&](std::int32_t i) { return scores[row * stride + i]; };
    std::vector<std::int32_t> wanted;
    for (std::int32_t i = 0; i < size; ++i)
      if (at(i) != -kInfinity) wanted.push_back(i);
    std::stable_sort(wanted.begin(), wanted.end(), [&](std::int32_t a, std::int32_t b) {
      return std::isnan(at(a)) ? !std::isnan(at(b)) : at(a) > at(b);
    });
    wanted.resize(static_cast<std::size_t>(n), -1);
    const std::int32_t* const got = indices.data() + row * n;
    INFO("row " << row);
    CHECK(std::equal(wanted.begin(), wanted.end(), got));
  }
}

}  // namespace
}  // namespace rapt::cuda

TEST_CASE("cuda emulated: select_topk gives the indices of the sort, whatever the order of warps", "[unit]") {
  using rapt::cuda::check_rows;
  rapt::testing::gpu = {};
  check_rows(1001, 16, 1);
  check_rows(5000, 2048, 0);
  check_rows(8000, 64, 3);
  check_rows(20000, 512, 2);  // split
  rapt::testing::gpu.multiprocessors = 2;
  check_rows(20000, 512, 1);  // with a sample
  check_rows(700, 300, 0);    // by warps
  rapt::testing::gpu.max_shared_bytes = 64 << 10;
  check_rows(9001, 2048, 0);
}
