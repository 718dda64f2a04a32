// The mask that attention's dropout applies.
#pragma once

#include "rapt/score.hpp"
#include "rapt/tensor.hpp"

namespace rapt {

/// mask[b, h, i, j] = whether attention with this `dropout` keeps the weight of query head h, row i and key j of
/// sequence b: boolean [b, hq, sq, sk], in host memory, of any strides. Rows and keys count within their sequence, also
/// in ragged batches; sq and sk may be any. Throws Error (before anything is written) on bad arguments.
RAPT_API void dropout_mask(const Dropout& dropout, const MutableTensorView& mask);

}  // namespace rapt
