// The work in a call that validate() has seen: rapt/cost.hpp without checking again.
#pragma once

#include "operations/call.hpp"
#include "rapt/cost.hpp"

namespace rapt {

// Of all elements of a tensor, wherever they lie; 0 for none.
double whole_bytes(const TensorView& t);

Cost cost_of(const AttentionArgs& args, const Call& call);
Cost cost_of(const AttentionBackwardArgs& args, const Call& call);
Cost cost_of(const AppendKvArgs& args, const Call& call);
Cost cost_of(const MergeStatesArgs& args, const Call& call);
Cost cost_of(const DeltaRuleArgs& args, const Call& call);
Cost cost_of(const DeltaRuleBackwardArgs& args, const Call& call);
Cost cost_of(const IndexScoresArgs& args, const Call& call);
Cost cost_of(const SelectTopkArgs& args, const Call& call);

}  // namespace rapt
