// The mask that attention's dropout applies.
#pragma once

#include "rapt/score.hpp"
#include "rapt/tensor.hpp"

namespace rapt {

/// Writes the dropout mask: mask[b, h, i, j] is true if attention with this `dropout` keeps the weight of query head h,
/// row i and key j of sequence b. `mask` is boolean [b, hq, sq, sk], in host memory, with any strides and any sq and
/// sk. Rows and keys count within their sequence, also in ragged batches. Throws Error, before anything is written, on
/// bad arguments.
RAPT_API void dropout_mask(const Dropout& dropout, const MutableTensorView& mask);

}  // namespace rapt
