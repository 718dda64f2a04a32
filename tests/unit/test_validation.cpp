// contract.md's "Bad input": the argument is named and no output is touched.
#include <cmath>
#include <functional>
#include <limits>

#include "support/catch.hpp"
#include "support/entries.hpp"

using namespace rapt;
using namespace rapt::testing;

namespace {

constexpr std::int64_t kHuge = std::numeric_limits<std::int64_t>::max();

/// Spoils the arguments of a valid case and expects the refusal to name `argument`, from every door into the library.
void refuses(const std::string& argument, const std::function<void(AttentionArgs&, Case&)>& spoil,
             const Problem& problem) {
  // With pages of its own for every tensor, so that moving an output a little cannot make it meet a neighbour.
  Case c(problem, 1, Placement::front);
  const Tensor untouched_out(c.out.dtype(), c.out.layout()), untouched_lse(DType::f32, c.lse.layout());
  const Plan plan(c.args(), Context());
  AttentionArgs args = c.args();
  INFO(argument << ": " << problem.to_string());
  REQUIRE_NOTHROW(Problem::of(args));
  spoil(args, c);
  CHECK(refused_argument([&] { attention(args); }) == argument);
  CHECK(refused_argument([&] { Problem::of(args); }) == argument);
  CHECK(refused_argument([&] { Plan{args}; }) == argument);
  CHECK(refused_argument([&] { plan.run(args); }) == argument);
  CHECK(same_bits(c.out, untouched_out));
  CHECK(same_bits(c.lse, untouched_lse));
}

void refuses(const std::string& argument, const std::function<void(AttentionArgs&, Case&)>& spoil,
             const std::string& words = "") {
  const std::string sk = words.starts_with("sk=") ? "" : "sk=10 ";
  refuses(argument, spoil, Problem::parse("attention b=2 hq=4 hk=2 sq=6 d=8 dv=4 lse " + sk + words));
}

/// The named members of AttentionArgs as read-only views, for spoiling one after another.
struct Member {
  const char* name;
  std::function<Layout&(AttentionArgs&)> layout;
};

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

const Member kCacheMembers[] = {
    {"kv.seqlens", [](AttentionArgs& a) -> Layout& { return a.kv.seqlens; }},
    {"kv.block_table", [](AttentionArgs& a) -> Layout& { return a.kv.block_table; }},
    {"kv.k_scale", [](AttentionArgs& a) -> Layout& { return a.kv.k_scale; }},
    {"kv.v_scale", [](AttentionArgs& a) -> Layout& { return a.kv.v_scale; }},
    {"kv.k_zero", [](AttentionArgs& a) -> Layout& { return a.kv.k_zero; }},
    {"kv.v_zero", [](AttentionArgs& a) -> Layout& { return a.kv.v_zero; }},
};
const char* const kPaged = "sk=12 page=4 seqlens";
const char* const kAllPaged = "sk=12 page=4 seqlens kv=i8 groups=2 zeros";

void set_index(Tensor& t, std::initializer_list<std::int64_t> index, std::int64_t value) {
  if (t.dtype() == DType::i64) t.at<std::int64_t>(index) = value;
  else t.at<std::int32_t>(index) = static_cast<std::int32_t>(value);
}

/// What the Error of a call says, "" without one.
std::string message_of(const AttentionArgs& args) {
  try {
    Problem::of(args);
  } catch (const Error& error) {
    return error.what();
  }
  return {};
}

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
  // q and out may be any floating-point type, k and v too if they agree; everything else stays f32.
  for (DType dtype : {DType::f16, DType::bf16, DType::boolean, DType::i32, DType::i64}) {
    refuses("v", [&](AttentionArgs& a, Case&) { a.kv.v.dtype = dtype; });
    refuses("lse", [&](AttentionArgs& a, Case&) { a.lse.dtype = dtype; });
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
  refuses(
      "score.mask", [](AttentionArgs& a, Case&) { a.score.mask.shape[3] = 1; }, "mask=bhqk");  // keys are full
}

TEST_CASE("validation: head counts and head sizes", "[unit]") {
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
  refuses("out", [](AttentionArgs& a, Case&) { a.out.data = a.lse.data; });
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
  Case c(Problem::parse("attention b=2 hq=4 hk=2 sq=6 sk=10 d=8 dv=4"));
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
  Case c(Problem::parse("attention b=2 hq=4 hk=2 sq=6 sk=10 d=8 dv=4 lse"));
  std::vector<float> both(2 * 4 * 6 * 5);
  AttentionArgs args = c.args();
  const Reference reference = oracle(args);
  args.out = MutableTensorView(both.data(), {2, 4, 6, 4}, {120, 30, 5, 1});
  args.lse = MutableTensorView(both.data() + 4, {2, 4, 6}, {120, 30, 5});
  CHECK_NOTHROW(attention(args));
  CHECK(compare(args, reference).ok());
  args.lse.data = both.data() + 3;
  CHECK(refused_argument([&] { attention(args); }) == "out");
}

TEST_CASE("validation: outputs of 16 bits overlap nothing by the bytes they span", "[unit]") {
  // Just behind q, and two bytes before that.
  Case c(Problem::parse("attention b=1 hq=1 sq=4 d=8 dtype=bf16"));
  std::vector<std::uint16_t> both(4 * 8 * 2);
  AttentionArgs args = c.args();
  args.q.data = both.data();
  args.out.data = both.data() + 32;
  CHECK_NOTHROW(attention(args));
  args.out.data = both.data() + 31;
  CHECK(refused_argument([&] { attention(args); }) == "out");
}

TEST_CASE("validation: null data is fine where there are no elements", "[unit]") {
  Case c(Problem::parse("attention b=2 hq=4 hk=2 sq=6 sk=0 d=8 dv=4"));
  AttentionArgs args = c.args();
  args.kv.k.data = args.kv.v.data = nullptr;
  CHECK_NOTHROW(attention(args));
  CHECK(c.out.values() == std::vector<float>(2 * 4 * 6 * 4));
}

TEST_CASE("validation: inputs may repeat, share memory and have any strides", "[unit]") {
  Case c(Problem::parse("attention b=2 hq=4 hk=2 sq=6 sk=10 d=8 lse"));
  AttentionArgs args = c.args();
  args.kv.v = args.kv.k;
  args.q.strides = {0, 0, 8, 1};
  args.kv.k.strides[0] = 0;
  const Reference reference = oracle(args);
  attention(args);
  CHECK(compare(args, reference).ok());
}

TEST_CASE("validation: the workspace shares memory with no tensor", "[unit]") {
  Case c(Problem::parse("attention sq=40 sk=40 d=32 lse dtype=bf16"));
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
  Case c(Problem::parse("attention b=2 hq=2 sq=2 sk=40 page=4 seqlens d=8 causal window=5,-1 align=bottom_right"), 1);
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
  Case c(Problem::parse("attention b=2 hq=2 sq=2 sk=8 page=4 seqlens d=8"), 1);
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
  Case c(Problem::parse("attention b=2 sq=1 d=8 " + ring), 2);
  c.seqlens = Tensor(DType::i64, Layout(std::array<std::int64_t, 1>{2}));
  c.seqlens.at<std::int64_t>({0}) = std::int64_t{1} << 48;
  c.seqlens.at<std::int64_t>({1}) = 0;
  CHECK(message_of(c.args()).empty());
  c.seqlens.at<std::int64_t>({0}) += 1;
  CHECK(message_of(c.args()).starts_with("kv.seqlens: "));
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
    Case c(Problem::parse("attention b=2 hq=4 hk=2 sq=6 d=8 dv=4 lse " + std::string(type)));
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
  // Heads have scales of their own; a head size is cut into equal groups, a scale and a zero have as many.
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
  CHECK(refused_argument([] { Plan(Problem::parse("attention kv=i4x2 sq=1 d=7 groups=1")); }) == "kv.k_scale");
}

TEST_CASE("validation: types of caches are for keys and values", "[unit]") {
  for (DType dtype : kQuantizedTypes) {
    refuses("q", [=](AttentionArgs& a, Case&) { a.q.dtype = dtype; });
    refuses("out", [=](AttentionArgs& a, Case&) { a.out.dtype = dtype; });
    refuses("v", [=](AttentionArgs& a, Case&) { a.kv.v.dtype = dtype; });
    refuses("lse", [=](AttentionArgs& a, Case&) { a.lse.dtype = dtype; });
  }
  refuses(
      "v", [](AttentionArgs& a, Case&) { a.kv.v.dtype = DType::f8e5m2; }, "kv=f8e4m3");
}

TEST_CASE("validation: problems say what their tensors would be refused for", "[unit]") {
  const char* const wrong[][2] = {
      {"q=i8", "q"},
      {"out=f8e4m3", "out"},
      {"kv=bool", "k"},
      {"kv=i8", "kv.k_scale"},
      {"kv=i8 k_groups=1", "kv.v_scale"},
      {"kv=i8 groups=3", "kv.k_scale"},
      {"kv=i8 groups=-1", "kv.k_scale"},
      {"kv=i8 k_groups=8 v_groups=3", "kv.v_scale"},
      {"kv=i4x2 groups=8", "kv.k_scale"},
      {"groups=1", "kv.k_scale"},
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
    CHECK(refused_argument([&, words = words] { Plan(Problem::parse("attention sq=2 d=8" + sk + words)); }) ==
          argument);
  }
}
