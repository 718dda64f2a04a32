#include "entry.hpp"

#include <sstream>

namespace rapt::bench {

EntryFacts facts_of(std::string_view entry) {
  std::istringstream stream{std::string(entry)};
  std::string operation, isa;
  EntryFacts facts;
  std::getline(stream, operation, '.');
  std::getline(stream, facts.arithmetic, '.');
  std::getline(stream, isa, '.');
  const std::string kind = operation.substr(operation.find('_') + 1);
  facts.phase = kind == "decode" || kind == "naive" ? kind : "prefill";
  if (isa == "amx_model") facts.isa = Isa::amx;  // a build for tests
  for (Isa known : kIsas) {
    if (isa == to_string(known)) facts.isa = known;
  }
  return facts;
}

}  // namespace rapt::bench
