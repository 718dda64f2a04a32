// contract.md's "Bad input": the argument is named and no output is touched.
#include <cmath>

#include "support/refuses.hpp"

using namespace rapt;
using namespace rapt::testing;

namespace {

const Member kMembers[] = {
    {"q", [](AttentionArgs& a) -> Layout& { return a.q; }},
    {"k", [](AttentionArgs& a) -> Layout& { return a.kv.k; }},
    {"v", [](AttentionArgs& a) -> Layout& { return a.kv.v; }},
    {"out", [](AttentionArgs& a) -> Layout& { return a.out; }},
    {"lse", [](AttentionArgs& a) -> Layout& { return a.lse; }},
    {"kv.seqlens", [](AttentionArgs& a) -> Layout& { return a.kv.seqlens; }},
    {"score.bias", [](AttentionArgs& a) -> Layout& { return a.score.bias; }},
    {"score.mask", [](AttentionArgs& a) -> Layout& { return a.score.mask; }},
    {"score.alibi", [](AttentionArgs& a) -> Layout& { return a.score.alibi; }},
    {"score.sinks", [](AttentionArgs& a) -> Layout& { return a.score.sinks; }},
};
const char* const kAllMembers = "align=top_left seqlens bias=bhqk mask=bhqk alibi sinks";

/// Of an input: those are TensorViews.
std::byte* data_of(Layout& layout) {
  return static_cast<std::byte*>(const_cast<void*>(static_cast<TensorView&>(layout).data));
}

}  // namespace

TEST_CASE("validation: sizes and strides of every tensor", "[unit]") {
  for (const Member& member : kMembers) {
    refuses(
        member.name, [&](AttentionArgs& a, Case&) { member.layout(a).shape[0] = -1; }, kAllMembers);
    refuses(
        member.name, [&](AttentionArgs& a, Case&) { member.layout(a).strides[0] = -1; }, kAllMembers);
    refuses(
        member.name, [&](AttentionArgs& a, Case&) { member.layout(a).strides[0] = kHuge; }, kAllMembers);
    refuses(
        member.name, [&](AttentionArgs& a, Case&) { member.layout(a).strides[0] = kHuge / 4; }, kAllMembers);
    refuses(
        member.name, [&](AttentionArgs& a, Case&) { member.layout(a).shape[0] = kHuge; }, kAllMembers);
    refuses(
        member.name, [&](AttentionArgs& a, Case&) { member.layout(a).ndim = 5; }, kAllMembers);
    refuses(
        member.name, [&](AttentionArgs& a, Case&) { member.layout(a).ndim = -1; }, kAllMembers);
    refuses(
        member.name,
        [&](AttentionArgs& a, Case&) {
          Layout& l = member.layout(a);
          for (int i = 0; i < l.ndim; ++i) l.strides[static_cast<std::size_t>(i)] = kHuge / 16;
        },
        kAllMembers);
  }
}

TEST_CASE("validation: null and misaligned data", "[unit]") {
  const auto each = [](auto change) {
    refuses("q", [&](AttentionArgs& a, Case&) { change(a.q.data); });
    refuses("k", [&](AttentionArgs& a, Case&) { change(a.kv.k.data); });
    refuses("v", [&](AttentionArgs& a, Case&) { change(a.kv.v.data); });
    refuses("out", [&](AttentionArgs& a, Case&) { change(a.out.data); });
    refuses("lse", [&](AttentionArgs& a, Case&) { change(a.lse.data); });
    refuses(
        "kv.seqlens", [&](AttentionArgs& a, Case&) { change(a.kv.seqlens.data); }, "seqlens");
    refuses(
        "score.bias", [&](AttentionArgs& a, Case&) { change(a.score.bias.data); }, "bias=qk");
    refuses(
        "score.alibi", [&](AttentionArgs& a, Case&) { change(a.score.alibi.data); }, "alibi align=top_left");
    refuses(
        "score.sinks", [&](AttentionArgs& a, Case&) { change(a.score.sinks.data); }, "sinks");
  };
  each([](auto& data) { data = nullptr; });
  each([](auto& data) {
    data = reinterpret_cast<std::remove_reference_t<decltype(data)>>(reinterpret_cast<std::uintptr_t>(data) + 1);
  });
  refuses(
      "score.mask", [](AttentionArgs& a, Case&) { a.score.mask.data = nullptr; }, "mask=qk");
}

TEST_CASE("validation: dtypes", "[unit]") {
  for (DType dtype : {DType::boolean, DType::i32, DType::i64}) {
    refuses("q", [&](AttentionArgs& a, Case&) { a.q.dtype = dtype; });
    refuses("k", [&](AttentionArgs& a, Case&) { a.kv.k.dtype = dtype; });
    refuses("out", [&](AttentionArgs& a, Case&) { a.out.dtype = dtype; });
  }
  // q, out, bias, slopes and sinks may be any floating-point type, k and v too if they agree; lse stays f32.
  for (DType dtype : {DType::f16, DType::bf16, DType::boolean, DType::i32, DType::i64}) {
    refuses("v", [&](AttentionArgs& a, Case&) { a.kv.v.dtype = dtype; });
    refuses("lse", [&](AttentionArgs& a, Case&) { a.lse.dtype = dtype; });
  }
  for (DType dtype : {DType::i8, DType::boolean, DType::i32, DType::i64}) {
    refuses(
        "score.bias", [&](AttentionArgs& a, Case&) { a.score.bias.dtype = dtype; }, "bias=qk");
    refuses(
        "score.alibi", [&](AttentionArgs& a, Case&) { a.score.alibi.dtype = dtype; }, "alibi align=0");
    refuses(
        "score.sinks", [&](AttentionArgs& a, Case&) { a.score.sinks.dtype = dtype; }, "sinks");
  }
  for (DType dtype : {DType::f16, DType::bf16}) {
    refuses("v", [&](AttentionArgs& a, Case&) { a.kv.k.dtype = dtype; });
    refuses(
        "v", [&](AttentionArgs& a, Case&) { a.kv.v.dtype = DType::f32; }, "kv=" + std::string(to_string(dtype)));
  }
  refuses(
      "v", [](AttentionArgs& a, Case&) { a.kv.v.dtype = DType::f16; }, "dtype=bf16");
  refuses(
      "score.mask", [](AttentionArgs& a, Case&) { a.score.mask.dtype = DType::f32; }, "mask=qk");
  refuses(
      "kv.seqlens", [](AttentionArgs& a, Case&) { a.kv.seqlens.dtype = DType::f32; }, "seqlens");
  refuses("q", [](AttentionArgs& a, Case&) { a.q.dtype = static_cast<DType>(99); });
}

TEST_CASE("validation: 16-bit tensors lie at any even address and nowhere else", "[unit]") {
  for (DType dtype : {DType::f16, DType::bf16}) {
    const std::string words = "dtype=" + std::string(to_string(dtype));
    refuses(
        "q", [](AttentionArgs& a, Case& c) { a.q.data = c.q.buffer().data() + 1; }, words);
    refuses(
        "out", [](AttentionArgs& a, Case& c) { a.out.data = c.out.buffer().data() + 1; }, words);
    Case c(typed("attention sq=3 sk=5 d=4 lse", dtype)), aligned(c.problem);
    std::vector<Tensor> moved;
    AttentionArgs args = c.args();
    for (auto* data : {&args.q.data, &args.kv.k.data, &args.kv.v.data}) {
      Tensor copy(dtype, Layout({{std::int64_t{21}}}));
      for (std::int64_t i = 0; i < 20; ++i) {
        const Tensor& from = data == &args.q.data ? c.q : data == &args.kv.k.data ? c.k : c.v;
        if (i < from.size()) copy.flat(i + 1) = from.flat(i);
      }
      *data = copy.buffer().data() + 2;
      moved.push_back(std::move(copy));
    }
    attention(args);
    attention(aligned.args());
    CHECK(same_bits(c.out, aligned.out));
  }
}

TEST_CASE("validation: missing tensors and wrong ranks", "[unit]") {
  refuses("q", [](AttentionArgs& a, Case&) { a.q = {}; });
  refuses("k", [](AttentionArgs& a, Case&) { a.kv.k = {}; });
  refuses("v", [](AttentionArgs& a, Case&) { a.kv.v = {}; });
  refuses("out", [](AttentionArgs& a, Case&) { a.out = {}; });
  refuses("q", [](AttentionArgs& a, Case&) { a.q.ndim = 3; });
  refuses("lse", [](AttentionArgs& a, Case&) { a.lse.ndim = 2; });
  refuses(
      "score.sinks", [](AttentionArgs& a, Case&) { a.score.sinks = a.q; }, "sinks");
  refuses(
      "score.alibi", [](AttentionArgs& a, Case&) { a.score.alibi = a.q; }, "alibi align=0");
}

TEST_CASE("validation: shapes that do not fit together", "[unit]") {
  refuses("k", [](AttentionArgs& a, Case&) { a.kv.k.shape[0] = a.kv.v.shape[0] = 1; });
  refuses("v", [](AttentionArgs& a, Case&) { a.kv.v.shape[0] = 1; });
  refuses("k", [](AttentionArgs& a, Case&) { a.kv.k.shape[3] = 7; });
  refuses("v", [](AttentionArgs& a, Case&) { a.kv.v.shape[2] = 9; });  // k and v lengths differ
  refuses("v", [](AttentionArgs& a, Case&) { a.kv.v.shape[1] = 1; });
  refuses("out", [](AttentionArgs& a, Case&) { a.out.shape[0] = 1; });
  refuses("out", [](AttentionArgs& a, Case&) { a.out.shape[1] = 2; });
  refuses("out", [](AttentionArgs& a, Case&) { a.out.shape[2] = 5; });
  refuses("out", [](AttentionArgs& a, Case&) { a.out.shape[3] = 3; });
  for (std::size_t dim : {0, 1, 2}) refuses("lse", [=](AttentionArgs& a, Case&) { --a.lse.shape[dim]; });
  refuses(
      "score.sinks", [](AttentionArgs& a, Case&) { a.score.sinks.shape[0] = 2; }, "sinks");
  refuses(
      "score.alibi", [](AttentionArgs& a, Case&) { --a.score.alibi.shape[0]; }, "alibi align=0");
  for (std::size_t dim : {0, 1, 2, 3}) {
    refuses(
        "score.bias", [=](AttentionArgs& a, Case&) { ++a.score.bias.shape[dim]; }, "bias=bhqk");
    refuses(
        "score.mask", [=](AttentionArgs& a, Case&) { ++a.score.mask.shape[dim]; }, "mask=bhqk bias=qk");
  }
}

TEST_CASE("validation: head counts and head dimensions", "[unit]") {
  refuses("k", [](AttentionArgs& a, Case&) {  // 3 query heads, 2 key heads
    a.q.shape[1] = a.out.shape[1] = a.lse.shape[1] = 3;
  });
  refuses("k", [](AttentionArgs& a, Case&) { a.kv.k.shape[1] = a.kv.v.shape[1] = 0; });
  refuses("q", [](AttentionArgs& a, Case&) { a.q.shape[3] = a.kv.k.shape[3] = 0; });
  refuses("v", [](AttentionArgs& a, Case&) { a.kv.v.shape[3] = a.out.shape[3] = 0; });
}

TEST_CASE("validation: score parameters", "[unit]") {
  const float nan = std::nanf(""), infinity = std::numeric_limits<float>::infinity();
  for (float value : {nan, infinity, -infinity}) {
    refuses("score.scale", [=](AttentionArgs& a, Case&) { a.score.scale = value; });
    refuses("score.softcap", [=](AttentionArgs& a, Case&) { a.score.softcap = value; });
  }
  for (float value : {nan, infinity, -infinity, -0.01f, 1.01f, 1e30f})
    refuses("score.dropout", [=](AttentionArgs& a, Case&) { a.score.dropout = Dropout{value, 1, 2}; });
  for (float value : {0.f, -1.f}) refuses("score.softcap", [=](AttentionArgs& a, Case&) { a.score.softcap = value; });
  refuses(
      "score.window",
      [](AttentionArgs& a, Case&) {
        a.score.window = Window{-2, 0};
      },
      "align=0");
  refuses(
      "score.window",
      [](AttentionArgs& a, Case&) {
        a.score.window = Window{0, -kHuge};
      },
      "align=0");
  for (std::int64_t offset : {kHuge, -kHuge, -kHuge - 1}) {
    refuses("score.align", [=](AttentionArgs& a, Case&) { a.score.align = Align::offset(offset); });
  }
}

TEST_CASE("validation: errors name what has to change, where it is, and limits as they are", "[unit]") {
  const auto message = [](const std::function<void(AttentionArgs&)>& spoil, const std::string& words = "") {
    Case c(AttentionProblem::parse("attention b=3 hq=4 hk=2 sq=6 sk=8 d=8 dv=4 lse " + words), 4);
    AttentionArgs args = c.args();
    spoil(args);
    return message_of(args);
  };
  const std::int64_t long_one[] = {8, 8, 9}, falling[] = {0, 5, 4, 24}, lengths[] = {6, 6, 5};
  CHECK(message([](auto& a) { a.kv.k.shape[0] = 2; }) == "k: shape [2, 2, 8, 8]; wanted q's batch b = 3");
  CHECK(message([](auto& a) { a.kv.k.shape[0] = 2; }, "ragged_q=9") ==
        "k: shape [2, 2, 8, 8]; wanted cu_seqlens_q's batch b = 3");
  CHECK(message([](auto& a) { a.kv.k.shape[0] = 2; }, "kv=i8 groups=1").starts_with("k: "));
  CHECK(message([](auto& a) { a.kv.k.shape[1] = 3; }) == "k: 3 heads for 4 query heads; wanted a divisor of them");
  CHECK(message([](auto& a) {
          a.lse = {static_cast<float*>(a.lse.data), {3, 4, 7}};
        }) == "lse: shape [3, 4, 7]; wanted q's rows sq = 6");
  CHECK(message([](auto& a) { a.lse.data = a.out.data; }) ==
        "lse: memory shared with out; wanted outputs that overlap nothing");
  CHECK(message([&](auto& a) {
          a.kv.seqlens = {long_one, {3}};
        }) == "kv.seqlens: length 9 of sequence 2; wanted 0 to sk = 8");
  CHECK(message([&](auto& a) {
          a.kv.seqlens = {lengths, {3}}, a.score.causal = true;
        }).starts_with("score.align: none, with 6 queries and 5 keys in sequence 2; wanted "));
  CHECK(message(
            [&](auto& a) {
              a.cu_seqlens_q = {falling, {4}};
            },
            "ragged_q=9") == "cu_seqlens_q: the decreasing 5, 4 of sequence 1; wanted starts that never decrease");
  for (const auto& [softcap, text] :
       {std::pair{1e-31f, "1e-31"}, {-0.25f, "-0.25"}, {0.f, "0"}, {std::numeric_limits<float>::infinity(), "inf"}})
    CHECK(message([value = softcap](auto& a) { a.score.softcap = value; }) ==
          std::string("score.softcap: ") + text + "; wanted a number from 1e-30 to 1e30");
}

TEST_CASE("validation: positions need an align where lengths differ", "[unit]") {
  refuses("score.align", [](AttentionArgs& a, Case&) { a.score.causal = true; });
  refuses("score.align", [](AttentionArgs& a, Case&) { a.score.window = Window{3, -1}; });
  refuses(
      "score.align", [](AttentionArgs& a, Case&) { a.score.align.reset(); }, "alibi align=0");
  refuses(
      "score.align", [](AttentionArgs& a, Case&) { a.score.align.reset(); }, "causal align=0 seqlens");
  refuses(
      "score.align", [](AttentionArgs& a, Case&) { a.score.causal = true; }, "ragged_q=7 ragged_k=11");
  // Only the longest sequences agree here.
  refuses(
      "score.align", [](AttentionArgs& a, Case&) { a.score.causal = true; }, "sk=6 ragged_q=7 ragged_k=8");
}

TEST_CASE("validation: starts and lengths", "[unit]") {
  const std::int64_t not_zero[] = {1, 3, 7}, falling[] = {0, 8, 7}, short_end[] = {0, 3, 6}, long_end[] = {0, 3, 8},
                     negative[] = {0, -3, 7}, three[] = {0, 3, 3, 7};
  const auto list = [](const auto& values) {
    return TensorView(values, {static_cast<std::int64_t>(std::size(values))});
  };
  for (const auto* values : {&not_zero, &falling, &short_end, &long_end, &negative}) {
    refuses(
        "cu_seqlens_q", [&](AttentionArgs& a, Case&) { a.cu_seqlens_q = list(*values); }, "ragged_q=7");
    refuses(
        "kv.cu_seqlens", [&](AttentionArgs& a, Case&) { a.kv.cu_seqlens = list(*values); }, "sk=5 ragged_k=7");
  }
  refuses(
      "k", [&](AttentionArgs& a, Case&) { a.cu_seqlens_q = list(three); }, "ragged_q=7");  // b = 3, k has 2
  refuses(
      "kv.cu_seqlens", [&](AttentionArgs& a, Case&) { a.kv.cu_seqlens = list(three); }, "sk=5 ragged_k=7");
  refuses(
      "kv.cu_seqlens", [&](AttentionArgs& a, Case&) { a.kv.cu_seqlens = {}; }, "ragged_k=11");
  refuses(
      "cu_seqlens_q", [&](AttentionArgs& a, Case&) { a.cu_seqlens_q.shape[0] = 0; }, "ragged_q=7");
  refuses(
      "cu_seqlens_q", [&](AttentionArgs& a, Case&) { a.cu_seqlens_q.dtype = DType::f32; }, "ragged_q=7");
  const std::int64_t too_long[] = {3, 11}, below_zero[] = {-1, 3}, one[] = {3};
  for (const auto* values : {&too_long, &below_zero}) {
    refuses("kv.seqlens", [&](AttentionArgs& a, Case&) { a.kv.seqlens = list(*values); });
  }
  refuses("kv.seqlens", [&](AttentionArgs& a, Case&) { a.kv.seqlens = list(one); });
  refuses(
      "kv.seqlens", [&](AttentionArgs& a, Case&) { a.kv.seqlens = list(too_long); }, "ragged_k=11");
}

TEST_CASE("validation: devices", "[unit]") {
  refuses("k", [](AttentionArgs& a, Case&) { a.kv.k.device = {DeviceType::cuda, 0}; });
  refuses("out", [](AttentionArgs& a, Case&) { a.out.device = {DeviceType::cuda, 1}; });
  refuses(
      "score.bias", [](AttentionArgs& a, Case&) { a.score.bias.device.index = 1; }, "bias=qk");
}

TEST_CASE("validation: outputs overlap nothing", "[unit]") {
  // The first or the last element of an output on each input in turn.
  for (bool last : {false, true}) {
    for (const Member& member : kMembers) {
      const std::string name = member.name;
      if (name == "out" || name == "lse") continue;
      const std::size_t out_bytes = 2 * 4 * 6 * 4 * sizeof(float), lse_bytes = out_bytes / 4;
      refuses(
          "out",
          [&](AttentionArgs& a, Case&) {
            a.out.data = data_of(member.layout(a)) - (last ? out_bytes - sizeof(float) : 0);
          },
          kAllMembers);
      refuses(
          "lse",
          [&](AttentionArgs& a, Case&) {
            a.lse.data = data_of(member.layout(a)) - (last ? lse_bytes - sizeof(float) : 0);
          },
          kAllMembers);
    }
  }
  refuses("lse", [](AttentionArgs& a, Case&) { a.out.data = a.lse.data; });
  refuses(
      "out", [](AttentionArgs& a, Case& c) { a.out.data = c.cu_seqlens_q.buffer().data(); }, "ragged_q=7");
}

TEST_CASE("validation: outputs do not overlap themselves", "[unit]") {
  for (std::size_t dim : {0, 1, 2, 3}) refuses("out", [=](AttentionArgs& a, Case&) { a.out.strides[dim] = 0; });
  for (std::size_t dim : {0, 1, 2}) refuses("lse", [=](AttentionArgs& a, Case&) { a.lse.strides[dim] = 0; });
  refuses("out", [](AttentionArgs& a, Case&) { a.out.strides[2] = 3; });  // rows of 4 every 3 elements
  refuses("lse", [](AttentionArgs& a, Case&) { a.lse.strides[1] = 5; });
}

TEST_CASE("validation: views side by side in one buffer are no overlap", "[unit]") {
  // q and out are column ranges of one [b, s, h, q|out] matrix.
  Case c(AttentionProblem::parse("attention b=2 hq=4 hk=2 sq=6 sk=10 d=8 dv=4"));
  std::vector<float> both(2 * 6 * 4 * 12, 0.5f);
  AttentionArgs args = c.args();
  args.q = TensorView(both.data(), {2, 4, 6, 8}, {288, 12, 48, 1});
  args.out = MutableTensorView(both.data() + 8, {2, 4, 6, 4}, {288, 12, 48, 1});
  CHECK_NOTHROW(attention(args));
  for (std::size_t i = 0; i < both.size(); ++i) {
    if (i % 12 < 8) REQUIRE(both[i] == 0.5f);
  }
  args.out.data = both.data() + 7;
  CHECK(refused_argument([&] { attention(args); }) == "out");
}

TEST_CASE("validation: out and lse side by side in one buffer are no overlap", "[unit]") {
  // lse is the last column of a [b, h, s, out|lse] matrix, whose rank it lacks.
  Case c(AttentionProblem::parse("attention b=2 hq=4 hk=2 sq=6 sk=10 d=8 dv=4 lse"));
  std::vector<float> both(2 * 4 * 6 * 5);
  AttentionArgs args = c.args();
  const Reference reference = oracle(args);
  args.out = MutableTensorView(both.data(), {2, 4, 6, 4}, {120, 30, 5, 1});
  args.lse = MutableTensorView(both.data() + 4, {2, 4, 6}, {120, 30, 5});
  CHECK_NOTHROW(attention(args));
  CHECK(compare(args, reference).ok());
  args.lse.data = both.data() + 3;
  CHECK(refused_argument([&] { attention(args); }) == "lse");
}

TEST_CASE("validation: outputs of 16 bits overlap nothing by the bytes they span", "[unit]") {
  // Just behind q, and two bytes before that.
  Case c(AttentionProblem::parse("attention b=1 hq=1 sq=4 d=8 dtype=bf16"));
  std::vector<std::uint16_t> both(4 * 8 * 2);
  AttentionArgs args = c.args();
  args.q.data = both.data();
  args.out.data = both.data() + 32;
  CHECK_NOTHROW(attention(args));
  args.out.data = both.data() + 31;
  CHECK(refused_argument([&] { attention(args); }) == "out");
}

// With -fsanitize=undefined these overflow int64 unless sizes and strides are looked at first.
TEST_CASE("validation: extreme sizes and strides that nothing steps by", "[unit]") {
  constexpr std::int64_t kMaxDimension = std::int64_t{1} << 48;
  // No elements, and sizes whose product int64 cannot hold.
  const TensorView none(nullptr, DType::f32, {std::int64_t{0}, kMaxDimension, kMaxDimension, std::int64_t{8}},
                        {std::int64_t{0}, kMaxDimension * 8, std::int64_t{8}, std::int64_t{1}});
  AttentionArgs empty;
  empty.q = none, empty.kv = KvSource::strided(none, none);
  empty.out = {nullptr, DType::f32, none};
  CHECK(refused_argument([&] { AttentionProblem::of(empty); }) == "q");  // too many rows for sizes of 0 to hide
  // No heads, so that nothing says how many rows an S x S matrix would have.
  const AttentionProblem headless = AttentionProblem::parse("attention hq=0 sq=281474976710656 d=8");
  for (const std::string& entry : every_entry(headless)) CHECK(Plan(headless, forced(entry)).work_items() == 0);
  // Strides of dimensions of one element may be anything, in every kernel and every tensor.
  for (const char* words :
       {"sk=1 hq=6 hk=2 sq=3", "sk=1 hq=3 sq=1", "sk=1 page=1 seqlens hq=6 hk=2 sq=2",
        "sk=1 ring seqlens hq=4 hk=2 sq=1", "sk=9 hq=1 sq=1 dv=1", "sk=1 kv=i8 groups=1 hq=3 sq=2 tail=1",
        "q=f8e4m3 q_scale sk=9 hq=1 sq=5", "q=f8e4m3 q_scale sk=9 hq=2 sq=1"}) {
    Case c(AttentionProblem::parse("attention b=2 d=16 lse " + std::string(words)), 4);
    for (const std::string& entry : every_entry(c.problem)) {
      INFO(entry << ": " << words);
      const auto bits = [&](std::int64_t stride) {
        AttentionArgs args = c.args();
        const auto spoil = [&](auto& view) {
          for (std::size_t i = 0; i < static_cast<std::size_t>(view.ndim); ++i)
            if (view.shape[i] == 1 && stride != 0) view.strides[i] = stride;
        };
        spoil(args.q), spoil(args.q_scale), spoil(args.kv.k), spoil(args.kv.v), spoil(args.out), spoil(args.lse);
        spoil(args.kv.k_scale), spoil(args.kv.v_scale), spoil(args.kv.k_tail), spoil(args.kv.seqlens),
            spoil(args.kv.block_table);
        c.poison_outputs();
        attention(args, forced(entry));
        return std::pair(c.out.values(), c.lse.values());
      };
      const auto expected = bits(0);
      CHECK(bits(kHuge) == expected);
      CHECK(bits(kHuge / 4) == expected);
    }
  }
}

TEST_CASE("validation: null data is fine where there are no elements", "[unit]") {
  Case c(AttentionProblem::parse("attention b=2 hq=4 hk=2 sq=6 sk=0 d=8 dv=4"));
  AttentionArgs args = c.args();
  args.kv.k.data = args.kv.v.data = nullptr;
  CHECK_NOTHROW(attention(args));
  CHECK(c.out.values() == std::vector<float>(2 * 4 * 6 * 4));
}

TEST_CASE("validation: inputs may repeat, share memory and have any strides", "[unit]") {
  Case c(AttentionProblem::parse("attention b=2 hq=4 hk=2 sq=6 sk=10 d=8 lse"));
  AttentionArgs args = c.args();
  args.kv.v = args.kv.k;
  args.q.strides = {0, 0, 8, 1};
  args.kv.k.strides[0] = 0;
  const Reference reference = oracle(args);
  attention(args);
  CHECK(compare(args, reference).ok());
}

TEST_CASE("validation: the workspace shares memory with no tensor", "[unit]") {
  Case c(AttentionProblem::parse("attention sq=40 sk=40 d=32 lse dtype=bf16"));
  AttentionArgs args = c.args();
  const Plan plan(args);
  std::vector<std::byte> memory(plan.workspace_bytes() + 64);
  auto* const begin = memory.data() + (64 - reinterpret_cast<std::uintptr_t>(memory.data()) % 64) % 64;
  const std::span<std::byte> workspace(begin, plan.workspace_bytes());
  CHECK_NOTHROW(plan.run(args, workspace));
  for (std::size_t at : {std::size_t{0}, workspace.size() - 2}) {
    AttentionArgs inside = args;
    inside.out.data = begin + at;
    CHECK(refused_argument([&] { plan.run(inside, workspace); }) == "workspace");
    inside = args;
    inside.q.data = begin + at;
    CHECK(refused_argument([&] { plan.run(inside, workspace); }) == "workspace");
  }
}
