// contract.md's "Bad input" for gathered keys.
#include "support/refuses.hpp"

using namespace rapt;
using namespace rapt::testing;

namespace {

const char* const kGathered = "sk=7 gathered";  // with seed 1: i64, entries for both sequences, and gaps

AttentionProblem small() {
  return AttentionProblem::parse("attention b=2 hq=4 hk=2 sq=6 d=8 dv=4 lse sk=7 gathered");
}

}  // namespace

TEST_CASE("validation: lists of gathered keys", "[unit]") {
  for (const auto& change : std::initializer_list<std::function<void(TensorView&)>>{
           [](TensorView& t) { t.shape[0] = -1; }, [](TensorView& t) { t.shape[1] = kHuge; },
           [](TensorView& t) { ++t.shape[0]; }, [](TensorView& t) { --t.shape[1]; },
           [](TensorView& t) { t.strides[1] = -1; }, [](TensorView& t) { t.strides[0] = kHuge / 4; },
           [](TensorView& t) { t.ndim = 5; }, [](TensorView& t) { --t.ndim; }, [](TensorView& t) { t.data = nullptr; },
           [](TensorView& t) { t.dtype = DType::f32; }, [](TensorView& t) { t.device.index = 1; }}) {
    refuses(
        "kv.indices", [&](AttentionArgs& a, Case&) { change(a.kv.indices); }, kGathered);
    refuses(
        "kv.counts",
        [&](AttentionArgs& a, Case& c) {
          c.counts = Tensor(DType::i64, Layout(std::vector<std::int64_t>{2, 6}));
          for (std::int64_t i = 0; i < c.counts.size(); ++i) set_index(c.counts, i, 3);
          a.kv.counts = c.counts.view();
          REQUIRE(message_of(a).empty());
          change(a.kv.counts);
        },
        kGathered);
  }
  refuses(
      "kv.indices", [](AttentionArgs& a, Case&) { a.kv.indices = {}; }, kGathered);
  refuses(
      "k", [](AttentionArgs& a, Case&) { a.kv.k.shape[0] = 3; }, kGathered);
  refuses(
      "v", [](AttentionArgs& a, Case&) { a.kv.v.shape[0] = 1; }, kGathered);
  refuses(
      "v", [](AttentionArgs& a, Case&) { --a.kv.v.shape[2]; }, kGathered);
  refuses(
      "out", [](AttentionArgs& a, Case&) { a.out.data = const_cast<void*>(a.kv.indices.data); }, kGathered);
  // Lists are for gathered keys, which have no other lengths.
  refuses("kv.indices", [](AttentionArgs& a, Case&) { a.kv.indices = a.q; });
  refuses("kv.counts", [](AttentionArgs& a, Case&) { a.kv.counts = a.q; });
  static const std::int64_t lengths[] = {7, 7}, starts[] = {0, 6, 12};
  refuses(
      "kv.seqlens", [](AttentionArgs& a, Case&) { a.kv.seqlens = TensorView(lengths, {2}); }, kGathered);
  refuses(
      "kv.cu_seqlens", [](AttentionArgs& a, Case&) { a.kv.cu_seqlens = TensorView(starts, {3}); }, kGathered);
  refuses(
      "kv.block_table", [](AttentionArgs& a, Case&) { a.kv.block_table = a.kv.indices; }, kGathered);
}

TEST_CASE("validation: entries of lists are keys, or stand for none", "[unit]") {
  for (std::uint64_t seed : {1, 2, 3}) {  // one without counts, one with a pool
    Case c(small(), seed);
    const std::int64_t rows = c.k.layout().shape[2];
    for (std::int64_t i = 0; i < c.indices.size(); ++i) set_index(c.indices, i, 0);
    for (std::int64_t i = 0; c.counts && i < c.counts.size(); ++i) set_index(c.counts, i, 7);
    for (const std::int64_t place : {0, 40, 83}) {  // [0, 0, 0], [0, 5, 5], [1, 5, 6]
      for (const std::int64_t row : {rows, std::int64_t{1} << 30}) {
        set_index(c.indices, place, row);
        const std::string message = message_of(c.args());
        CHECK(message == "kv.indices: key " + std::to_string(row) + " at [" + std::to_string(place / 42) + ", " +
                             std::to_string(place / 7 % 6) + ", " + std::to_string(place % 7) + "]; wanted 0 to " +
                             std::to_string(rows - 1) + ", one of k's rows, or negative, for no key");
        CHECK(refused_argument([&] { attention(c.args()); }) == "kv.indices");
      }
      for (const std::int64_t row : {std::int64_t{-1}, std::int64_t{-1} << 31, rows - 1}) {
        set_index(c.indices, place, row);
        CHECK(message_of(c.args()).empty());
      }
      if (!c.counts) continue;
      set_index(c.counts, place / 7, place % 7);  // what stands behind does not count
      for (std::int64_t j = place; j < place / 7 * 7 + 7; ++j) set_index(c.indices, j, rows);
      CHECK(message_of(c.args()).empty());
      for (const std::int64_t count : {-1, 8}) {
        set_index(c.counts, place / 7, count);
        CHECK(message_of(c.args()) == "kv.counts: " + std::to_string(count) + " keys of token " +
                                          std::to_string(place / 7 % 6) + " of sequence " + std::to_string(place / 42) +
                                          "; wanted 0 to n = 7");
      }
      set_index(c.counts, place / 7, 0);
    }
  }
  Case c(small(), 1);
  AttentionArgs args = c.args();
  args.kv.k.shape[2] = args.kv.v.shape[2] = 0;
  CHECK(message_of(args).find("wanted negative, for no key, as k has no rows") != std::string::npos);
}

TEST_CASE("validation: what gathered keys do not go with is refused by its name", "[unit]") {
  static const float numbers[7] = {};
  static const bool marks[7] = {};
  static const std::int64_t starts[] = {0, 6, 12};
  refuses(
      "score.causal", [](AttentionArgs& a, Case&) { a.score.causal = true; }, kGathered);
  refuses(
      "score.window",
      [](AttentionArgs& a, Case&) {
        a.score.window = Window{3, -1};
      },
      kGathered);
  refuses(
      "score.window",
      [](AttentionArgs& a, Case&) {
        a.score.window = Window{-1, 3};
      },
      kGathered);
  refuses(
      "score.align", [](AttentionArgs& a, Case&) { a.score.align = Align::bottom_right(); }, kGathered);
  refuses(
      "score.bias", [](AttentionArgs& a, Case&) { a.score.bias = TensorView(numbers, {7}); }, kGathered);
  refuses(
      "score.mask", [](AttentionArgs& a, Case&) { a.score.mask = TensorView(marks, {7}); }, kGathered);
  refuses(
      "score.alibi", [](AttentionArgs& a, Case&) { a.score.alibi = TensorView(numbers, {4}); }, kGathered);
  refuses(
      "score.dropout",
      [](AttentionArgs& a, Case&) {
        a.score.dropout = Dropout{0.5f, 1, 2};
      },
      kGathered);
  refuses(
      "cu_seqlens_q",
      [](AttentionArgs& a, Case&) {
        a.cu_seqlens_q = TensorView(starts, {3});
        a.q.ndim = a.out.ndim = 3, a.lse.ndim = 2;
        a.q.shape = {12, 4, 8, 0}, a.out.shape = {12, 4, 4, 0}, a.lse.shape = {12, 4, 0, 0};
        a.q.strides = {32, 8, 1, 0}, a.out.strides = {16, 4, 1, 0}, a.lse.strides = {4, 1, 0, 0};
      },
      kGathered);
  Case c(small(), 1);
  AttentionArgs args = c.args();
  args.score.window = Window{-1, -1};
  args.score.dropout = Dropout{0.f, 1, 2};
  CHECK(message_of(args).empty());
  for (const auto& [words, argument] :
       std::initializer_list<std::pair<const char*, const char*>>{{"causal", "score.causal"},
                                                                  {"window=-1,2", "score.window"},
                                                                  {"align=3", "score.align"},
                                                                  {"bias=k", "score.bias"},
                                                                  {"mask=k", "score.mask"},
                                                                  {"alibi", "score.alibi"},
                                                                  {"dropout=0.1", "score.dropout"},
                                                                  {"ragged_q=2", "cu_seqlens_q"},
                                                                  {"ragged_k=8", "kv"},
                                                                  {"seqlens", "kv"},
                                                                  {"page=4 seqlens", "kv"},
                                                                  {"ring seqlens", "kv"}}) {
    INFO(words);
    const std::string text = "attention gathered sq=2 sk=8 d=8 " + std::string(words);
    CHECK(refused_argument([&] { Plan(AttentionProblem::parse(text)); }) == argument);
  }
}

TEST_CASE("validation: gathered keys without rows to compute", "[unit]") {
  for (const char* words : {"b=0 hq=2 sq=3", "b=2 hq=0 hk=2 sq=3", "b=2 hq=2 sq=0"}) {
    Case c(AttentionProblem::parse("attention gathered sk=5 d=8 lse " + std::string(words)), 1);
    for (std::int64_t i = 0; i < c.indices.size(); ++i) set_index(c.indices, i, 1000);  // nothing is looked at
    CHECK_NOTHROW(attention(c.args()));
  }
}
