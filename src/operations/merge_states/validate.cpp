// merge_states: arguments -> Call, or an Error that names the argument; its problem's text, and its cost.
#include <memory>
#include <string>

#include "core/fields.hpp"
#include "core/span.hpp"
#include "operations/cost.hpp"
#include "operations/merge_states/operation.hpp"
#include "rapt/merge_states.hpp"

namespace rapt {
namespace {

using std::int64_t;
using P = MergeStatesProblem;

constexpr Field<P> kFields[] = {
    dtype_field<P, &P::dtype, &P::out_dtype>("dtype"),
    dtype_field_like<P, &P::out_dtype, &P::dtype>("out"),
    device_field<P>(),
    size_field<P, &P::rows>("rows"),
    size_field<P, &P::dv>("dv"),
    size_field<P, &P::count>("count"),
    flag_field<P, &P::lse>("lse"),
};

}  // namespace

std::string MergeStatesProblem::to_string() const {
  return print_fields("merge_states", *this, kFields);
}

MergeStatesProblem MergeStatesProblem::parse(std::string_view text) {
  MergeStatesProblem p;
  Words(text, "merge_states").read(p, kFields);
  return p;
}

void check(const MergeStatesProblem& p) {
  for (const DType dtype : {p.dtype, p.out_dtype}) check_type("outs", dtype, kFloatTypes);
  if (p.rows < 0 || p.rows > kMaxOffset) throw Error("outs", std::to_string(p.rows) + " rows", "0 to 2^52");
  if (p.dv < 1 || p.dv > kMaxHeadDim) throw Error("outs", "dv = " + std::to_string(p.dv), "1 to 8192");
  if (p.count < 1 || p.count > kMaxSize)
    throw Error("outs", std::to_string(p.count) + " tensors", "1 to " + std::to_string(kMaxSize));
}

Call OperationOf<MergeStatesArgs>::bind(const Args& args, Bound& bound) {
  const TensorView& first = args.outs.front();
  if (bound.row_dims < 1) throw Error("outs[0]", std::to_string(first.ndim) + " dimensions", "2 to 4");
  const int64_t dv = bound[arguments.id("dv")];
  if (dv < 1 || dv > kMaxHeadDim) throw Error("outs[0]", "dv = " + std::to_string(dv), "1 to 8192");
  const std::size_t count = args.outs.size();
  if (count != args.lses.size())
    throw Error("lses", std::to_string(args.lses.size()) + " tensors", "as many as outs, " + std::to_string(count));
  const std::shared_ptr<AttentionState[]> states = std::make_shared<AttentionState[]>(count);
  for (std::size_t i = 0; i < count; ++i) {
    const TensorView &out = args.outs[i], &lse = args.lses[i];
    states[i] = {out.data, out.dtype, aligned_strides(out, true), static_cast<const float*>(lse.data),
                 aligned_strides(lse, false)};
  }
  MergeStatesParams f{};
  f.states = states.get(), f.count = static_cast<int64_t>(count);
  f.out = args.out.data, f.out_type = args.out.dtype, f.out_stride = aligned_strides(args.out, true);
  if (args.lse) f.lse = static_cast<float*>(args.lse.data), f.lse_stride = aligned_strides(args.lse, false);
  const auto [b, h, s] = bound.last_rows();
  f.b = b, f.h = h, f.s = s, f.dv = dv;
  const bool is_empty = bound.tensors().front().bytes == 0;
  const P problem{first.dtype, args.out.dtype, bound.device.type,          is_empty ? 0 : b * h * s,
                  dv,          f.count,        static_cast<bool>(args.lse)};
  return {problem, f, bound.device, is_empty, states};
}

Needs needs_of(const MergeStatesProblem& p) {
  return {set_of(p.dtype), p.dv, p.dv};
}

Cost cost_of(const MergeStatesArgs& args, const Call& call) {
  const auto& p = std::get<P>(call.problem);
  return {2 * static_cast<double>(p.rows) * static_cast<double>(p.dv) * static_cast<double>(p.count),
          whole_bytes(kArgumentsOf<MergeStatesArgs>, &args)};
}

}  // namespace rapt
