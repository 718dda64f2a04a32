// select_topk: arguments -> Call, or an Error that names the argument; and its problem's text.
#include "rapt/select_topk.hpp"

#include <string>
#include <vector>

#include "core/fields.hpp"
#include "core/span.hpp"
#include "operations/call.hpp"

namespace rapt {
namespace {

using P = SelectTopkProblem;

constexpr Field<P> kFields[] = {size_field<P, &P::rows>("rows"), size_field<P, &P::sk>("sk"),
                                size_field<P, &P::n>("n")};

// Of the rows' dimensions, right-aligned at s, and of the elements of a row. Those of one element are not stepped
// along, and their strides may be any number.
Strides strides(const Layout& t) {
  const auto step = [&](int from_last) {
    const auto dim = static_cast<std::size_t>(t.ndim - 1 - from_last);
    return from_last >= t.ndim || t.shape[dim] <= 1 ? 0 : t.strides[dim];
  };
  const bool one = t.shape[static_cast<std::size_t>(t.ndim - 1)] <= 1;
  return {step(3), step(2), step(1), one ? 1 : step(0)};
}

}  // namespace

std::string SelectTopkProblem::to_string() const {
  return print_fields("select_topk", *this, kFields);
}

SelectTopkProblem SelectTopkProblem::parse(std::string_view text) {
  SelectTopkProblem p;
  Words(text, "select_topk").read(p, kFields);
  return p;
}

SelectTopkProblem SelectTopkProblem::of(const SelectTopkArgs& args) {
  return std::get<SelectTopkProblem>(validate(args).problem);
}

void check(const SelectTopkProblem& p) {
  if (p.rows < 0 || p.rows > kMaxOffset) throw Error("scores", std::to_string(p.rows) + " rows", "0 to 2^52");
  if (p.sk < 0 || p.sk > INT32_MAX) throw Error("scores", std::to_string(p.sk) + " keys", "less than 2^31");
  if (p.n < 1 || p.n > INT32_MAX) throw Error("indices", "n = " + std::to_string(p.n), "1 to 2^31 - 1");
}

Call validate(const SelectTopkArgs& args, std::span<const std::byte> workspace) {
  const TensorView& scores = args.scores;
  const TensorView indices = args.indices;
  std::vector<Checked> all;
  if (!scores) throw Error("scores", "no tensor", "[.., sk]");
  take(all, "scores", scores, false);
  check_f32("scores", scores.dtype);
  if (!indices) throw Error("indices", "no tensor", "[.., n]");
  take(all, "indices", indices, true);
  if (indices.dtype != DType::i32) throw Error("indices", "dtype " + std::string(to_string(indices.dtype)), "i32");
  if (indices.ndim != scores.ndim)
    throw Error("indices", "shape " + shape_text(indices), "scores' rank, with n for sk");
  const auto last = static_cast<std::size_t>(scores.ndim - 1);
  SelectTopkParams f{};
  f.scores = static_cast<const float*>(scores.data), f.indices = static_cast<std::int32_t*>(args.indices.data);
  f.scores_stride = strides(scores), f.indices_stride = strides(indices);
  f.b = f.h = f.s = 1;
  for (std::size_t dim = 0; dim < last; ++dim) {
    check_size("indices", indices, static_cast<int>(dim), scores.shape[dim], "scores' size there");
    (dim + 1 == last ? f.s : dim + 2 == last ? f.h : f.b) = scores.shape[dim];
  }
  f.sk = scores.shape[last], f.n = indices.shape[last];
  const bool is_empty = writes_nothing(all);
  int64_t rows = 0;
  if (__builtin_mul_overflow(f.b, f.h, &rows) || __builtin_mul_overflow(rows, f.s, &rows))
    throw Error("scores", "shape " + shape_text(scores), "less than 2^63 rows");
  const P problem{is_empty && f.n > 0 ? 0 : rows, f.sk, f.n};
  check(problem);
  check_overlaps(all);
  check_apart(workspace, all);
  return {problem, f, {}, is_empty, nullptr};
}

}  // namespace rapt
