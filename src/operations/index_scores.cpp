// index_scores: arguments -> Call, or an Error that names the argument; and its problem's text.
#include "rapt/index_scores.hpp"

#include <cmath>
#include <string>
#include <vector>

#include "core/dtypes.hpp"
#include "core/fields.hpp"
#include "core/float_environment.hpp"
#include "core/span.hpp"
#include "core/text.hpp"
#include "operations/call.hpp"

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
    {"dtype", false,
     [](const P& p, std::string_view key, std::string& text) {
       if (p.q_dtype != DType::f32 && p.q_dtype == p.k_dtype) print_word(text, key, to_string(p.q_dtype));
     },
     [](P& p, const Word& word) { p.q_dtype = p.k_dtype = word.dtype(); }},
    {"q", false,
     [](const P& p, std::string_view key, std::string& text) {
       if (p.q_dtype != DType::f32 && p.q_dtype != p.k_dtype) print_word(text, key, to_string(p.q_dtype));
     },
     [](P& p, const Word& word) { p.q_dtype = word.dtype(); }},
    {"k", false,
     [](const P& p, std::string_view key, std::string& text) {
       if (p.q_dtype != p.k_dtype) print_word(text, key, to_string(p.k_dtype));
     },
     [](P& p, const Word& word) { p.k_dtype = word.dtype(); }},
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

// Steps along b, h, s and d, given which of the tensor's dimensions they are; none along dimensions of one element,
// whose strides may be any number.
Strides strides(const Layout& t, int b, int h, int s, int d) {
  const auto step = [&](int dim) {
    const auto i = static_cast<std::size_t>(dim);
    return dim < 0 || t.shape[i] <= 1 ? 0 : t.strides[i];
  };
  return {step(b), step(h), step(s), d >= 0 && t.shape[static_cast<std::size_t>(d)] <= 1 ? 1 : step(d)};
}

class Validator {
 public:
  explicit Validator(const IndexScoresArgs& args) : args_(args) {}

  Call run(std::span<const std::byte> workspace) {
    inputs();
    keys();
    outputs();
    positions();
    check(p_);
    fill();
    check_lengths();
    check_overlaps(all_);
    check_apart(workspace, all_);
    return {p_, f_, {}, writes_nothing(all_), nullptr};
  }

 private:
  void need(const char* name, const TensorView& t, int ndim, const char* shape, bool written = false) {
    if (!t) throw Error(name, "no tensor", shape);
    take(all_, name, t, written);
    if (t.ndim != ndim) throw Error(name, "shape " + shape_text(t), shape);
  }

  void inputs() {
    const TensorView &q = args_.q, &k = args_.k, &weights = args_.weights;
    const bool paged = static_cast<bool>(args_.block_table);
    need("q", q, 4, "[b, sq, h, d]");
    check_float("q", q.dtype);
    need("k", k, 3, paged ? "[pages, page_size, d]" : "[b, sk, d]");
    if (k.dtype == DType::i4x2) throw Error("k", "dtype i4x2", "f32, bf16, f16, i8, f8e4m3 or f8e5m2");
    check_cache_type("k", k.dtype);
    need("weights", weights, 3, "[b, sq, h]");
    check_f32("weights", weights.dtype);
    p_.q_dtype = q.dtype, p_.k_dtype = k.dtype;
    p_.b = q.shape[0], p_.sq = q.shape[1], p_.h = q.shape[2], p_.d = q.shape[3];
    check_size("k", k, 2, p_.d, "q's head size d");
    if (!paged) check_size("k", k, 0, p_.b, "q's batch b");
    check_size("weights", weights, 0, p_.b, "q's batch b");
    check_size("weights", weights, 1, p_.sq, "q's rows sq");
    check_size("weights", weights, 2, p_.h, "q's heads h");
    f_.q = q.data, f_.k = k.data, f_.weights = static_cast<const float*>(weights.data);
    f_.q_stride = strides(q, 0, 2, 1, 3), f_.k_stride = strides(k, 0, -1, 1, 2);
    f_.weights_stride = strides(weights, 0, 2, 1, -1);
    if (args_.k_scale) {
      need("k_scale", args_.k_scale, 2, paged ? "[pages, page_size]" : "[b, sk]");
      check_f32("k_scale", args_.k_scale.dtype);
      check_size("k_scale", args_.k_scale, 0, k.shape[0], "k's first dimension");
      check_size("k_scale", args_.k_scale, 1, k.shape[1], "k's rows");
      p_.scales = true;
      f_.k_scale = static_cast<const float*>(args_.k_scale.data);
      f_.k_scale_stride = strides(args_.k_scale, 0, -1, 1, -1);
    }
  }

  // How many there are, and where they lie.
  void keys() {
    const TensorView& table = args_.block_table;
    p_.sk = args_.k.shape[1];
    if (table) {
      need("block_table", table, 2, "[b, m]");
      check_integers("block_table", table);
      check_size("block_table", table, 0, p_.b, "q's batch b");
      p_.page_size = args_.k.shape[1];
      if (p_.page_size < 1) throw Error("k", "shape " + shape_text(args_.k), "pages of 1 row or more");
      if (__builtin_mul_overflow(table.shape[1], p_.page_size, &p_.sk) || p_.sk > kMaxSize)
        throw Error("block_table", "shape " + shape_text(table), "room for at most 2^48 keys");
      if (!args_.seqlens) throw Error("seqlens", "no tensor", "[b] lengths for pages");
      f_.pages = integers_of(table, 1);
      f_.pages_stride_b = table.strides[0], f_.page_count = args_.k.shape[0];
    }
    if (args_.seqlens) {
      take(all_, "seqlens", args_.seqlens, false);
      check_list("seqlens", args_.seqlens, p_.b);
      p_.lengths = true;
      f_.k_len = integers_of(args_.seqlens);
    }
    f_.key_begin = range_ends("key_begin", args_.key_begin, f_.key_begin_stride_b);
    f_.key_end = range_ends("key_end", args_.key_end, f_.key_end_stride_b);
  }
  Integers range_ends(const char* name, const TensorView& t, int64_t& stride_b) {
    if (!t) return {};
    need(name, t, 2, "[b, sq]");
    check_integers(name, t);
    check_size(name, t, 0, p_.b, "q's batch b");
    check_size(name, t, 1, p_.sq, "q's rows sq");
    p_.key_ranges = true;
    stride_b = t.strides[0];
    return integers_of(t, 1);
  }

  void outputs() {
    if (!args_.scores && !args_.indices) throw Error("scores", "no tensor, nor indices", "one of them or both");
    const auto rows = [&](const char* name, const TensorView& t, const char* shape) {
      need(name, t, 3, shape, true);
      check_size(name, t, 0, p_.b, "q's batch b");
      check_size(name, t, 1, p_.sq, "q's rows sq");
    };
    if (args_.scores) {
      rows("scores", args_.scores, "[b, sq, sk]");
      check_f32("scores", args_.scores.dtype);
      check_size("scores", args_.scores, 2, p_.sk, "the keys sk");
      p_.scores = true;
      f_.scores = static_cast<float*>(args_.scores.data);
      f_.scores_stride = strides(args_.scores, 0, -1, 1, 2);
    }
    if (args_.indices) {
      rows("indices", args_.indices, "[b, sq, n]");
      if (args_.indices.dtype != DType::i32)
        throw Error("indices", "dtype " + std::string(to_string(args_.indices.dtype)), "i32");
      p_.topk = args_.indices.shape[2];
      if (p_.topk < 1) throw Error("indices", "shape " + shape_text(args_.indices), "[b, sq, n] with n of 1 or more");
      f_.indices = static_cast<std::int32_t*>(args_.indices.data);
      f_.indices_stride = strides(args_.indices, 0, -1, 1, 2);
    }
  }

  void positions() {
    p_.causal = args_.causal, p_.relu = args_.relu;
    if (!args_.align) return;
    if (args_.align->kind > Align::Kind::offset) throw Error("align", "an unknown kind", "one of rapt::Align");
    p_.align = args_.align->kind == Align::Kind::top_left       ? P::Align::top_left
               : args_.align->kind == Align::Kind::bottom_right ? P::Align::bottom_right
                                                                : P::Align::offset;
    if (p_.align == P::Align::offset) p_.align_offset = args_.align->value;
  }

  void fill() {
    f_.b = p_.b, f_.sq = p_.sq, f_.sk = p_.sk, f_.total_q = f_.total_k = -1;
    f_.page_size = p_.page_size;
    f_.q_type = p_.q_dtype, f_.k_type = p_.k_dtype;
    f_.h = p_.h, f_.d = p_.d, f_.topk = p_.topk, f_.relu = p_.relu;
    f_.scale = args_.scale.value_or(1.f / std::sqrt(static_cast<float>(p_.d)));
    if (!std::isfinite(f_.scale)) throw Error("scale", shortest(f_.scale), "a finite number");
    f_.score.left = kOpen, f_.score.right = p_.causal ? 0 : kOpen;
    f_.score.offset = p_.align == P::Align::offset ? p_.align_offset : 0;
    f_.score.bottom_right = p_.align == P::Align::bottom_right;
    f_.score.modifier_rows = f_.score.modifier_keys = kNoLimit;
  }

  // The values of lengths and pages.
  void check_lengths() const {
    for (int64_t i = 0; i < p_.b && p_.lengths; ++i) {
      const int64_t n = f_.k_len[i];
      if (n < 0 || n > p_.sk)
        throw Error("seqlens", "length " + std::to_string(n) + " of sequence " + std::to_string(i),
                    "0 to sk = " + std::to_string(p_.sk));
      if (p_.causal && p_.align == P::Align::none && n != p_.sq) refuse_align(n, " in sequence " + std::to_string(i));
      for (int64_t m = 0; p_.page_size > 0 && m * p_.page_size < n; ++m) {
        const int64_t page = f_.pages.element(i * f_.pages_stride_b + m * f_.pages.stride);
        if (page < 0 || page >= f_.page_count)
          throw Error("block_table",
                      "page " + std::to_string(page) + " at [" + std::to_string(i) + ", " + std::to_string(m) + "]",
                      "0 to " + std::to_string(f_.page_count - 1) + ", one of k's pages");
      }
    }
  }
  void refuse_align(int64_t keys, const std::string& where) const {
    throw Error("align",
                "none, with " + std::to_string(p_.sq) + " queries and " + std::to_string(keys) + " keys" + where,
                "top_left, bottom_right or an offset, or causal = false");
  }

  const IndexScoresArgs& args_;
  std::vector<Checked> all_;
  P p_{};
  IndexScoresParams f_{};
};

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

IndexScoresProblem IndexScoresProblem::of(const IndexScoresArgs& args) {
  return std::get<IndexScoresProblem>(validate(args).problem);
}

void check(const IndexScoresProblem& p) {
  for (const auto& [name, size] : {std::pair{"b", p.b}, {"sq", p.sq}, {"sk", p.sk}, {"h", p.h}, {"indices", p.topk}})
    if (size < 0 || size > kMaxSize) throw Error(name, std::to_string(size), "0 to 2^48");
  if (p.h < 1) throw Error("q", "no heads", "1 or more");
  if (p.h > int64_t{1} << 32) throw Error("q", std::to_string(p.h) + " heads", "at most 2^32");
  int64_t rows = 0;
  const auto at_least_1 = [](int64_t size) { return std::max<int64_t>(size, 1); };
  if (__builtin_mul_overflow(at_least_1(p.b), at_least_1(p.sq), &rows) ||
      __builtin_mul_overflow(rows, at_least_1(p.h), &rows) || rows > kMaxOffset)
    throw Error("q", "more than 2^52 rows", "a smaller problem");
  if (p.topk > INT32_MAX || (p.topk > 0 && p.sk > INT32_MAX))
    throw Error("indices", std::to_string(std::max(p.topk, p.sk)) + " keys", "less than 2^31: indices are i32");
  check_float("q", p.q_dtype), check_cache_type("k", p.k_dtype);
  if (p.k_dtype == DType::i4x2) throw Error("k", "dtype i4x2", "f32, bf16, f16, i8, f8e4m3 or f8e5m2");
  if (p.d < 1 || p.d > kMaxHeadSize) throw Error("q", "head size d = " + std::to_string(p.d), "1 to 8192");
  if (is_integer(p.k_dtype) && !p.scales) throw Error("k_scale", "no tensor", "scales for i8");
  if (is_float(p.k_dtype) && p.scales) throw Error("k_scale", "scales for keys that are not quantised", "none");
  if (p.page_size < 0 || (p.page_size > 0 && p.sk % p.page_size != 0))
    throw Error("k", "pages of " + std::to_string(p.page_size) + " rows", "a divisor of sk = " + std::to_string(p.sk));
  if (p.page_size > 0 && !p.lengths) throw Error("seqlens", "no tensor", "[b] lengths for pages");
  if (p.topk == 0 && !p.scores) throw Error("scores", "no tensor, nor indices", "one of them or both");
  if (p.align_offset > kMaxOffset || p.align_offset < -kMaxOffset)
    throw Error("align", "offset " + std::to_string(p.align_offset), "at most 2^52 either way");
  if (p.causal && p.align == P::Align::none && !p.lengths && p.sq != p.sk)
    throw Error("align", "none, with " + std::to_string(p.sq) + " queries and " + std::to_string(p.sk) + " keys",
                "top_left, bottom_right or an offset, or causal = false");
}

Call validate(const IndexScoresArgs& args, std::span<const std::byte> workspace) {
  const FloatEnvironment environment;  // for the default scale
  return Validator(args).run(workspace);
}

}  // namespace rapt
