// Opening librapt_cuda, with libraries that are like it (cuda/fake_library.cpp).
#include "dispatch/cuda_library.hpp"
#include "dispatch/fingerprint.hpp"
#include "rapt/plan.hpp"
#include "support/catch.hpp"

using namespace rapt;

namespace {

// A CHECK that shows the whole text.
void check_says(const CudaBackend& result, const std::string& words) {
  INFO(result.missing);
  CHECK(result.missing.find(words) != std::string::npos);
}

}  // namespace

TEST_CASE("cuda library: one of this build is opened, and once", "[unit]") {
  const CudaBackend first = load_cuda_library(RAPT_TEST_fake_library),
                    second = load_cuda_library(RAPT_TEST_fake_library);
  INFO(first.missing);
  REQUIRE(first.backend != nullptr);
  CHECK(first.backend == second.backend);
  CHECK(first.file == RAPT_TEST_fake_library);
  CHECK(first.version == version());
  CHECK(first.missing.empty());
  REQUIRE(first.backend->entries.size() == 1);
  CHECK(first.backend->entries[0]->name == "attention.fake.cuda");  // by rapt's function
}

TEST_CASE("cuda library: another version or build is refused, and both are named", "[unit]") {
  const CudaBackend older = load_cuda_library(RAPT_TEST_fake_library_other_version);
  CHECK(older.backend == nullptr);
  CHECK(older.version == "0.0.9");
  CHECK(older.file == RAPT_TEST_fake_library_other_version);
  check_says(older, "RAPT_CUDA_LIBRARY is " + older.file);
  check_says(older, "is of rapt 0.0.9 (");
  check_says(older, "this is rapt " + std::string(version()) + " (");

  const CudaBackend other = load_cuda_library(RAPT_TEST_fake_library_other_build);
  CHECK(other.backend == nullptr);
  CHECK(other.version == version());
  check_says(other, "(sources 0, compiler 0)");
  check_says(other, "(" + std::string(kBuild) + ")");
}

TEST_CASE("cuda library: what cannot be opened is refused with the system's words", "[unit]") {
  const auto refused = [](const char* named, const char* words) {
    const CudaBackend result = load_cuda_library(named);
    CHECK(result.backend == nullptr);
    CHECK(result.version.empty());
    check_says(result, "RAPT_CUDA_LIBRARY is " + std::string(named));
    check_says(result, words);
  };
  refused("/nowhere/librapt_cuda.so", "No such file or directory");
  refused(RAPT_TEST_DATA, "cannot read file data");  // a folder
  refused(RAPT_TEST_DATA "/README.md", "invalid ELF header");
  refused("libm.so.6", "undefined symbol: rapt_cuda_library");
}

TEST_CASE("cuda library: what its backend throws is the caller's to catch", "[unit]") {
  try {
    load_cuda_library(RAPT_TEST_fake_library_unfit);
    FAIL("nothing was thrown");
  } catch (const Error& error) {
    CHECK(error.argument() == "fake");
    CHECK(std::string(error.what()) == "fake: a backend; wanted none");
  }
}
