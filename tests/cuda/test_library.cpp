// Calls across the border to a library like librapt_cuda (fake_library.cpp), by way of the environment.
#include <cstdlib>
#include <stdexcept>

#include "rapt/attention.hpp"
#include "rapt/plan.hpp"
#include "support/catch.hpp"

using namespace rapt;

namespace {

[[maybe_unused]] const int named = setenv("RAPT_CUDA_LIBRARY", RAPT_TEST_fake_library, 1);

// A call on a GPU; nothing follows its pointers.
AttentionArgs with_queries(std::int64_t sq) {
  const auto view = [](std::uintptr_t at, std::int64_t rows) {
    MutableTensorView made(reinterpret_cast<float*>(at << 32), {1, 1, rows, 16});
    made.device = {DeviceType::cuda, 0};
    return made;
  };
  AttentionArgs args;
  args.q = view(1, sq);
  args.kv = KvSource::strided(view(2, 4), view(3, 4));
  args.out = view(4, sq);
  return args;
}

}  // namespace

TEST_CASE("cuda library: its entries are listed, chosen and run", "[api]") {
  const BackendInfo cuda = backends().at(1);
  CHECK(cuda.library == RAPT_TEST_fake_library);
  CHECK(cuda.version == version());
  CHECK(cuda.missing.empty());
  REQUIRE(entries().back().name == "attention.fake.cuda");
  CHECK(entries().back().backend == "cuda");

  ContextOptions options;
  options.kernel = "attention.fake.cuda";
  const Plan plan(with_queries(3), Context(options));
  CHECK(plan.backend() == "cuda");
  CHECK(plan.explain().find("no work") != std::string::npos);
  attention(with_queries(3));
}

TEST_CASE("cuda library: exceptions cross the border", "[api]") {
  try {
    attention(with_queries(1));
    FAIL("nothing was thrown");
  } catch (const Error& error) {  // not of the same object file as this program's
    CHECK(error.argument() == "fake");
    CHECK(std::string(error.what()).find("attention device=cuda") != std::string::npos);
  }
  CHECK_THROWS_AS(attention(with_queries(1)), std::invalid_argument);
  CHECK_THROWS_AS(attention(with_queries(2)), std::runtime_error);
}
