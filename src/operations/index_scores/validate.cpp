// index_scores: arguments -> Call, or an Error that names the argument; and its problem's text.
#include <algorithm>
#include <cmath>
#include <string>
#include <utility>

#include "core/dtypes.hpp"
#include "core/fields.hpp"
#include "core/span.hpp"
#include "core/text.hpp"
#include "operations/attention/check.hpp"
#include "operations/c_values.hpp"
#include "operations/index_scores/operation.hpp"
#include "rapt/index_scores.hpp"

namespace rapt {
namespace {

using std::int64_t;
using P = IndexScoresProblem;

// A word for what is usually so and is not.
template <bool P::*kMember>
constexpr Field<P> unless_field(std::string_view key) {
  return {key, true,
          [](const P& p, std::string_view name, std::string& text) {
            if (!(p.*kMember)) text.append(" ").append(name);
          },
          [](P& p, const Word&) { p.*kMember = false; }};
}

constexpr Field<P> kFields[] = {
    common_dtype_field<P, &P::q_dtype, &P::k_dtype>("dtype"),
    own_dtype_field<P, &P::q_dtype, &P::q_dtype, &P::k_dtype>("q"),
    {"k", false,
     [](const P& p, std::string_view key, std::string& text) {
       if (p.q_dtype != p.k_dtype) print_word(text, key, to_string(p.k_dtype));
     },
     [](P& p, const Word& word) { p.k_dtype = word.dtype(); }},
    device_field<P>(),
    size_field<P, &P::b>("b"),
    size_field<P, &P::sq>("sq"),
    size_field_like<P, &P::sk, &P::sq>("sk"),
    size_field<P, &P::h>("h"),
    size_field<P, &P::d>("d"),
    unless_field<&P::causal>("full"),
    align_field<P>("align"),
    unless_field<&P::relu>("linear"),
    flag_field<P, &P::scales>("scales"),
    flag_field<P, &P::lengths>("seqlens"),
    flag_field<P, &P::key_ranges>("ranges"),
    integer_field<P, &P::page_size, 0>("page"),
    integer_field<P, &P::topk, 0>("topk"),
    {"scores", true,
     [](const P& p, std::string_view key, std::string& text) {
       if (p.scores && p.topk != 0) text.append(" ").append(key);
     },
     [](P& p, const Word&) { p.scores = true; }},
};

using Op = OperationOf<IndexScoresArgs>;

constexpr const char* kOrFull = ", or causal = false";

// The values of lengths and pages, which on a device cannot be read here.
void check_lengths(const P& p, const IndexScoresParams& f) {
  for (int64_t i = 0; i < p.b && p.lengths; ++i) {
    const int64_t n = f.k_len[i];
    if (n < 0 || n > p.sk)
      throw Error("seqlens", "length " + std::to_string(n) + " of sequence " + std::to_string(i),
                  "0 to sk = " + std::to_string(p.sk));
    if (p.causal && p.align == P::Align::none && n != p.sq)
      refuse_align("align", p.sq, n, " in sequence " + std::to_string(i), kOrFull);
    for (int64_t m = 0; p.page_size > 0 && m * p.page_size < n; ++m)
      check_page("block_table", "k", f.page_count, f.pages.element(i * f.pages_stride_b + m * f.pages.stride),
                 [&] { return " at [" + std::to_string(i) + ", " + std::to_string(m) + "]"; });
  }
}

}  // namespace

std::string IndexScoresProblem::to_string() const {
  return print_fields("index_scores", *this, kFields);
}

IndexScoresProblem IndexScoresProblem::parse(std::string_view text) {
  const Words words(text, "index_scores");
  P p;
  words.read(p, kFields);
  if (!words.has("sk")) p.sk = p.sq;
  if (p.topk == 0) p.scores = true;
  return p;
}

void check(const IndexScoresProblem& p) {
  for (const auto& [name, size] : {std::pair{"b", p.b}, {"sq", p.sq}, {"sk", p.sk}, {"h", p.h}, {"indices", p.topk}})
    if (size < 0 || size > kMaxSize) throw Error(name, std::to_string(size), "0 to 2^48");
  if (p.h < 1) throw Error("q", "no heads", "1 or more");
  if (p.h > int64_t{1} << 32) throw Error("q", std::to_string(p.h) + " heads", "at most 2^32");
  check_row_count(p.b, p.h, p.sq);
  if (p.topk > INT32_MAX || (p.topk > 0 && p.sk > INT32_MAX))
    throw Error("indices", std::to_string(std::max(p.topk, p.sk)) + " keys", "less than 2^31: indices are i32");
  check_type("q", p.q_dtype, kFloatTypes), check_type("k", p.k_dtype, Op::kKeyTypes);
  if (p.d < 1 || p.d > kMaxHeadDim) throw Error("q", "head dimension d = " + std::to_string(p.d), "1 to 8192");
  if (needs_scales(p.k_dtype) && !p.scales) throw Error("k_scale", "no tensor", "scales for i8");
  if (is_float(p.k_dtype) && p.scales) throw Error("k_scale", "scales for keys that are not quantised", "none");
  if (p.page_size < 0 || (p.page_size > 0 && p.sk % p.page_size != 0))
    throw Error("k", "pages of " + std::to_string(p.page_size) + " rows", "a divisor of sk = " + std::to_string(p.sk));
  if (p.page_size > 0 && !p.lengths) throw Error("seqlens", "no tensor", "[b] lengths for pages");
  if (p.topk == 0 && !p.scores) throw Error("scores", "no tensor, nor indices", "one of them or both");
  if (p.align_offset > kMaxOffset || p.align_offset < -kMaxOffset)
    throw Error("align", "offset " + std::to_string(p.align_offset), "at most 2^52 either way");
  if (p.causal && p.align == P::Align::none && !p.lengths && p.sq != p.sk)
    refuse_align("align", p.sq, p.sk, "", kOrFull);
}

void Op::derive_keys(const void* given, Bound& bound) {
  if (bound.features != kPaged) return;
  const Args& args = *static_cast<const Args*>(given);
  const int64_t page_size = bound[arguments.id("page_size")];
  if (page_size < 1) throw Error("k", "shape " + shape_text(args.k), "pages of 1 row or more");
  int64_t sk = 0;
  if (__builtin_mul_overflow(bound[arguments.id("m")], page_size, &sk) || sk > kMaxSize)
    throw Error("block_table", "shape " + shape_text(args.block_table), "room for at most 2^48 keys");
  bound.derive(arguments.id("sk"), sk);
}

Call Op::bind(const Args& args, Bound& bound) {
  const TensorView &q = args.q, &k = args.k, &weights = args.weights;
  if (!args.scores && !args.indices) throw Error("scores", "no tensor, nor indices", "one of them or both");
  P p;
  p.q_dtype = q.dtype, p.k_dtype = k.dtype, p.device = bound.device.type;
  p.b = bound[arguments.id("b")], p.sq = bound[arguments.id("sq")], p.sk = bound[arguments.id("sk")];
  p.h = bound[arguments.id("h")], p.d = bound[arguments.id("d")];
  if (bound.features == kPaged) p.page_size = bound[arguments.id("page_size")];
  if (args.indices) p.topk = bound[arguments.id("n")];
  if (args.indices && p.topk < 1)
    throw Error("indices", "shape " + shape_text(args.indices), "[b, sq, n] with n of 1 or more");
  p.scales = static_cast<bool>(args.k_scale), p.lengths = static_cast<bool>(args.seqlens);
  p.key_ranges = args.key_begin || args.key_end, p.scores = static_cast<bool>(args.scores);
  p.causal = args.causal, p.relu = args.relu;
  set_align(args.align, "align", p.align, p.align_offset);
  check(p);

  IndexScoresParams f{};
  f.q = q.data, f.k = k.data, f.weights = static_cast<const float*>(weights.data);
  f.q_stride = strides_along(q, 0, 2, 1, 3), f.k_stride = strides_along(k, 0, -1, 1, 2);
  f.weights_stride = strides_along(weights, 0, 2, 1, -1);
  if (args.k_scale) {
    f.k_scale = static_cast<const float*>(args.k_scale.data);
    f.k_scale_stride = strides_along(args.k_scale, 0, -1, 1, -1);
  }
  if (args.block_table) {
    f.pages = integers_of(args.block_table, 1);
    f.pages_stride_b = args.block_table.strides[0], f.page_count = k.shape[0];
  }
  if (args.seqlens) f.k_len = integers_of(args.seqlens);
  if (args.key_begin) f.key_begin = integers_of(args.key_begin, 1), f.key_begin_stride_b = args.key_begin.strides[0];
  if (args.key_end) f.key_end = integers_of(args.key_end, 1), f.key_end_stride_b = args.key_end.strides[0];
  if (args.scores) {
    f.scores = static_cast<float*>(args.scores.data);
    f.scores_stride = strides_along(args.scores, 0, -1, 1, 2);
  }
  if (args.indices) {
    f.indices = static_cast<std::int32_t*>(args.indices.data);
    f.indices_stride = strides_along(args.indices, 0, -1, 1, 2);
  }
  f.b = p.b, f.sq = p.sq, f.sk = p.sk, f.total_q = f.total_k = -1;
  f.page_size = p.page_size;
  f.q_type = p.q_dtype, f.k_type = p.k_dtype;
  f.h = p.h, f.d = p.d, f.topk = p.topk, f.relu = p.relu;
  f.scale = args.scale.value_or(1.f / std::sqrt(static_cast<float>(p.d)));
  if (!std::isfinite(f.scale)) throw Error("scale", shortest(f.scale), "a finite number");
  f.score.left = kOpen, f.score.right = p.causal ? 0 : kOpen;
  f.score.offset = p.align_offset;
  f.score.bottom_right = p.align == P::Align::bottom_right;
  f.score.modifier_rows = f.score.modifier_keys = kNoLimit;
  if (p.device == DeviceType::cpu) check_lengths(p, f);
  else if (p.page_size > 0 && f.page_count == 0) f.score.modifier_keys = 0;  // no key is there, whatever lengths say
  return {p, f, bound.device, bound.writes_nothing(), nullptr};
}

void Op::set_scalars(const C& c, Args& args) {
  if (c.has_scale) args.scale = c.scale;
  args.relu = c.relu != 0, args.causal = c.causal != 0;
  args.align = c::to_align(c.align, c.align_offset, "align");
}

Needs needs_of(const IndexScoresProblem& p) {
  return {set_of(p.q_dtype) | set_of(p.k_dtype), p.d, p.d};
}

}  // namespace rapt
