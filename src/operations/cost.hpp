// The work in a call that validate() has seen: rapt/cost.hpp without checking again.
#pragma once

#include "operations/call.hpp"
#include "rapt/cost.hpp"

namespace rapt {

// Of all elements of a tensor, wherever they lie; 0 for none.
double whole_bytes(const TensorView& t);

#define RAPT_OPERATION(name, Name, NAME) Cost cost_of(const Name##Args& args, const Call& call);
#include "rapt/operations.def"

}  // namespace rapt
