// librapt_cuda's side of the border.
#include "cuda/entry.hpp"
#include "dispatch/cuda_library.hpp"
#include "dispatch/fingerprint.hpp"

namespace rapt {
namespace {

RaptFunctions rapt_functions;  // set before there are entries, and not again

const Backend& backend(const RaptFunctions& given) {
  static const Backend& made = (rapt_functions = given, cuda_backend());
  return made;
}

constexpr CudaLibrary kLibrary{RAPT_VERSION, kBuild, backend};

}  // namespace

extern "C" const CudaLibrary* rapt_cuda_library() noexcept {
  return &kLibrary;
}

// The backend's code calls rapt's functions by these names.
std::string entry_name(const KernelFacts& facts, std::string_view isa) {
  return rapt_functions.entry_name(facts, isa);
}
std::string to_string(const Problem& problem) {
  return rapt_functions.to_string(problem);
}
void fill_sizes(const AttentionProblem& problem, AttentionParams& params) {
  rapt_functions.fill_sizes(problem, params);
}

}  // namespace rapt
