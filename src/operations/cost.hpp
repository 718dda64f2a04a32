// The work in a call that validate() has seen: rapt/cost.hpp without checking again.
#pragma once

#include <cstdint>

#include "operations/call.hpp"
#include "rapt/cost.hpp"

namespace rapt {

Cost cost_of(const AttentionArgs& args, const Call& call);
Cost cost_of(const AttentionBackwardArgs& args, const Call& call);
Cost cost_of(const AppendKvArgs& args, const Call& call);
Cost cost_of(const MergeStatesArgs& args, const Call& call);
Cost cost_of(const DeltaRuleArgs& args, const Call& call);
Cost cost_of(const DeltaRuleBackwardArgs& args, const Call& call);
Cost cost_of(const IndexScoresArgs& args, const Call& call);
Cost cost_of(const SelectTopkArgs& args, const Call& call);

// Bytes, of `rows` rows of n elements; of all elements.
double row_bytes(double rows, std::int64_t n, DType dtype);
double whole_bytes(const TensorView& t);
// Of scales or zeros for `rows` rows. Where they broadcast, there are fewer.
double scale_bytes(const TensorView& t, double rows);

}  // namespace rapt
