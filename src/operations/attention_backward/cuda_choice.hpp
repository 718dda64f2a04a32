// How attention_backward divides its work on a GPU: pure functions of the problem's sizes.
#pragma once

#include <cstdint>

#include "cuda/kernels/backward_config.hpp"
#include "operations/attention/params.hpp"

namespace rapt::cuda {

// Among how many thread blocks the rows are divided, for dk and dv of the same keys.
int key_sharers(const AttentionParams& params);
// Of a call for dq and for dk or dv.
DsSlots ds_slots(const AttentionParams& params);
// At least the bytes of all calls with fewer or shorter sequences.
std::int64_t max_ds_bytes(const AttentionParams& largest);

}  // namespace rapt::cuda
