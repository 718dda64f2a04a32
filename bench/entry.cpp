#include "entry.hpp"

#include <stdexcept>
#include <string>

namespace rapt::bench {

EntryInfo info_of(std::string_view entry) {
  for (const EntryInfo& info : entries())
    if (info.name == entry) return info;
  throw std::logic_error("no entry " + std::string(entry));
}

std::optional<Isa> cpu_isa(const EntryInfo& entry) {
  for (const Isa isa : kIsas)
    if (entry.isa == to_string(isa)) return isa;
  return {};
}

}  // namespace rapt::bench
