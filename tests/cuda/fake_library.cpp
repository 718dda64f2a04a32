// A library like librapt_cuda, without kernels: one entry, whose calls throw what `refuse()` makes of the problem. It
// has an Error of its own, as a backend that throws one would have.
#include <stdexcept>

#include "dispatch/cuda_library.hpp"
#include "dispatch/fingerprint.hpp"

#ifndef RAPT_FAKE_BUILD
#define RAPT_FAKE_BUILD rapt::kBuild
#endif

namespace rapt {
namespace {

RaptFunctions rapt_functions;

struct FakePlan final : EntryPlan {
  std::string note() const override { return "no work"; }
};

class FakeEntry final : public Entry {
 public:
  FakeEntry() {
    facts.operation = Operation::attention;
    facts.dtypes = ~decltype(facts.dtypes){0};
    facts.max_head_dim = facts.max_value_head_dim = 64;
    facts.arithmetic = "fake";
    isa = "cuda";
    name = rapt_functions.entry_name(facts, isa);
  }
  std::string_view refuse(const Problem&, const Context::Impl&) const override { return {}; }
  std::unique_ptr<EntryPlan> plan(const Problem&, const Context::Impl&) const override {
    return std::make_unique<FakePlan>();
  }
  std::size_t max_workspace_bytes(const Problem&, const Context::Impl&) const override { return 0; }
  // One query: of rapt's own type; two: of the standard library's; more: none of either's.
  void run(const EntryPlan&, const Call& call, const Context::Impl&, const CallTasks*, std::byte*) const override {
    const auto tokens = std::get<AttentionProblem>(call.problem).sq;
    if (tokens == 1) throw Error("fake", rapt_functions.to_string(call.problem), "nothing");
    if (tokens == 2) throw std::runtime_error("fake: CUDA, of another library");
  }
};

const Backend& backend(const RaptFunctions& given) {
#ifdef RAPT_FAKE_BACKEND_THROWS
  throw Error("fake", "a backend", given.entry_name == nullptr ? "functions" : "none");
#else
  static const Backend made = [&] {
    rapt_functions = given;
    Backend one{"cuda", {}};
    one.entries.push_back(std::make_unique<FakeEntry>());
    return one;
  }();
  return made;
#endif
}

constexpr CudaLibrary kLibrary{RAPT_VERSION, RAPT_FAKE_BUILD, backend};

}  // namespace

extern "C" const CudaLibrary* rapt_cuda_library() noexcept {
  return &kLibrary;
}

}  // namespace rapt
