// librapt_cuda's side of the border.
#include "cuda/entry.hpp"
#include "dispatch/cuda_library.hpp"
#include "dispatch/fingerprint.hpp"

namespace rapt {
namespace {

FrameworkFunctions framework;  // set before there are entries, and not again

const Backend& backend(const FrameworkFunctions& given) {
  static const Backend& made = (framework = given, cuda_backend());
  return made;
}

constexpr CudaLibrary kLibrary{RAPT_VERSION, kBuild, backend};

}  // namespace

extern "C" const CudaLibrary* rapt_cuda_library() noexcept {
  return &kLibrary;
}

// What the backend's code calls by these names is the framework's, on the other side.
std::string entry_name(const KernelFacts& facts, std::string_view isa) {
  return framework.entry_name(facts, isa);
}
std::string to_string(const Problem& problem) {
  return framework.to_string(problem);
}
void fill_sizes(const AttentionProblem& problem, AttentionParams& params) {
  framework.fill_sizes(problem, params);
}

}  // namespace rapt
