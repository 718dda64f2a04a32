// One attention call as Python gives it.
#pragma once

#include "array.hpp"
#include "rapt/attention.hpp"
#include "rapt/plan.hpp"

namespace rapt::python {

/// Views of everything a call needs, and its context. The arrays themselves must outlive it.
class Call {
 public:
  /// The arguments of rapt.attention by name, with `lse`, `stream` and `torch` (true: on PyTorch's threads); None is
  /// not given. Refuses what cannot be read (TypeError, ValueError); the library checks the rest when it runs.
  explicit Call(const nb::dict& arguments);
  void run() const;  ///< without the GIL
  Plan plan() const;

 private:
  template <class Work>
  auto as_given(const Work& work) const;

  Arrays arrays_;
  AttentionArgs args_;
  Context context_;
};

/// PyTorch's scaled_dot_product_attention on tensors of 2 to 4 dimensions, into `out`, whose shape is that of the
/// result: leading dimensions broadcast, attn_mask is boolean or f32, the causal diagonal starts top left, and key
/// heads are repeated in order for GQA. The caller has checked shapes and dtypes. `stream` is the cudaStream_t of
/// tensors on a GPU.
void sdpa(nb::handle query, nb::handle key, nb::handle value, nb::handle attn_mask, bool is_causal, nb::handle scale,
          int threads, nb::handle out, std::uintptr_t stream);

}  // namespace rapt::python
