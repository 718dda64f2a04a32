// select_topk: arguments -> Call, or an Error that names the argument; its problem's text, and its cost.
#include <string>

#include "core/fields.hpp"
#include "core/span.hpp"
#include "operations/cost.hpp"
#include "operations/select_topk/operation.hpp"
#include "rapt/select_topk.hpp"

namespace rapt {
namespace {

using P = SelectTopkProblem;

constexpr Field<P> kFields[] = {device_field<P>(), size_field<P, &P::rows>("rows"), size_field<P, &P::sk>("sk"),
                                size_field<P, &P::n>("n")};

}  // namespace

std::string SelectTopkProblem::to_string() const {
  return print_fields("select_topk", *this, kFields);
}

SelectTopkProblem SelectTopkProblem::parse(std::string_view text) {
  SelectTopkProblem p;
  Words(text, "select_topk").read(p, kFields);
  return p;
}

void check(const SelectTopkProblem& p) {
  if (p.rows < 0 || p.rows > kMaxOffset) throw Error("scores", std::to_string(p.rows) + " rows", "0 to 2^52");
  if (p.sk < 0 || p.sk > INT32_MAX) throw Error("scores", std::to_string(p.sk) + " keys", "less than 2^31");
  if (p.n < 1 || p.n > INT32_MAX) throw Error("indices", "n = " + std::to_string(p.n), "1 to 2^31 - 1");
}

Call OperationOf<SelectTopkArgs>::bind(const Args& args, Bound& bound) {
  const auto [b, h, s] = bound.last_rows();
  const bool is_empty = bound.writes_nothing();
  const std::int64_t sk = bound[arguments.id("sk")], n = bound[arguments.id("n")];
  const P problem{bound.device.type, is_empty ? 0 : b * h * s, sk, n};
  check(problem);
  const SelectTopkParams params{static_cast<const float*>(args.scores.data),
                                static_cast<std::int32_t*>(args.indices.data),
                                aligned_strides(args.scores, true),
                                aligned_strides(args.indices, true),
                                b,
                                h,
                                s,
                                sk,
                                n};
  return {problem, params, bound.device, is_empty, nullptr};
}

Needs needs_of(const SelectTopkProblem&) {
  return {kF32, 1, 1};
}

Cost cost_of(const SelectTopkArgs& args, const Call&) {
  return {0, whole_bytes(kArgumentsOf<SelectTopkArgs>, &args)};
}

}  // namespace rapt
