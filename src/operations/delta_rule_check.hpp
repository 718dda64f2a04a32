// What delta_rule's checks share with those of its gradients.
#pragma once

#include <span>
#include <string_view>
#include <vector>

#include "core/fields.hpp"
#include "core/span.hpp"
#include "operations/delta_rule_params.hpp"
#include "rapt/delta_rule.hpp"

namespace rapt {

// The fields of a problem's text, and what they leave open.
std::span<const Field<DeltaRuleProblem>> delta_rule_fields();
void complete(const Words& words, DeltaRuleProblem& problem);

// Of states and their gradients.
void check_state(std::string_view name, DType dtype);

// Of [b, t, h], [b, t, h, d] or, ragged, [total, h] and [total, h, d].
TokenRows token_rows(const TensorView& t, bool ragged);

// validate() of a forward, with gradients in the place of its results, but for overlaps: fills `params` and adds every
// tensor to `all`. `dout` and `dfinal_state` may be empty, args.out and args.final_state are.
DeltaRuleProblem check_forward(const DeltaRuleArgs& args, const TensorView& dout, const TensorView& dfinal_state,
                               DeltaRuleParams& params, std::vector<Checked>& all);

}  // namespace rapt
