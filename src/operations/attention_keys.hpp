// Which keys the sequences of an attention call have, and whether those that rows see are there.
#pragma once

#include "operations/attention_check.hpp"

namespace rapt {

// Checks the lengths of queries and keys, the block table and the shapes of lists of keys, and fills them into `p` and
// `params`, which have the sizes of q, k and v already. Lists themselves are not read.
void check_keys(const AttentionArgs& args, AttentionTensors& tensors, AttentionProblem& p, AttentionParams& params);

// Throws Error where a row sees a key that a ring no longer has, or that lies in a page that is none. `params` has what
// scores become already. On a device, whose lengths and block tables are not read, only what shapes tell is checked.
void check_visible_keys(const AttentionProblem& p, const AttentionParams& params);

}  // namespace rapt
