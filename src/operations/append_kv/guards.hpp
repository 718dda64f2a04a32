// What guards look for in calls that append.
#pragma once

#include "guards/not_finite.hpp"
#include "operations/append_kv/params.hpp"
#include "rapt/append_kv.hpp"

namespace rapt {

// The first number that is not finite, of new rows or of the rows of the cache that they became.
std::optional<NotFinite> not_finite_rows(const AppendKvArgs& args, const AppendKvParams& params);

}  // namespace rapt
