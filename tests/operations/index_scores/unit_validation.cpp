// What index_scores and select_topk refuse, and their problems' text.
#include <algorithm>
#include <functional>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "operations/index_scores/case.hpp"
#include "operations/select_topk/case.hpp"
#include "rapt/plan.hpp"
#include "support/refuses.hpp"

using namespace rapt;
using namespace rapt::testing;

namespace {

using std::int64_t;
using A = IndexScoresArgs;
using S = SelectTopkArgs;
using Spoil = std::function<void(A&)>;

constexpr std::uint64_t kBothEnds = 2;  // of key ranges: a seed

constexpr const char* kSmall = "b=2 sq=6 sk=10 h=3 d=8 align=bottom_right seqlens ranges topk=4 scores";
constexpr const char* kQuantized = "q=bf16 k=i8 b=2 sq=6 sk=10 h=3 d=8 align=bottom_right scales topk=4 scores";
constexpr const char* kPaged = "b=2 sq=6 sk=12 h=3 d=8 align=bottom_right seqlens page=4 topk=4 scores";
constexpr const char* kPagedQuantized = "k=i8 b=2 sq=6 sk=12 h=3 d=8 full scales seqlens page=4 topk=4 scores";
constexpr const char* kPlain = "b=2 sq=6 sk=10 h=3 d=8 full topk=4 scores";

IndexScoresProblem problem_of(const std::string& words) {
  return IndexScoresProblem::parse("index_scores " + words);
}
SelectTopkProblem selection_of(const std::string& words) {
  return SelectTopkProblem::parse("select_topk " + words);
}

void refuses(const std::string& argument, const Spoil& spoil, const std::string& words = kSmall) {
  check_refusal(argument, IndexScoresCase(problem_of(words), kBothEnds, Placement::front), index_scores, spoil);
}
void accepts(const Spoil& change, const std::string& words = kSmall) {
  check_accepted(IndexScoresCase(problem_of(words), kBothEnds), index_scores, change);
}
void refuses_selection(const std::string& argument, const std::function<void(S&)>& spoil) {
  check_refusal(argument, SelectTopkCase(selection_of("rows=12 sk=9 n=4"), 2, Placement::front), select_topk, spoil);
}

constexpr TensorField<A> kFields[] = {tensor_field<A, &A::q>("q", kSmall),
                                      tensor_field<A, &A::k>("k", kSmall),
                                      tensor_field<A, &A::k>("k", kQuantized),
                                      tensor_field<A, &A::k>("k", kPaged),
                                      tensor_field<A, &A::weights>("weights", kSmall),
                                      tensor_field<A, &A::scores>("scores", kSmall),
                                      tensor_field<A, &A::indices>("indices", kSmall),
                                      tensor_field<A, &A::k_scale>("k_scale", kQuantized),
                                      tensor_field<A, &A::k_scale>("k_scale", kPagedQuantized),
                                      tensor_field<A, &A::seqlens>("seqlens", kSmall),
                                      tensor_field<A, &A::block_table>("block_table", kPaged),
                                      tensor_field<A, &A::key_begin>("key_begin", kSmall),
                                      tensor_field<A, &A::key_end>("key_end", kSmall)};
constexpr TensorField<S> kOfSelection[] = {tensor_field<S, &S::scores>("scores", ""),
                                           tensor_field<S, &S::indices>("indices", "")};

}  // namespace

TEST_CASE("validation of index_scores: sizes and strides of every tensor", "[unit]") {
  for (const TensorField<A>& m : kFields)
    for (const auto spoil : kBadLayouts)
      refuses(
          m.name, [&](A& a) { spoil(m.layout(a)); }, m.words);
}

TEST_CASE("validation of index_scores: null, misaligned, of another type and on another device", "[unit]") {
  for (const TensorField<A>& m : kFields) {
    const auto spoils = [&](const Spoil& spoil) { refuses(m.name, spoil, m.words); };
    spoils([&](A& a) { m.data(a) = nullptr; });
    if (m.words != kQuantized || m.name != std::string("k"))  // bytes are aligned anywhere
      spoils([&](A& a) { m.data(a) = static_cast<const std::byte*>(m.data(a)) + 1; });
    if (m.name != std::string("q")) {  // which has the say
      spoils([&](A& a) { m.device(a).type = DeviceType::cuda; });
      spoils([&](A& a) { m.device(a).index = 1; });
    }
    spoils([&](A& a) { m.dtype(a) = DType::boolean; });
    spoils([&](A& a) { m.dtype(a) = static_cast<DType>(100); });
    const bool is_k = is_one_of(m.name, {"k"}), is_q = is_one_of(m.name, {"q"});
    const bool is_integer = is_one_of(m.name, {"seqlens", "block_table", "key_begin", "key_end"});
    const bool is_index = is_one_of(m.name, {"indices"});
    if (!is_integer && !is_index) spoils([&](A& a) { m.dtype(a) = DType::i32; });
    if (!is_integer) spoils([&](A& a) { m.dtype(a) = DType::i64; });
    if (is_integer || is_index) spoils([&](A& a) { m.dtype(a) = DType::f32; });
    if (!is_k && !is_q)
      for (const DType dtype : {DType::bf16, DType::f16}) spoils([&](A& a) { m.dtype(a) = dtype; });
    if (!is_k)
      for (const DType dtype : {DType::i8, DType::f8e4m3, DType::f8e5m2}) spoils([&](A& a) { m.dtype(a) = dtype; });
    spoils([&](A& a) { m.dtype(a) = DType::i4x2; });
  }
}

TEST_CASE("validation of index_scores: shapes agree", "[unit]") {
  for (const TensorField<A>& m : kFields) {
    const std::string name = m.name;
    if (name != "q") {  // which has the say
      const auto rank = name == "seqlens" ? 1 : is_one_of(name, {"k", "weights", "scores", "indices"}) ? 3 : 2;
      for (int dim = 0; dim < rank; ++dim) {
        // The number of indices is n, of pages any that the table keeps to, and their size and the table's are sk.
        const bool paged = m.words == kPaged || m.words == kPagedQuantized;
        if (name == "indices" && dim == 2) continue;
        const std::string argument = name == "k" && dim == 0 && paged   ? "block_table"
                                     : name == "k" && dim == 1          ? (m.words == kQuantized ? "k_scale" : "scores")
                                     : name == "block_table" && dim > 0 ? "scores"
                                                                        : name;
        refuses(
            argument,
            [&](A& a) {
              std::int64_t& size = m.layout(a).shape[static_cast<std::size_t>(dim)];
              size = argument == "block_table" && name == "k" ? 1 : size - 1;
            },
            m.words);
      }
    }
    // One dimension more, or fewer.
    if (name != "q")
      refuses(
          m.name,
          [&](A& a) {
            Layout& l = m.layout(a);
            const auto last = static_cast<std::size_t>(l.ndim++);
            l.shape[last] = l.strides[last] = 1;
          },
          m.words);
    if (name != "seqlens")
      refuses(
          m.name, [&](A& a) { --m.layout(a).ndim; }, m.words);
  }
  refuses("k", [](A& a) { a.q.shape[3] = 7; });
  refuses("weights", [](A& a) { a.q.shape[2] = 2; });
  refuses("k", [](A& a) { a.q.shape[0] = 1; });
  refuses("q", [](A& a) { a.q.shape[2] = a.weights.shape[2] = 0; });
  refuses("q", [](A& a) { a.q.shape[3] = a.k.shape[2] = 0; });
  refuses("indices", [](A& a) { a.indices.shape[2] = 0; });
  refuses(
      "k", [](A& a) { a.k.shape[1] = 0; }, kPaged);
}

TEST_CASE("validation of index_scores: what is missing, and what goes with nothing", "[unit]") {
  refuses("q", [](A& a) { a.q = {}; });
  refuses("k", [](A& a) { a.k = {}; });
  refuses("weights", [](A& a) { a.weights = {}; });
  refuses("scores", [](A& a) { a.scores = {}, a.indices = {}; });
  accepts([](A& a) { a.scores = {}; });
  accepts([](A& a) { a.indices = {}; });
  for (const char* words : {kQuantized, kPagedQuantized})
    refuses(
        "k_scale", [](A& a) { a.k_scale = {}; }, words);
  refuses("k_scale", [](A& a) {  // keys of fp32 need none
    a.k_scale = TensorView(static_cast<const float*>(a.k.data), {2, 10});
  });
  refuses(
      "seqlens", [](A& a) { a.seqlens = {}; }, kPaged);
  accepts([](A& a) { a.seqlens = a.key_begin = {}; });
  accepts([](A& a) { a.key_end = {}; });
  for (const float scale : {std::numeric_limits<float>::quiet_NaN(), kInf, -kInf})
    refuses("scale", [&](A& a) { a.scale = scale; });
  for (const float scale : {0.f, -1.f, 1e30f}) accepts([&](A& a) { a.scale = scale; });
}

TEST_CASE("validation of index_scores: where queries sit", "[unit]") {
  for (const char* words : {kSmall, kPaged}) {
    refuses(
        "align", [](A& a) { a.align = {}; }, words);
    refuses(
        "align", [](A& a) { a.align->kind = static_cast<Align::Kind>(3); }, words);
    for (const int64_t offset : {kHuge, -kHuge, (int64_t{1} << 52) + 1})
      refuses(
          "align", [&](A& a) { a.align = Align::offset(offset); }, words);
    for (const int64_t offset : {int64_t{-100}, int64_t{100}, int64_t{1} << 52, -(int64_t{1} << 52)})
      accepts([&](A& a) { a.align = Align::offset(offset); }, words);
    accepts([](A& a) { a.align = {}, a.causal = false; }, words);
  }
  // As many keys as queries in every sequence need none, whatever there is room for.
  const std::int32_t same[] = {6, 6}, fewer[] = {6, 5};
  accepts([&](A& a) { a.align = {}, a.seqlens = TensorView(same, {2}); });
  refuses("align", [&](A& a) { a.align = {}, a.seqlens = TensorView(fewer, {2}); });
  refuses(
      "align", [](A& a) { a.causal = true; }, kPlain);
}

TEST_CASE("validation of index_scores: lengths and pages", "[unit]") {
  for (const std::int32_t length : {-1, 11, std::numeric_limits<std::int32_t>::max()}) {
    const std::int32_t lengths[] = {3, length};
    refuses("seqlens", [&](A& a) { a.seqlens = TensorView(lengths, {2}); });
  }
  for (const std::int32_t length : {-1, 13}) {
    const std::int32_t lengths[] = {3, length};
    refuses(
        "seqlens", [&](A& a) { a.seqlens = TensorView(lengths, {2}); }, kPaged);
  }
  const std::int32_t lengths[] = {5, 12};
  for (const std::int32_t page : {-1, 1000}) {
    const std::int32_t tables[][6] = {{page, 0, 0, 0, 0, 0}, {0, page, 0, 0, 0, 0}, {0, 0, 0, 0, 0, page}};
    for (const auto& table : tables)
      refuses(
          "block_table",
          [&](A& a) {
            a.seqlens = TensorView(lengths, {2}), a.block_table = TensorView(table, {2, 3});
          },
          kPaged);
    const std::int32_t unused[] = {0, 0, page, 0, 0, 0};
    accepts([&](A& a) { a.seqlens = TensorView(lengths, {2}), a.block_table = TensorView(unused, {2, 3}); }, kPaged);
  }
  IndexScoresCase c(problem_of(kPaged), kBothEnds);
  A without_pages = c.args();
  without_pages.k.shape[0] = 0;
  CHECK(refused_text([&] { index_scores(without_pages); }).find("; wanted no keys, as k has no pages") !=
        std::string::npos);
  refuses(
      "block_table", [](A& a) { a.block_table.shape[1] = kHuge / 8, a.block_table.strides[1] = 0; }, kPaged);
  // Key ranges may say anything.
  const int64_t ends[] = {kHuge, -kHuge, 0, 3, -1, 11};
  accepts([&](A& a) {
    a.key_begin = a.key_end = TensorView(ends, {2, 6});
    a.key_begin.strides[0] = a.key_end.strides[0] = 0;
  });
}

TEST_CASE("validation of index_scores: lengths and pages in a device's memory are not read", "[unit]") {
  refuses("k", [](A& a) { a.q.device.type = DeviceType::cuda; });
  IndexScoresCase c(problem_of(kPaged), kBothEnds);
  A args = c.args();
  for (const TensorField<A>& m : kFields)
    if (m.data(args)) m.device(args).type = DeviceType::cuda;
  int unreadable[6];  // values that would be refused
  std::fill(std::begin(unreadable), std::end(unreadable), 1 << 30);
  args.seqlens.data = args.block_table.data = unreadable;
  args.seqlens.dtype = args.block_table.dtype = DType::i32;
  const IndexScoresProblem problem = IndexScoresProblem::of(args);
  CHECK(problem.device == DeviceType::cuda);
  CHECK(IndexScoresProblem::parse(problem.to_string()) == problem);
  args.k.shape[0] = 0;  // no pages
  CHECK(refused_text([&] { IndexScoresProblem::of(args); }) == "");
}

TEST_CASE("validation of index_scores: overlaps", "[unit]") {
  for (const char* words : {kSmall, kPaged, kQuantized})
    for (const TensorField<A>& m : kFields)
      for (MutableTensorView A::*written : {&A::scores, &A::indices}) {
        IndexScoresCase c(problem_of(words), kBothEnds);
        A args = c.args();
        const void* const to = (args.*written).data;
        if (m.data(args) == nullptr || m.data(args) == to) continue;
        m.data(args) = to;
        INFO(m.name << " where " << (written == &A::scores ? "scores" : "indices") << " lie: " << words);
        CHECK(refused_argument([&] { index_scores(args); }) != "");
        for (const Tensor* t : c.outputs()) CHECK(same_bits(*t, Tensor(t->dtype(), t->layout())));
      }
  for (int dim = 0; dim < 3; ++dim) {
    refuses("scores", [&](A& a) { a.scores.strides[static_cast<std::size_t>(dim)] = 0; });
    refuses("indices", [&](A& a) { a.indices.strides[static_cast<std::size_t>(dim)] = 0; });
  }
  accepts([](A& a) { a.weights.strides = {0, 0, 0, 0}, a.key_end.strides = {0, 0, 0, 0}; });  // inputs may repeat
}

TEST_CASE("validation of index_scores: tensors without elements have no address", "[unit]") {
  for (const char* words : {"b=0 sq=4 sk=5 h=2 d=8 full topk=3 scores", "b=2 sq=0 sk=5 h=2 d=8 full topk=3 scores"}) {
    IndexScoresCase c(problem_of(words));
    A args = c.args();
    args.q.data = args.weights.data = nullptr, args.scores.data = args.indices.data = nullptr;
    INFO(words);
    CHECK(refused_text([&] { index_scores(args); }) == "");
    CHECK(IndexScoresProblem::of(args).to_string() == c.problem.to_string());
  }
  // Without keys there are no scores, and no key to select.
  IndexScoresCase c(problem_of("b=2 sq=3 sk=0 h=2 d=8 full topk=3 scores"));
  A args = c.args();
  args.k.data = nullptr, args.scores.data = nullptr;
  CHECK(refused_text([&] { index_scores(args); }) == "");
  for (int64_t i = 0; i < c.indices.size(); ++i) CHECK(c.indices.flat<std::int32_t>(i) == -1);
}

TEST_CASE("validation of index_scores: problems that no arguments could give", "[unit]") {
  const auto refused = [](const std::string& words) {
    return refused_argument([&] { Plan(Problem(problem_of(words))); });
  };
  for (const char* words : {kSmall, kQuantized, kPaged, kPagedQuantized, kPlain}) CHECK(refused(words) == "");
  CHECK(refused("sq=4 d=8 b=-1") == "b");
  CHECK(refused("sq=-4 sk=4 d=8 full") == "sq");
  CHECK(refused("sq=4 sk=-4 d=8 full") == "sk");
  CHECK(refused("sq=4 sk=281474976710657 d=8 full") == "sk");
  CHECK(refused("sq=4 d=8 h=-1") == "h");
  CHECK(refused("sq=4 d=8 h=0") == "q");
  CHECK(refused("b=281474976710656 sq=281474976710656 h=64 d=8") == "q");
  CHECK(refused("b=0 sq=281474976710656 h=281474976710656 d=8") == "q");
  for (const char* d : {"0", "-1", "8193"}) CHECK(refused("sq=4 d=" + std::string(d)) == "q");
  CHECK(refused("sq=4 d=8192") == "");
  CHECK(refused("sq=4 d=8 topk=-1") == "indices");
  CHECK(refused("sq=4 d=8 topk=2147483647") == "");
  CHECK(refused("sq=4 d=8 topk=2147483648") == "indices");
  CHECK(refused("sq=4 sk=2147483648 d=8 full topk=4") == "indices");
  CHECK(refused("sq=4 sk=2147483648 d=8 full") == "");
  CHECK(refused("sq=4 d=8 q=i8") == "q");
  CHECK(refused("sq=4 d=8 q=f8e4m3") == "q");
  CHECK(refused("sq=4 d=8 k=i4x2 scales") == "k");
  CHECK(refused("sq=4 d=8 k=i8") == "k_scale");
  CHECK(refused("sq=4 d=8 k=i8 scales") == "");
  CHECK(refused("sq=4 d=8 k=f8e4m3") == "");
  CHECK(refused("sq=4 d=8 k=f8e5m2 scales") == "");
  CHECK(refused("sq=4 d=8 k=bf16 scales") == "k_scale");
  CHECK(refused("sq=4 sk=9 d=8 full seqlens page=2") == "k");
  CHECK(refused("sq=4 sk=8 d=8 full page=2") == "seqlens");
  CHECK(refused("sq=4 sk=8 d=8 full seqlens page=-2") == "k");
  CHECK(refused("sq=4 sk=8 d=8") == "align");
  CHECK(refused("sq=4 sk=8 d=8 seqlens") == "");  // all of which may be 4
  CHECK(refused("sq=4 sk=8 d=8 align=4503599627370497") == "align");
  IndexScoresProblem nothing = problem_of("sq=4 d=8");
  nothing.scores = false;
  CHECK(refused_argument([&] { Plan(Problem(nothing)); }) == "scores");
}

TEST_CASE("validation of select_topk: sizes, types, devices and addresses of both tensors", "[unit]") {
  for (const TensorField<S>& m : kOfSelection) {
    for (const auto spoil : kBadLayouts) refuses_selection(m.name, [&](S& a) { spoil(m.layout(a)); });
    refuses_selection(m.name, [&](S& a) { m.data(a) = nullptr; });
    refuses_selection(m.name, [&](S& a) { m.data(a) = static_cast<const std::byte*>(m.data(a)) + 1; });
    refuses_selection("indices", [&](S& a) { m.device(a).type = DeviceType::cuda; });
    refuses_selection(m.name, [&](S& a) { m.layout(a).ndim = 0; });
    for (const DType dtype : {DType::boolean, DType::bf16, DType::f16, DType::i8, DType::f8e4m3, DType::i64,
                              DType::i4x2, m.name == std::string("scores") ? DType::i32 : DType::f32})
      refuses_selection(m.name, [&](S& a) { m.dtype(a) = dtype; });
    refuses_selection("indices", [&](S& a) { --m.layout(a).ndim; });
    refuses_selection("indices", [&](S& a) { --m.layout(a).shape[0]; });
    refuses_selection("indices", [&](S& a) { --m.layout(a).shape[static_cast<std::size_t>(m.layout(a).ndim - 2)]; });
  }
  refuses_selection("indices", [](S& a) { a.indices.shape[static_cast<std::size_t>(a.indices.ndim - 1)] = 0; });
  refuses_selection("indices", [](S& a) { a.indices.strides[static_cast<std::size_t>(a.indices.ndim - 1)] = 0; });
  refuses_selection("indices", [](S& a) { a.indices.data = const_cast<void*>(a.scores.data); });
  refuses_selection("indices", [](S& a) { a.indices.device.index = 1; });
  refuses_selection("indices", [](S& a) { a.scores.device.index = 1; });
  // One score that all of a row are, and no score at all.
  SelectTopkCase c(selection_of("rows=12 sk=9 n=4"), 2);
  S args = c.args();
  args.scores.strides = {0, 0, 0, 0};
  args.scores.data = &c.scores.flat<float>(0);
  c.scores.flat<float>(0) = 1;
  select_topk(args);
  for (int64_t i = 0; i < c.indices.size(); ++i) CHECK(c.indices.flat<std::int32_t>(i) == i % 4);
  args.scores.shape[static_cast<std::size_t>(args.scores.ndim - 1)] = 0, args.scores.data = nullptr;
  select_topk(args);
  for (int64_t i = 0; i < c.indices.size(); ++i) CHECK(c.indices.flat<std::int32_t>(i) == -1);
  // No row at all, however many the other dimensions would make.
  constexpr int64_t kMany = int64_t{1} << 40;
  args.scores = TensorView(&c.scores.flat<float>(0), {kMany, kMany, 0, 9}, {0, 0, 9, 1});
  args.indices = MutableTensorView(&c.indices.flat<std::int32_t>(0), {kMany, kMany, 0, 4}, {0, 0, 4, 1});
  CHECK(refused_text([&] { select_topk(args); }) == "");
  CHECK(SelectTopkProblem::of(args).rows == 0);
}

TEST_CASE("validation of select_topk: problems that no arguments could give", "[unit]") {
  const auto refused = [](const std::string& words) {
    return refused_argument([&] { Plan(Problem(selection_of(words))); });
  };
  CHECK(refused("rows=4 sk=8 n=2") == "");
  CHECK(refused("rows=0 sk=0 n=1") == "");
  CHECK(refused("rows=-1 sk=8 n=2") == "scores");
  CHECK(refused("rows=4503599627370497 sk=8 n=2") == "scores");
  CHECK(refused("rows=4 sk=-8 n=2") == "scores");
  CHECK(refused("rows=4 sk=2147483648 n=2") == "scores");
  CHECK(refused("rows=4 sk=8 n=0") == "indices");
  CHECK(refused("rows=4 sk=8 n=2147483648") == "indices");
  CHECK(refused("rows=4 sk=8 n=2147483647") == "");
}

TEST_CASE("problem of index_scores: its text reads back", "[unit]") {
  std::mt19937_64 random(605);
  for (int i = 0; i < 500; ++i) {
    const IndexScoresProblem p = sample_index_scores(random);
    INFO(p.to_string());
    CHECK((IndexScoresProblem::parse(p.to_string()) == p));
    CHECK((std::get<IndexScoresProblem>(parse_problem(p.to_string())) == p));
    CHECK(refused_text([&] { Plan{Problem(p)}; }) == "");
    const SelectTopkProblem s = sample_select_topk(random);
    CHECK((SelectTopkProblem::parse(s.to_string()) == s));
    CHECK(refused_text([&] { Plan{Problem(s)}; }) == "");
  }
  CHECK(problem_of("scores topk=4 linear align=3 full d=8 h=2 sk=9 sq=4 k=i8 q=bf16 scales").to_string() ==
        "index_scores q=bf16 k=i8 b=1 sq=4 sk=9 h=2 d=8 full align=3 linear scales topk=4 scores");
  CHECK(problem_of("dtype=bf16 sq=4 d=8").to_string() == "index_scores dtype=bf16 b=1 sq=4 h=1 d=8");
  CHECK(problem_of("sq=4 sk=4 d=8 q=f32 scores topk=0").to_string() == "index_scores b=1 sq=4 h=1 d=8");
  CHECK(problem_of("sq=4 d=8").scores);
  CHECK_FALSE(problem_of("sq=4 d=8 topk=2").scores);
  for (const auto& [text, named] : {std::pair{"hq=4", "\"hq=4\""},
                                    {"sq=4 sq=4", "\"sq=4\""},
                                    {"causal", "\"causal\""},
                                    {"align=middle", "\"align=middle\""},
                                    {"linear=1", "\"linear=1\""},
                                    {"full full", "\"full\""},
                                    {"topk", "\"topk\""},
                                    {"k=f64", "\"k=f64\""},
                                    {"d=x", "\"d=x\""}}) {
    INFO(text);
    CHECK(refused_text([text = text] { problem_of(text); }).find(named) != std::string::npos);
  }
}
