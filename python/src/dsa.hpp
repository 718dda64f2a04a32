// The indexer of sparse attention as Python gives it.
#pragma once

#include <nanobind/nanobind.h>

namespace rapt::python {
namespace nb = nanobind;

/// What rapt.dsa.index_scores and index_topk are given alike, in the order of _dsa.py's _INPUTS.
struct IndexInputs {
  nb::handle q, k, w, align, relu, causal, scale, k_scale, seqlens, block_table, key_begin, key_end, threads, isa;
};

/// rapt.dsa.index_scores into `scores`, or index_topk into `indices`; the other is None. The one that is given is
/// called `out` in refusals. Without the GIL where it works.
void index_scores(const IndexInputs& inputs, nb::handle scores, nb::handle indices);

/// rapt.dsa.select_topk into `out`. Without the GIL where it works.
void select_topk(nb::handle scores, nb::handle out, nb::handle threads, nb::handle isa);

}  // namespace rapt::python
