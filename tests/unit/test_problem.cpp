// Problem: text form, hash, and the description of arguments.
#include <algorithm>
#include <array>
#include <functional>
#include <random>
#include <vector>

#include "operations/attention/sampler.hpp"
#include "rapt/plan.hpp"
#include "rapt/problem.hpp"
#include "support/catch.hpp"
#include "support/entries.hpp"

using namespace rapt;
using namespace rapt::testing;

TEST_CASE("problem: the text of any problem reads back as the problem", "[unit]") {
  std::mt19937_64 random(301);
  for (int i = 0; i < 500; ++i) {
    const AttentionProblem p = sample(random, kEverythingCached);
    INFO(p.to_string());
    const AttentionProblem back = AttentionProblem::parse(p.to_string());
    CHECK(back == p);
    CHECK(back.hash() == p.hash());
    CHECK(back.to_string() == p.to_string());
  }
}

TEST_CASE("problem: every field survives and counts", "[unit]") {
  const AttentionProblem plain = AttentionProblem::parse("attention b=2 hq=6 hk=6 sq=5 sk=5 d=7 dv=7");
  for (const char* word : {"dtype=f16",
                           "q=bf16",
                           "kv=f16",
                           "out=bf16",
                           "device=cuda",
                           "b=3",
                           "hq=12",
                           "hk=3",
                           "sq=6",
                           "sk=6",
                           "d=8",
                           "dv=8",
                           "causal",
                           "window=3,-1",
                           "window=-1,0",
                           "align=top_left",
                           "align=bottom_right",
                           "align=0",
                           "align=-12",
                           "scale=0",
                           "scale=-0.1",
                           "softcap=0.3",
                           "bias=k",
                           "bias=hqk",
                           "bias=bhqk",
                           "bias=q",
                           "bias=1",
                           "bias_dtype=f16",
                           "mask=bk",
                           "alibi",
                           "sinks",
                           "dropout=0.1",
                           "dropout=1",
                           "lse",
                           "seqlens",
                           "ragged_q=0",
                           "ragged_k=11",
                           "kv=i8",
                           "kv=f8e4m3",
                           "kv=f8e5m2",
                           "kv=i4x2",
                           "page=1",
                           "page=16",
                           "ring",
                           "gathered",
                           "latent",
                           "groups=2",
                           "k_groups=2",
                           "v_groups=4",
                           "groups=0 v_groups=3",
                           "zeros",
                           "head_scales",
                           "tail=3",
                           "tail_dtype=bf16",
                           "q=f8e4m3",
                           "q_scale",
                           "layout=bshd",
                           "layout=bhds",
                           "layout=other"}) {
    const std::string key = std::string(word).substr(0, std::string(word).find('='));
    std::string text = "attention " + std::string(word);
    for (const char* other : {"b=2", "hq=6", "hk=6", "sq=5", "sk=5", "d=7", "dv=7"})
      if (!std::string(other).starts_with(key + "=")) text += std::string(" ") + other;
    const AttentionProblem changed = AttentionProblem::parse(text);
    INFO(text << ": " << changed.to_string());
    CHECK_FALSE(changed == plain);
    CHECK(changed.hash() != plain.hash());
    CHECK(AttentionProblem::parse(changed.to_string()) == changed);
  }
}

TEST_CASE("problem: defaults follow other fields", "[unit]") {
  const AttentionProblem p = AttentionProblem::parse("attention b=1 hq=8 sq=512 d=64 causal");
  CHECK(p.hk == 8);
  CHECK(p.sk == 512);
  CHECK(p.dv == 64);
  CHECK(p.causal);
  CHECK_FALSE(p.has_scale);
  CHECK(p.to_string() == "attention b=1 hq=8 sq=512 d=64 causal");
}

TEST_CASE("problem: dtype= is what q=, kv= and out= do not say, in any order", "[unit]") {
  for (const char* text : {"attention dtype=bf16 out=f32 sq=1 d=1", "attention out=f32 sq=1 d=1 dtype=bf16",
                           "attention q=bf16 kv=bf16 sq=1 d=1"}) {
    const AttentionProblem p = AttentionProblem::parse(text);
    CHECK(p.q_dtype == DType::bf16);
    CHECK(p.kv_dtype == DType::bf16);
    CHECK(p.out_dtype == DType::f32);
    CHECK(p.to_string() == "attention q=bf16 kv=bf16 b=1 hq=1 sq=1 d=1");
  }
  CHECK(typed("attention sq=1 d=1", DType::f16).to_string() == "attention dtype=f16 b=1 hq=1 sq=1 d=1");
}

TEST_CASE("problem: groups= is what k_groups= and v_groups= do not say, in any order", "[unit]") {
  for (const char* text :
       {"attention kv=i8 groups=4 v_groups=2 sq=1 d=8", "attention kv=i8 v_groups=2 groups=4 sq=1 d=8",
        "attention kv=i8 v_groups=2 k_groups=4 sq=1 d=8"}) {
    const AttentionProblem p = AttentionProblem::parse(text);
    CHECK(p.k_groups == 4);
    CHECK(p.v_groups == 2);
    CHECK(p.to_string() == "attention kv=i8 b=1 hq=1 sq=1 d=8 k_groups=4 v_groups=2");
  }
  CHECK(AttentionProblem::parse("attention sq=1 d=8 k_groups=4 v_groups=4 zeros page=16 seqlens").to_string() ==
        "attention b=1 hq=1 sq=1 d=8 seqlens page=16 groups=4 zeros");
}

TEST_CASE("problem: scales keep every bit", "[unit]") {
  for (float scale : {0.1f, 1e-38f, 3.4e38f, 1.00000012f, -7.5f}) {
    AttentionProblem p = AttentionProblem::parse("attention sq=1 d=1");
    p.has_scale = true;
    p.scale = scale;
    CHECK(AttentionProblem::parse(p.to_string()).scale == scale);
  }
}

TEST_CASE("problem: words that make no sense are named", "[unit]") {
  const char* const wrong[][2] = {
      {"", "\"\""},
      {"attention sq", "\"sq\""},
      {"attention sq=", "\"sq=\""},
      {"attention sq=1x", "\"sq=1x\""},
      {"attention sq=1.5", "\"sq=1.5\""},
      {"attention sq=99999999999999999999", "99999999999999999999"},
      {"attention pages=4", "\"pages=4\""},
      {"attention window=3", "\"window=3\""},
      {"attention window=3,x", "\"window=3,x\""},
      {"attention align=middle", "\"align=middle\""},
      {"attention bias=kq", "\"bias=kq\""},
      {"attention bias=1k", "\"bias=1k\""},
      {"attention mask=", "\"mask=\""},
      {"attention dtype=f64", "\"dtype=f64\""},
      {"attention layout=sbhd", "\"layout=sbhd\""},
      {"attention scale=nan", "scale"},
      {"attention softcap=inf", "softcap"},
      {"attention softcap=0", "softcap=0"},
      {"attention dropout=0", "dropout=0"},
      {"attention dropout=nan", "dropout"},
      {"attention page=0", "page=0"},
      {"attention causal=1", "\"causal=1\""},
      {"attention ring=1", "\"ring=1\""},
      {"attention page", "\"page\""},
      {"attention groups=x", "\"groups=x\""},
      {"attention groups=1 groups=1", "\"groups=1\""},
      {"attention kv=i4", "\"kv=i4\""},
      {"attention sq=1 d=2 sq=1", "\"sq=1\""},
      {"attention causal sq=1 causal", "\"causal\""},
      {"attention dtype=f16 q=f32 dtype=f16", "\"dtype=f16\""},
      {"attention q=f64", "\"q=f64\""},
      {"convolution b=1", "\"convolution\""},
  };
  for (const auto& [text, named] : wrong) {
    INFO(text);
    try {
      AttentionProblem::parse(text);
      FAIL("accepted");
    } catch (const Error& error) {
      CHECK(std::string(error.what()).find(named) != std::string::npos);
    }
  }
}

TEST_CASE("problem: of() describes what a case was made from", "[unit][numbers]") {
  std::mt19937_64 random(302);
  for (int i = 0; i < 300; ++i) {
    AttentionProblem p = sample(random, kEverything);
    // A dimension of size 1 is in every order at once and broadcasts as well as not.
    for (std::int64_t* size : {&p.b, &p.hk, &p.sq, &p.sk, &p.d, &p.dv}) *size += *size == 1;
    p.hq = 2 * p.hk;
    if (p.ragged_q >= 0) p.ragged_q = p.ragged_k >= 0 && p.sq == p.sk ? p.b * p.sq - 1 : p.sq + 1;
    if (p.ragged_k >= 0) p.ragged_k = p.ragged_q >= 0 && p.sq == p.sk ? p.ragged_q : p.sk + 1;
    Case c(p, 5);
    if (p.ragged_q >= 0 || p.ragged_k >= 0)
      p.layout = AttentionProblem::Layout::bhsd;  // ragged tensors are not told apart
    p.latent = p.latent && p.dv < p.d;            // values that are whole keys are no part of a latent row
    CHECK(AttentionProblem::of(c.args()).to_string() == p.to_string());
  }
}

TEST_CASE("problem: of() describes caches", "[unit][numbers]") {
  for (const char* words : {"sk=32 seqlens page=16", "sk=34 seqlens page=2 layout=bshd", "sk=40 seqlens ring",
                            "sk=40 gathered", "sk=40 gathered layout=other", "sk=40 seqlens layout=bhds",
                            "sk=48 seqlens page=16 layout=other", "sk=30 ragged_k=50", "sk=40 latent",
                            "sk=40 gathered latent layout=bshd", "sk=32 seqlens page=8 latent layout=bhds"}) {
    for (const char* type : {"", " kv=bf16", " kv=i8 groups=1", " kv=i4x2 k_groups=2 v_groups=4 zeros", " kv=f8e4m3",
                             " kv=f8e5m2 groups=2", " kv=f8e4m3 k_groups=2 zeros"}) {
      for (std::uint64_t seed : {1, 2, 3}) {
        const AttentionProblem p =
            AttentionProblem::parse("attention b=2 hq=4 hk=2 sq=3 d=16 dv=8 lse " + std::string(words) + type);
        Case c(p, seed);
        CHECK(AttentionProblem::of(c.args()).to_string() == c.problem.to_string());
      }
    }
  }
}

TEST_CASE("problem: of() says whether queries have scales, and whether those of keys and values are of heads",
          "[unit]") {
  const auto text_of = [](const std::string& words, const std::function<void(AttentionArgs&)>& change = {}) {
    Case c(AttentionProblem::parse("attention b=2 hq=4 hk=2 sq=3 sk=32 d=16 dv=8 " + words));
    AttentionArgs args = c.args();
    if (change) change(args);
    const std::string text = AttentionProblem::of(args).to_string();
    return text.substr(text.find("d=16 dv=8") + 9);
  };
  const auto k_scale_of = [](std::int64_t entries, std::int64_t rows) {
    return [=](AttentionArgs& a) {
      a.kv.k_scale = TensorView(a.kv.k_scale.data, DType::f32,
                                Layout(std::array{entries, std::int64_t{2}, rows, std::int64_t{1}}));
    };
  };
  const std::string types = "q=f8e4m3 kv=f8e4m3 out=bf16";
  CHECK(text_of(types) == "");
  CHECK(text_of(types + " q_scale") == " q_scale");
  CHECK(text_of(types + " groups=1 head_scales") == " groups=1 head_scales");
  CHECK(text_of(types + " k_groups=1 head_scales") == " k_groups=1 head_scales");
  CHECK(text_of(types + " k_groups=4 v_groups=2 head_scales") == " k_groups=4 v_groups=2 head_scales");
  // One for a sequence, or for all; but not one for a row.
  CHECK(text_of(types + " groups=1 head_scales", k_scale_of(2, 1)) == " groups=1 head_scales");
  CHECK(text_of(types + " groups=1 head_scales", k_scale_of(1, 1)) == " groups=1 head_scales");
  Tensor scales(DType::f32, Layout(std::array<std::int64_t, 4>{2, 2, 32, 1}));
  const auto of_rows = [&](TensorView& t) { t = scales.view(); };
  CHECK(text_of(types + " groups=1 head_scales", [&](AttentionArgs& a) { of_rows(a.kv.k_scale); }) == " groups=1");
  CHECK(text_of(types + " groups=1 head_scales", [&](AttentionArgs& a) { of_rows(a.kv.v_scale); }) == " groups=1");
  // The same row again and again is one.
  CHECK(text_of(types + " groups=1 head_scales", [&](AttentionArgs& a) {
          of_rows(a.kv.k_scale), a.kv.k_scale.strides[2] = 0;
        }) == " groups=1 head_scales");
  // Of pages, one for all of them.
  const std::string pages = types + " seqlens page=16 groups=1 head_scales";
  CHECK(text_of(pages) == " seqlens page=16 groups=1 head_scales");
  CHECK(text_of(pages, [&](AttentionArgs& a) {
          const std::int64_t count = a.kv.k.shape[0];
          REQUIRE(count <= 64);
          k_scale_of(count, 1)(a), a.kv.k_scale.data = scales.view().data;
        }) == " seqlens page=16 groups=1");
  CHECK(text_of(types + " ragged_k=40 groups=1 head_scales") == " ragged_k=40 groups=1 head_scales");
  CHECK(text_of(types + " ragged_k=40 groups=1 head_scales", [&](AttentionArgs& a) {
          a.kv.v_scale = TensorView(scales.view().data, DType::f32, Layout(std::array<std::int64_t, 3>{40, 2, 1}));
        }) == " ragged_k=40 groups=1");
}

TEST_CASE("problem: plans for scales of rows run calls with those of heads, and not the other way round", "[unit]") {
  const AttentionProblem of_heads =
      AttentionProblem::parse("attention kv=i8 groups=1 head_scales b=2 hq=2 sq=3 sk=9 d=8");
  AttentionProblem of_rows = of_heads;
  of_rows.head_scales = false;
  Case heads(of_heads, 3), rows(of_rows, 5);
  REQUIRE(heads.problem == of_heads);
  REQUIRE(rows.problem == of_rows);
  CHECK(refused_argument([&] { Plan(of_rows).run(heads.args()); }) == "");
  CHECK(refused_argument([&] { Plan(of_heads).run(heads.args()); }) == "");
  CHECK(refused_argument([&] { Plan(of_rows).run(rows.args()); }) == "");
  CHECK(refused_argument([&] { Plan(of_heads).run(rows.args()); }) == "args");
}

namespace {

/// Every problem of `words` after `name` reads back, and differs from those of all other words.
void check_words(const std::string& name, const std::vector<const char*>& words) {
  std::vector<Problem> seen;
  for (const char* word : words) {
    const std::string text = name + " " + word;
    const Problem problem = parse_problem(text);
    INFO(text << ": " << to_string(problem));
    CHECK(parse_problem(to_string(problem)) == problem);
    CHECK(to_string(parse_problem(to_string(problem))) == to_string(problem));
    CHECK(std::find(seen.begin(), seen.end(), problem) == seen.end());
    seen.push_back(problem);
  }
}

/// The argument that a plan for the problem names.
std::string refused_plan(const std::string& text) {
  return refused_argument([&] { Plan{parse_problem(text)}; });
}

}  // namespace

TEST_CASE("problem: every field of append_kv and merge_states survives and counts", "[unit]") {
  check_words("append_kv", {"",
                            "device=cuda",
                            "dtype=bf16",
                            "new=f16",
                            "kv=f16",
                            "kv=i8",
                            "kv=i4x2 groups=1",
                            "b=3",
                            "hk=3",
                            "n=6",
                            "sk=6",
                            "d=8",
                            "dv=8",
                            "ragged=0",
                            "ragged=11",
                            "page=1",
                            "page=16",
                            "ring",
                            "groups=2",
                            "k_groups=2",
                            "v_groups=4",
                            "zeros",
                            "given_scales",
                            "tail=3",
                            "tail_dtype=f16",
                            "values_are_keys",
                            "kv=i8 groups=0 v_groups=3"});
  check_words("merge_states",
              {"", "dtype=bf16", "out=bf16", "dtype=bf16 out=f16", "device=cuda", "rows=3", "dv=8", "count=4", "lse"});
  CHECK(to_string(parse_problem(" append_kv groups=1 page=16 kv=i8 new=bf16 d=128 sk=4096 n=64 hk=8 b=8")) ==
        "append_kv new=bf16 kv=i8 b=8 hk=8 n=64 sk=4096 d=128 page=16 groups=1");
  CHECK(to_string(parse_problem("append_kv dtype=f16 sk=1 n=1 d=4 dv=4")) ==
        "append_kv dtype=f16 b=1 hk=1 n=1 sk=1 d=4");
  CHECK(to_string(parse_problem("merge_states lse count=4 dv=128 rows=256 out=f32 dtype=bf16")) ==
        "merge_states dtype=bf16 out=f32 rows=256 dv=128 count=4 lse");
}

TEST_CASE("problem: every field of index_scores and select_topk survives and counts", "[unit]") {
  check_words("index_scores", {"",
                               "dtype=bf16",
                               "q=f16",
                               "k=f16",
                               "k=i8",
                               "q=bf16 k=f8e4m3",
                               "device=cuda",
                               "b=3",
                               "sq=6",
                               "sk=6",
                               "h=3",
                               "d=8",
                               "full",
                               "align=top_left",
                               "align=bottom_right",
                               "align=0",
                               "align=-12",
                               "linear",
                               "scales",
                               "seqlens",
                               "ranges",
                               "page=1",
                               "page=16",
                               "topk=1",
                               "topk=2048",
                               "topk=2048 scores"});
  check_words("select_topk", {"", "device=cuda", "rows=3", "sk=6", "n=2"});
  CHECK(
      to_string(parse_problem(" index_scores topk=2048 align=bottom_right d=128 h=64 sk=8192 sq=64 b=1 dtype=bf16")) ==
      "index_scores dtype=bf16 b=1 sq=64 sk=8192 h=64 d=128 align=bottom_right topk=2048");
  CHECK(to_string(parse_problem("index_scores sk=4 sq=4 d=8 scores")) == "index_scores b=1 sq=4 h=1 d=8");
  CHECK(to_string(parse_problem("select_topk n=2048 sk=8192 rows=64")) == "select_topk rows=64 sk=8192 n=2048");
}

TEST_CASE("problem: words of another operation are named", "[unit]") {
  const char* const wrong[][2] = {
      {"append_kv sq=4", "\"sq=4\""},      {"append_kv n=4 n=4", "\"n=4\""},     {"append_kv ring=1", "\"ring=1\""},
      {"append_kv kv=i4", "\"kv=i4\""},    {"append_kv n=x", "\"n=x\""},         {"merge_states b=4", "\"b=4\""},
      {"merge_states lse=1", "\"lse=1\""}, {"merge_states rows", "\"rows\""},    {"merge_states lse lse", "\"lse\""},
      {"index_scores hq=4", "\"hq=4\""},   {"select_topk lse", "\"lse\""},       {"select_topk n", "\"n\""},
      {"merge rows=4", "\"merge\""},       {"append_kv_ n=4", "\"append_kv_\""}, {"", "\"\""},
  };
  for (const auto& [text, named] : wrong) {
    INFO(text);
    CHECK(refused_text([text = text] { parse_problem(text); }).find(named) != std::string::npos);
  }
  std::string names;
#define RAPT_OPERATION(name, Name, NAME) names += #name ", ";
#include "rapt/operations.def"
  names.resize(names.size() - 2);
  names.replace(names.rfind(", "), 2, " or ");
  CHECK(refused_text([] { parse_problem("merge"); }) == "problem: \"merge\"; wanted the operation first: " + names);
}

TEST_CASE("problem: plans refuse append_kv problems that no arguments could give", "[unit]") {
  CHECK(refused_plan("append_kv n=4 sk=9 d=8") == "");
  CHECK(refused_plan("append_kv b=-1 n=4 sk=9 d=8") == "b");
  CHECK(refused_plan("append_kv n=4 sk=9 d=0") == "cache.k");
  CHECK(refused_plan("append_kv n=4 sk=9 d=8 dv=8193") == "cache.v");
  CHECK(refused_plan("append_kv new=i8 n=4 sk=9 d=8") == "k_new");
  CHECK(refused_plan("append_kv kv=i32 n=4 sk=9 d=8") == "cache.k");
  CHECK(refused_plan("append_kv n=4 sk=9 d=8 page=2") == "cache.k");
  CHECK(refused_plan("append_kv n=4 sk=8 d=8 page=2 ring") == "cache.kind");
  CHECK(refused_plan("append_kv kv=i8 n=4 sk=9 d=8") == "cache.k_scale");
  CHECK(refused_plan("append_kv kv=i8 n=4 sk=9 d=8 k_groups=1 v_groups=3") == "cache.v_scale");
  CHECK(refused_plan("append_kv kv=i4x2 n=4 sk=9 d=6 groups=2") == "cache.k_scale");
  // More new rows than there can be, or than have room.
  CHECK(refused_plan("append_kv b=281474976710656 n=281474976710656 sk=281474976710656 d=8") == "k_new");
  CHECK(refused_plan("append_kv b=2 n=10 sk=9 d=8") == "seqlens");
  CHECK(refused_plan("append_kv b=2 n=10 sk=9 d=8 ring") == "");
  CHECK(refused_plan("append_kv b=2 n=1 sk=0 d=8 ring") == "seqlens");
  CHECK(refused_plan("append_kv b=2 n=0 sk=0 d=8 ring") == "");
  CHECK(refused_plan("append_kv b=0 n=10 sk=9 d=8") == "");
  CHECK(refused_plan("append_kv b=2 n=4 sk=9 d=8 ragged=3") == "cu_seqlens");
  CHECK(refused_plan("append_kv b=2 n=4 sk=9 d=8 ragged=9") == "cu_seqlens");
  CHECK(refused_plan("append_kv b=2 n=4 sk=9 d=8 ragged=8") == "");
  // Scales and zeros that no cache has.
  CHECK(refused_plan("append_kv kv=f8e4m3 n=4 sk=9 d=8 groups=1 zeros") == "cache.k_zero");
  CHECK(refused_plan("append_kv n=4 sk=9 d=8 given_scales") == "cache.k_scale");
  CHECK(refused_plan("append_kv kv=f8e4m3 n=4 sk=9 d=8 v_groups=1 given_scales") == "");
  CHECK(refused_plan("append_kv n=4 sk=9 d=8 dv=9 values_are_keys") == "cache.v");
  CHECK(refused_plan("append_kv kv=i8 n=4 sk=9 d=8 groups=1 values_are_keys") == "");
  CHECK(refused_plan("append_kv kv=i8 n=4 sk=9 d=8 dv=4 groups=1 values_are_keys") == "cache.v_scale");
  CHECK(refused_plan("append_kv kv=i8 n=4 sk=9 d=8 dv=4 k_groups=2 v_groups=1 values_are_keys") == "");
  CHECK(refused_plan("append_kv kv=f8e5m2 n=4 sk=9 d=8 dv=8 tail=2 values_are_keys") == "cache.v");
  CHECK(refused_plan("append_kv n=4 sk=9 d=8 tail=2") == "cache.k_tail");
  CHECK(refused_plan("append_kv kv=f8e5m2 n=4 sk=9 d=8 tail=8") == "cache.k_tail");
  CHECK(refused_plan("append_kv kv=f8e5m2 n=4 sk=9 d=8 tail=2 tail_dtype=f8e5m2") == "cache.k_tail");
  CHECK(refused_plan("append_kv kv=f8e5m2 n=4 sk=9 d=8 v_groups=1 values_are_keys") == "cache.v_scale");
  CHECK(refused_plan("append_kv kv=f8e5m2 n=4 sk=9 d=8 values_are_keys") == "");
}

TEST_CASE("problem: plans refuse merge_states problems that no arguments could give", "[unit]") {
  CHECK(refused_plan("merge_states rows=0 dv=8 count=2") == "");
  for (const char* words : {"rows=-1 dv=8", "rows=9007199254740992 dv=8", "rows=1 dv=0", "rows=1 dv=8193",
                            "rows=1 dv=8 count=0", "rows=1 dv=8 dtype=i8", "rows=1 dv=8 out=f8e4m3"}) {
    INFO(words);
    CHECK(refused_plan("merge_states " + std::string(words)) == "outs");
  }
}
