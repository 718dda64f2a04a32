#include <algorithm>
#include <array>
#include <functional>

#include "core/fields.hpp"
#include "core/text.hpp"
#include "operations/attention/check.hpp"
#include "operations/attention/modifiers.hpp"
#include "operations/attention/operation.hpp"
#include "rapt/attention_problem.hpp"

namespace rapt {
namespace {

using P = AttentionProblem;

constexpr std::array<std::string_view, 4> kLayouts = {"bhsd", "bshd", "bhds", "other"};

// "q=bf16", unless dtype= says it for all.
template <auto kMember>
constexpr Field<P> own_dtype(std::string_view key) {
  return own_dtype_field<P, kMember, &P::q_dtype, &P::kv_dtype, &P::out_dtype>(key);
}

void read_window(P& p, const Word& word) {
  const std::size_t comma = word.value.find(',');
  if (comma == std::string_view::npos) word.refuse("window=left,right");
  Word side = word;
  side.value = word.value.substr(0, comma), p.window_left = side.integer();
  side.value = word.value.substr(comma + 1), p.window_right = side.integer();
}
void print_window(const P& p, std::string_view key, std::string& text) {
  if (p.window_left != -1 || p.window_right != -1)
    print_word(text, key, std::to_string(p.window_left) + "," + std::to_string(p.window_right));
}

void read_layout(P& p, const Word& word) {
  const auto* const found = std::find(kLayouts.begin(), kLayouts.end(), word.value);
  if (found == kLayouts.end()) word.refuse("layout=bhsd, bshd, bhds or other");
  p.layout = static_cast<P::Layout>(found - kLayouts.begin());
}

constexpr std::array kFirstFields = {
    common_dtype_field<P, &P::q_dtype, &P::kv_dtype, &P::out_dtype>("dtype"),
    own_dtype<&P::q_dtype>("q"),
    own_dtype<&P::kv_dtype>("kv"),
    own_dtype<&P::out_dtype>("out"),
    device_field<P>(),
    size_field<P, &P::b>("b"),
    size_field<P, &P::hq>("hq"),
    size_field_like<P, &P::hk, &P::hq>("hk"),
    size_field<P, &P::sq>("sq"),
    size_field_like<P, &P::sk, &P::sq>("sk"),
    size_field<P, &P::d>("d"),
    size_field_like<P, &P::dv, &P::d>("dv"),
    flag_field<P, &P::causal>("causal"),
    Field<P>{"window", false, print_window, read_window},
    align_field<P>("align"),
    Field<P>{"scale", false,
             [](const P& p, std::string_view key, std::string& text) {
               if (p.has_scale) print_word(text, key, shortest(p.scale));
             },
             [](P& p, const Word& word) { p.has_scale = true, p.scale = word.number(); }},
};
constexpr std::array kLengthFields = {
    flag_field<P, &P::lse>("lse"),
    flag_field<P, &P::kv_lengths>("seqlens"),
    integer_field<P, &P::ragged_q, -1>("ragged_q"),
    integer_field<P, &P::ragged_k, -1>("ragged_k"),
};
constexpr std::array kLastFields = {
    flag_field<P, &P::latent>("latent"),
    groups_field<P>(),
    own_groups_field<P, &P::k_groups>("k_groups"),
    own_groups_field<P, &P::v_groups>("v_groups"),
    flag_field<P, &P::zeros>("zeros"),
    flag_field<P, &P::head_scales>("head_scales"),
    integer_field<P, &P::k_tail, 0>("tail"),
    dtype_field<P, &P::k_tail_dtype>("tail_dtype"),
    flag_field<P, &P::q_scale>("q_scale"),
    Field<P>{"layout", false,
             [](const P& p, std::string_view key, std::string& text) {
               if (p.layout != P::Layout::bhsd) print_word(text, key, kLayouts[static_cast<std::size_t>(p.layout)]);
             },
             read_layout},
};
constexpr auto kFields = join(kFirstFields, Modifiers::fields, kLengthFields, KeyKinds::fields<P>, kLastFields);

}  // namespace

std::string AttentionProblem::to_string() const {
  return print_fields("attention", *this, kFields);
}
std::span<const Field<AttentionProblem>> attention_fields() {
  return kFields;
}

AttentionProblem AttentionProblem::parse(std::string_view text) {
  const Words words(text, "attention");
  AttentionProblem p;
  words.read(p, kFields);
  complete(words, p);
  return p;
}
void complete(const Words& words, AttentionProblem& p) {
  if (p.ragged_q < -1 || p.ragged_k < -1) throw Error("problem", p.to_string(), "ragged totals of 0 or more");
  if (!words.has("hk")) p.hk = p.hq;
  if (!words.has("sk")) p.sk = p.sq;
  if (!words.has("dv")) p.dv = p.d;
}

std::size_t AttentionProblem::hash() const {
  return std::hash<std::string>()(to_string());
}

std::vector<Problem> OperationOf<AttentionArgs>::corners(const AttentionProblem& largest) {
  std::vector<Problem> corners;
  AttentionProblem p = largest;
  for (const std::int64_t sk : {largest.sk, std::min<std::int64_t>(largest.sk, 1)})
    for (const std::int64_t sq : {largest.sq, std::min<std::int64_t>(largest.sq, 1)}) {
      p.sq = sq, p.sk = sk, p.head_scales = largest.head_scales;
      corners.emplace_back(p);
      // Scales of rows are those of heads where there is one row, or one page.
      if (p.head_scales || p.k_groups + p.v_groups == 0) continue;
      p.head_scales = true;
      corners.emplace_back(p);
    }
  return corners;
}

}  // namespace rapt
