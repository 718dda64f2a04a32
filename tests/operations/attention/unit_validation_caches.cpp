// contract.md's "Bad input" for pages, rings and quantised caches.
#include "support/refuses.hpp"

using namespace rapt;
using namespace rapt::testing;

namespace {

const Member kCacheMembers[] = {
    {"q_scale", [](AttentionArgs& a) -> Layout& { return a.q_scale; }},
    {"kv.seqlens", [](AttentionArgs& a) -> Layout& { return a.kv.seqlens; }},
    {"kv.block_table", [](AttentionArgs& a) -> Layout& { return a.kv.block_table; }},
    {"kv.k_scale", [](AttentionArgs& a) -> Layout& { return a.kv.k_scale; }},
    {"kv.v_scale", [](AttentionArgs& a) -> Layout& { return a.kv.v_scale; }},
    {"kv.k_zero", [](AttentionArgs& a) -> Layout& { return a.kv.k_zero; }},
    {"kv.v_zero", [](AttentionArgs& a) -> Layout& { return a.kv.v_zero; }},
};
const char* const kPaged = "sk=12 page=4 seqlens";
const char* const kAllPaged = "sk=12 page=4 seqlens q=f8e4m3 q_scale kv=i8 groups=2 zeros";

}  // namespace

TEST_CASE("validation: tensors of caches", "[unit]") {
  for (const Member& member : kCacheMembers) {
    for (const auto& change : std::initializer_list<std::function<void(Layout&)>>{
             [](Layout& l) { l.shape[0] = -1; }, [](Layout& l) { l.shape[0] = kHuge; }, [](Layout& l) { ++l.shape[0]; },
             [](Layout& l) { l.strides[0] = -1; }, [](Layout& l) { l.ndim = 5; }, [](Layout& l) { --l.ndim; },
             [](Layout& l) {
               for (auto& stride : l.strides) stride = kHuge / 4;
             },
             [](Layout& l) { static_cast<TensorView&>(l).data = nullptr; },
             [](Layout& l) { static_cast<TensorView&>(l).dtype = DType::f16; },
             [](Layout& l) { static_cast<TensorView&>(l).device.index = 1; }}) {
      INFO(member.name);
      // seqlens of one dimension have none to spare: 0 means that they are not given, which pages do not do with.
      refuses(
          member.name, [&](AttentionArgs& a, Case&) { change(member.layout(a)); }, kAllPaged);
    }
  }
  const auto out_on = [](auto member) {
    return [=](AttentionArgs& a, Case&) { a.out.data = const_cast<void*>((a.kv.*member).data); };
  };
  for (auto member :
       {&KvSource::block_table, &KvSource::k_scale, &KvSource::v_scale, &KvSource::k_zero, &KvSource::v_zero})
    refuses("out", out_on(member), kAllPaged);
}

TEST_CASE("validation: pages", "[unit]") {
  refuses(
      "kv.block_table", [](AttentionArgs& a, Case&) { a.kv.block_table = {}; }, kPaged);
  refuses(
      "kv.seqlens", [](AttentionArgs& a, Case&) { a.kv.seqlens = {}; }, kPaged);
  refuses(
      "kv.block_table", [](AttentionArgs& a, Case& c) { a.kv.block_table = c.seqlens.view(); }, kPaged);
  refuses(
      "kv.block_table", [](AttentionArgs& a, Case&) { a.kv.block_table.dtype = DType::f32; }, kPaged);
  refuses(
      "kv.cu_seqlens", [](AttentionArgs& a, Case&) { a.kv.cu_seqlens = a.kv.seqlens; }, kPaged);
  refuses(
      "k", [](AttentionArgs& a, Case&) { a.kv.k.shape[2] = a.kv.v.shape[2] = 0; }, kPaged);
  refuses(
      "v", [](AttentionArgs& a, Case&) { a.kv.v.shape[2] = 3; }, kPaged);
  refuses(
      "v", [](AttentionArgs& a, Case&) { --a.kv.v.shape[0]; }, kPaged);
  refuses("kv.block_table", [](AttentionArgs& a, Case& c) {
    a.kv.block_table = TensorView(c.out.view().data, DType::i32, {2, 3});
  });
  for (const std::int64_t length : {-1, 13}) {
    refuses(
        "kv.seqlens", [=](AttentionArgs&, Case& c) { set_index(c.seqlens, {0}, length); }, kPaged);
  }
}

TEST_CASE("validation: entries of a block table that rows see are pages", "[unit]") {
  Case c(
      AttentionProblem::parse("attention b=2 hq=2 sq=2 sk=40 page=4 seqlens d=8 causal window=5,-1 align=bottom_right"),
      1);
  for (std::int64_t n : {0, 1}) set_index(c.seqlens, {n}, 30);  // rows 28 and 29, which see keys 23 to 29: pages 5 to 7
  const std::int64_t pages = c.k.layout().shape[0];
  for (std::int64_t n : {0, 1}) {
    for (std::int64_t i = 0; i < 10; ++i) set_index(c.block_table, {n, i}, i >= 5 && i < 8 ? pages - 1 : -7);
  }
  CHECK(message_of(c.args()).empty());
  for (std::int64_t n : {0, 1}) {
    for (std::int64_t i : {5, 6, 7}) {
      for (std::int64_t page : {std::int64_t{-1}, pages, std::int64_t{1} << 30}) {
        set_index(c.block_table, {n, i}, page);
        INFO(n << " " << i << " " << page);
        const std::string message = message_of(c.args());
        CHECK(message == "kv.block_table: page " + std::to_string(page) + " at [" + std::to_string(n) + ", " +
                             std::to_string(i) + "]; wanted 0 to " + std::to_string(pages - 1) + ", one of k's pages");
        CHECK(refused_argument([&] { attention(c.args()); }) == "kv.block_table");
        set_index(c.block_table, {n, i}, 0);
      }
    }
  }
  {
    AttentionArgs args = c.args();
    args.kv.k.shape[0] = args.kv.v.shape[0] = 0;
    CHECK(message_of(args).find("; wanted no keys, as k has no pages") != std::string::npos);
  }
  // Every row sees all keys: so do all of their pages count.
  AttentionArgs args = c.args();
  args.score.window.reset();
  CHECK(message_of(args).find("at [0, 0]") != std::string::npos);
  args.score.window = Window{-1, 3};
  args.score.causal = false;
  CHECK(message_of(args).find("at [0, 0]") != std::string::npos);
  // Rows at 5 and 6 with 2 keys on the left and 3 on the right: keys 3 to 9, pages 0 to 2.
  args.score.align = Align::offset(5);
  args.score.window = Window{2, 3};
  for (std::int64_t n : {0, 1}) {
    for (std::int64_t i = 0; i < 10; ++i) set_index(c.block_table, {n, i}, i < 3 ? 1 : -7);
  }
  CHECK(message_of(args).empty());
  args.score.window = Window{2, 5};  // key 11
  CHECK(message_of(args).empty());
  args.score.window = Window{2, 6};  // key 12
  CHECK(message_of(args).find("at [0, 3]") != std::string::npos);
  // No row, no key, or all rows before the first key: nothing is looked at.
  args.score.align = Align::offset(-200);
  CHECK(message_of(args).empty());
  args.score.align = Align::offset(200);
  CHECK(message_of(args).empty());
  for (std::int64_t n : {0, 1}) set_index(c.seqlens, {n}, 0);
  args.score.window.reset();
  CHECK(message_of(args).empty());
}

TEST_CASE("validation: a batch without keys needs no pages", "[unit]") {
  Case c(AttentionProblem::parse("attention b=2 hq=2 sq=2 sk=8 page=4 seqlens d=8"), 1);
  for (std::int64_t n : {0, 1}) set_index(c.seqlens, {n}, 0);
  AttentionArgs args = c.args();
  args.kv.k.shape[0] = args.kv.v.shape[0] = 0;
  args.kv.k.data = args.kv.v.data = nullptr;
  CHECK_NOTHROW(attention(args));
  CHECK(c.out.values() == std::vector<float>(2 * 2 * 2 * 8));
}

TEST_CASE("validation: rings", "[unit]") {
  const std::string ring = "sk=7 ring seqlens";
  refuses(
      "kv.seqlens", [](AttentionArgs& a, Case&) { a.kv.seqlens = {}; }, ring);
  refuses(
      "kv.seqlens", [](AttentionArgs&, Case& c) { set_index(c.seqlens, {1}, -1); }, ring);
  refuses(
      "k", [](AttentionArgs& a, Case&) { a.kv.k.shape[2] = a.kv.v.shape[2] = 0; }, ring);
  refuses(
      "kv.block_table", [](AttentionArgs& a, Case&) { a.kv.block_table = a.q; }, ring);
  refuses(
      "kv.cu_seqlens", [](AttentionArgs& a, Case&) { a.kv.cu_seqlens = a.kv.seqlens; }, ring);
  refuses(
      "score.align", [](AttentionArgs& a, Case&) { a.score.causal = true; }, ring);
  const float numbers[7] = {};
  const bool marks[7] = {};
  refuses(
      "score.bias", [&](AttentionArgs& a, Case&) { a.score.bias = TensorView(numbers, {7}); }, ring);
  refuses(
      "score.mask", [&](AttentionArgs& a, Case&) { a.score.mask = TensorView(marks, {7}); }, ring);
  Case c(AttentionProblem::parse("attention b=2 sq=1 d=8 " + ring), 2);
  c.seqlens = Tensor(DType::i64, Layout(std::array<std::int64_t, 1>{2}));
  c.seqlens.at<std::int64_t>({0}) = std::int64_t{1} << 48;
  c.seqlens.at<std::int64_t>({1}) = 0;
  CHECK(message_of(c.args()).empty());
  c.seqlens.at<std::int64_t>({0}) += 1;
  CHECK(message_of(c.args()).starts_with("kv.seqlens: "));
}

TEST_CASE("validation: a ring has every key that rows see", "[unit]") {
  // b = 2, a ring of 8 rows and 20 keys in the second sequence: keys 12 to 19 are there.
  const auto message = [](const std::string& words, std::int64_t length = 20) {
    Case c(AttentionProblem::parse("attention b=2 d=8 sk=8 ring seqlens " + words), 4);
    set_index(c.seqlens, {0}, 8);
    set_index(c.seqlens, {1}, length);
    return message_of(c.args());
  };
  const auto lacks_key = [](const std::string& text, int key) {
    return text.starts_with("k: a ring of 8 rows, where key " + std::to_string(key) + " of sequence 1") &&
           text.find("overwritten; wanted ") != std::string::npos;
  };
  // The first of 3 rows sits at key 17.
  for (const char* causal : {"causal ", ""}) {
    const std::string chunk = causal + std::string("align=bottom_right sq=3 window=");
    CHECK(message(chunk + "5,-1").empty());
    CHECK(lacks_key(message(chunk + "6,-1"), 11));
    CHECK(message(chunk + "6,-1").find("wanted 9 rows or more") != std::string::npos);
    CHECK(message(chunk + "6,-1", 8).empty());  // all of a sequence is there
    CHECK(lacks_key(message(chunk + "6,-1", 9), 0));
    CHECK(lacks_key(message(chunk + "9223372036854775807,-1"), 0));
    CHECK(message("causal align=bottom_right sq=1 window=7,-1").empty());
    CHECK(lacks_key(message("causal align=bottom_right sq=1 window=8,-1"), 11));
  }
  // Without a window the ring is one; only rows that see to the end have all of theirs.
  CHECK(message("align=bottom_right sq=1 causal").empty());
  CHECK(lacks_key(message("align=bottom_right sq=2 causal"), 11));
  CHECK(message("align=bottom_right sq=2 causal").find("one query row a call") != std::string::npos);
  CHECK(message("align=bottom_right sq=2 causal", 8).empty());
  CHECK(message("align=bottom_right sq=5").empty());
  CHECK(message("align=bottom_right sq=2 window=-1,1").empty());
  CHECK(lacks_key(message("align=bottom_right sq=3 window=-1,1"), 11));
  // By other alignments, and rows that see nothing.
  CHECK(message("align=19 sq=1 causal").empty());
  CHECK(lacks_key(message("align=18 sq=2 causal"), 11));
  CHECK(lacks_key(message("align=top_left sq=1 causal"), 0));
  CHECK(message("align=-5 sq=5 causal window=4,-1").empty());
  CHECK(lacks_key(message("align=-5 sq=6 causal window=4,-1"), 0));
  CHECK(message("align=30 sq=3 causal window=4,-1").empty());
  CHECK(message("align=15 sq=9 causal window=3,-1").empty());
  CHECK(message("align=bottom_right sq=0 causal window=100,-1").empty());
  // Ragged queries: two rows of the second sequence, five of the first.
  const std::int32_t starts[] = {0, 5, 7};
  Case c(AttentionProblem::parse(
             "attention b=2 d=8 sq=5 ragged_q=7 sk=8 ring seqlens causal align=bottom_right window=6,-1"),
         4);
  AttentionArgs args = c.args();
  args.cu_seqlens_q = {starts, {3}};
  set_index(c.seqlens, {0}, 8);
  set_index(c.seqlens, {1}, 20);
  CHECK(message_of(args).empty());
  set_index(c.seqlens, {0}, 20);
  CHECK(message_of(args).starts_with("k: a ring of 8 rows, where key 9 of sequence 0"));
}

TEST_CASE("validation: scales and zeros", "[unit]") {
  const auto without_scales = [](AttentionArgs& a, Case&) { a.kv = a.kv.quantized({}, {}); };
  const auto with_scale = [](AttentionArgs& a, Case& c) {
    c.alibi = Tensor(DType::f32, Layout(std::array<std::int64_t, 4>{1, 2, 1, 1}));
    a.kv.k_scale = c.alibi.view();
  };
  for (const char* type : {"kv=i8 groups=1", "kv=i4x2 groups=1"}) {
    refuses("kv.k_scale", without_scales, type);
    refuses(
        "kv.v_scale", [](AttentionArgs& a, Case&) { a.kv.v_scale = {}; }, type);
  }
  for (const char* type : {"", "dtype=f16", "kv=bf16"}) refuses("kv.k_scale", with_scale, type);
  for (const char* type : {"kv=f8e4m3", "kv=f8e5m2 v_groups=2"}) {
    Case c(AttentionProblem::parse("attention b=2 hq=4 hk=2 sq=6 d=8 dv=4 lse " + std::string(type)));
    AttentionArgs args = c.args();
    with_scale(args, c);
    CHECK(message_of(args).empty());
    args.kv.k_zero = args.kv.k_scale;
    CHECK(message_of(args).empty());
    args.kv.k_scale = {};
    CHECK(message_of(args).starts_with("kv.k_zero: "));
  }
  const char* const i8 = "kv=i8 k_groups=4 v_groups=2 zeros";
  for (std::size_t dim : {0, 1, 2}) {
    refuses(
        "kv.k_scale", [=](AttentionArgs& a, Case&) { a.kv.k_scale.shape[dim] = 3; }, i8);
    refuses(
        "kv.v_zero", [=](AttentionArgs& a, Case&) { a.kv.v_zero.shape[dim] = 3; }, i8);
  }
  // Heads have scales of their own. Columns of a head make equal groups, and a scale and a zero have as many.
  refuses(
      "kv.k_scale", [=](AttentionArgs& a, Case&) { a.kv.k_scale.shape[1] = 1; }, i8);
  for (const std::int64_t groups : {0, 3, 16}) {
    refuses(
        "kv.k_scale", [=](AttentionArgs& a, Case&) { a.kv.k_zero = {}, a.kv.k_scale.shape[3] = groups; }, i8);
  }
  refuses(
      "kv.k_zero", [=](AttentionArgs& a, Case&) { a.kv.k_zero.shape[3] = 2; }, i8);
  refuses(
      "kv.k_scale", [](AttentionArgs& a, Case&) { a.kv.k_scale.ndim = 3; }, i8);
  refuses(
      "kv.k_scale", [](AttentionArgs& a, Case&) { a.kv.k_scale.dtype = DType::i32; }, i8);
}

TEST_CASE("validation: two 4-bit integers to a byte", "[unit]") {
  const char* const i4 = "kv=i4x2 groups=1";
  refuses(
      "k", [](AttentionArgs& a, Case&) { a.kv.k.shape[3] = 8; }, i4);  // as if bytes were elements
  refuses(
      "k", [](AttentionArgs& a, Case&) { a.kv.k.shape[3] = 3; }, i4);
  refuses(
      "out", [](AttentionArgs& a, Case&) { a.kv.v.shape[3] = 1; }, i4);
  refuses(
      "q", [](AttentionArgs& a, Case&) { a.q.shape[3] = 7; }, i4);
  refuses(
      "kv.k_scale", [](AttentionArgs& a, Case&) { a.kv.k_scale.shape[3] = 8; }, i4);  // groups of one element
  CHECK(refused_argument([] { Plan(AttentionProblem::parse("attention kv=i4x2 sq=1 d=7 groups=1")); }) == "kv.k_scale");
}

TEST_CASE("validation: columns of keys that are not quantised", "[unit]") {
  const char* const codes = "kv=i8 groups=1 tail=4 tail_dtype=bf16";
  for (std::size_t dim : {0, 1, 2})
    refuses(
        "kv.k_tail", [=](AttentionArgs& a, Case&) { ++a.kv.k_tail.shape[dim], a.kv.k_tail.strides[dim] = 0; }, codes);
  refuses(
      "kv.k_tail", [](AttentionArgs& a, Case&) { a.kv.k_tail.shape[3] = 0; }, codes);
  refuses(
      "kv.k_tail", [](AttentionArgs& a, Case&) { a.kv.k_tail.shape[3] = 8, a.kv.k_tail.strides[3] = 0; }, codes);
  refuses(
      "kv.k_tail", [](AttentionArgs& a, Case&) { a.kv.k_tail.dtype = DType::i8; }, codes);
  refuses(
      "kv.k_tail", [](AttentionArgs& a, Case&) { a.kv.k_tail.ndim = 3; }, codes);
  refuses(
      "kv.k_tail", [](AttentionArgs& a, Case&) { a.kv.k_tail.data = nullptr; }, codes);
  refuses(
      "kv.k_tail", [](AttentionArgs& a, Case&) { a.kv.k_tail.strides[0] = kHuge; }, codes);
  refuses(
      "kv.k_tail", [](AttentionArgs& a, Case&) { a.kv.k_tail.device.index = 1; }, codes);
  refuses(
      "out", [](AttentionArgs& a, Case&) { a.out.data = const_cast<void*>(a.kv.k_tail.data); }, codes);
  refuses(
      "k", [](AttentionArgs& a, Case&) { a.kv.k_tail = {}; }, codes);  // too few columns then
  refuses(
      "k", [](AttentionArgs& a, Case&) { a.kv.k_tail.shape[3] = 3; }, codes);
  for (const char* type : {"", "dtype=bf16"})  // k has them all
    refuses(
        "kv.k_tail",
        [](AttentionArgs& a, Case&) {
          a.kv.k_tail = a.kv.k;
          a.kv.k_tail.shape[3] = 4, a.kv.k.shape[3] -= 4;
        },
        type);
}

TEST_CASE("validation: types of caches are for keys and values", "[unit]") {
  for (DType dtype : kQuantizedTypes) {
    if (dtype != DType::f8e4m3) refuses("q", [=](AttentionArgs& a, Case&) { a.q.dtype = dtype; });
    refuses("out", [=](AttentionArgs& a, Case&) { a.out.dtype = dtype; });
    refuses("v", [=](AttentionArgs& a, Case&) { a.kv.v.dtype = dtype; });
    refuses("lse", [=](AttentionArgs& a, Case&) { a.lse.dtype = dtype; });
  }
  refuses(
      "v", [](AttentionArgs& a, Case&) { a.kv.v.dtype = DType::f8e5m2; }, "kv=f8e4m3");
}

TEST_CASE("validation: scales of queries", "[unit]") {
  const auto of_rows = [](AttentionArgs& a, Case& c) {
    c.alibi = Tensor(DType::f32, Layout(std::array<std::int64_t, 4>{2, 4, 6, 1}));
    a.q_scale = c.alibi.view();
  };
  for (const char* type : {"", "dtype=bf16", "q=f16 kv=f8e4m3"}) refuses("q_scale", of_rows, type);
  const char* const given = "q=f8e4m3 q_scale";
  Case c(AttentionProblem::parse("attention b=2 hq=4 hk=2 sq=6 d=8 dv=4 lse " + std::string(given)));
  AttentionArgs args = c.args();
  of_rows(args, c);
  CHECK(message_of(args).empty());
  for (std::size_t dim : {0, 2}) {
    args.q_scale.shape[dim] = 1;
    CHECK(message_of(args).empty());
  }
  args.q_scale = {};
  CHECK(message_of(args).empty());
  for (std::size_t dim : {0, 1, 2, 3}) {
    refuses(
        "q_scale", [=](AttentionArgs& a, Case& own) { of_rows(a, own), a.q_scale.shape[dim] = 3; }, given);
    refuses(
        "q_scale", [=](AttentionArgs& a, Case& own) { of_rows(a, own), a.q_scale.shape[dim] = 0; }, given);
  }
  // Heads have scales of their own.
  refuses(
      "q_scale", [=](AttentionArgs& a, Case&) { a.q_scale.shape[1] = 1; }, given);
  refuses(
      "q_scale", [](AttentionArgs& a, Case&) { a.q_scale.dtype = DType::i32; }, given);
  refuses(
      "q_scale", [](AttentionArgs& a, Case&) { a.q_scale.ndim = 3; }, given);
  refuses(
      "q_scale", [](AttentionArgs& a, Case&) { a.q_scale.data = nullptr; }, given);
  refuses(
      "out", [=](AttentionArgs& a, Case& own) { of_rows(a, own), a.q_scale.data = a.out.data; }, given);
  const char* const ragged = "q=f8e4m3 q_scale ragged_q=9";
  for (std::size_t dim : {0, 1, 2})
    refuses(
        "q_scale", [=](AttentionArgs& a, Case&) { a.q_scale.shape[dim] = 5; }, ragged);
  // Not of tensors that gradients are of.
  CHECK(refused_argument([] { Plan(AttentionBackwardProblem::parse("attention_backward q=f8e4m3 sq=1 d=8")); }) == "q");
}

TEST_CASE("validation: problems say what their tensors would be refused for", "[unit]") {
  const char* const wrong[][2] = {
      {"q=i8", "q"},
      {"out=f8e4m3", "out"},
      {"dtype=f8e4m3", "out"},
      {"q=f8e5m2", "q"},
      {"q_scale", "q_scale"},
      {"dtype=bf16 q_scale", "q_scale"},
      {"head_scales", "kv.k_scale"},
      {"kv=f8e4m3 head_scales", "kv.k_scale"},
      {"kv=bool", "k"},
      {"kv=i8", "kv.k_scale"},
      {"kv=i8 k_groups=1", "kv.v_scale"},
      {"kv=i8 groups=3", "kv.k_scale"},
      {"kv=i8 groups=-1", "kv.k_scale"},
      {"kv=i8 k_groups=8 v_groups=3", "kv.v_scale"},
      {"kv=i4x2 groups=8", "kv.k_scale"},
      {"groups=1", "kv.k_scale"},
      {"tail=2", "kv.k_tail"},
      {"kv=f8e4m3 tail=-1", "kv.k_tail"},
      {"kv=f8e4m3 tail=8", "kv.k_tail"},
      {"kv=f8e4m3 tail=2 tail_dtype=i8", "kv.k_tail"},
      {"kv=f8e4m3 tail=2 groups=8", "kv.k_scale"},
      {"kv=f8e4m3 tail=2 latent dv=7", "v"},
      {"kv=f8e4m3 zeros", "kv.k_zero"},
      {"page=4", "kv.seqlens"},
      {"page=3 seqlens", "k"},
      {"page=-4 seqlens", "k"},
      {"page=4 ragged_k=8", "kv"},
      {"page=4 ring seqlens", "kv"},
      {"ring", "kv.seqlens"},
      {"ring seqlens bias=k", "score.bias"},
      {"ring seqlens mask=k", "score.mask"},
      {"ring seqlens sk=0", "k"},
  };
  for (const auto& [words, argument] : wrong) {
    const std::string sk = std::string(words).find("sk=") == std::string::npos ? " sk=8 " : " ";
    INFO(words);
    CHECK(refused_argument([&, words = words] { Plan(AttentionProblem::parse("attention sq=2 d=8" + sk + words)); }) ==
          argument);
  }
  // No text says less than no rows.
  for (const auto& [member, argument] :
       {std::pair{&AttentionProblem::ragged_q, "q"}, {&AttentionProblem::ragged_k, "k"}}) {
    AttentionProblem p = AttentionProblem::parse("attention sq=2 sk=8 d=8");
    p.*member = -2;
    CHECK(refused_argument([&] { Plan plan(p); }) == argument);
  }
}
