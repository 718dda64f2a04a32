// What an entry is.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "rapt/rapt.hpp"

namespace rapt::bench {

/// To be replaced by the fields of the same names of EntryInfo: until it has them, names are read here and nowhere
/// else.
struct EntryFacts {
  std::string phase;       ///< "prefill", "decode" or "naive"
  std::string arithmetic;  ///< "f32", "bf16", "f16x3"
  std::optional<Isa> isa;  ///< none for CUDA
};
EntryFacts facts_of(std::string_view entry);

/// Every ISA that rapt knows, best first.
inline constexpr Isa kIsas[] = {Isa::amx, Isa::avx512bf16, Isa::avx512, Isa::avx2, Isa::neon, Isa::generic};

}  // namespace rapt::bench
