// parse_problem() under arbitrary text: an Error with an argument's name, or a problem that its own text gives back.
#include "fuzz.hpp"
#include "rapt/rapt.hpp"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace rapt;
  using namespace rapt::testing;
  try {
    const Problem problem = parse_problem({reinterpret_cast<const char*>(data), size});
    const std::string text = to_string(problem);
    const Problem again = parse_problem(text);
    require(again == problem, "parse(to_string(p)) == p for " + text);
    require(to_string(again) == text, "to_string is a fixed point: " + text);
    const Plan plan(problem);
    require(plan.problem() == problem, "a plan keeps its problem: " + text);
    require(!plan.entry().empty() && plan.threads() >= 1, "a plan names its entry: " + text);
  } catch (const Error& error) {
    require(!error.argument().empty(), "an Error names an argument: " + std::string(error.what()));
  }
  return 0;
}
