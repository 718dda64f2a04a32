// Facts about entries, by their names.
#pragma once

#include <optional>
#include <string_view>

#include "rapt/rapt.hpp"

namespace rapt::bench {

/// Throws std::logic_error for a name that no entry has.
EntryInfo info_of(std::string_view entry);
/// None for CUDA.
std::optional<Isa> cpu_isa(const EntryInfo& entry);

/// Every ISA that rapt knows, best first.
inline constexpr Isa kIsas[] = {
#define RAPT_INSTRUCTION_SET(name, NAME, value) Isa::name,
#include "rapt/isas.def"
};

}  // namespace rapt::bench
