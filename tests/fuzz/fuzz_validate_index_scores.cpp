// Argument validation of index_scores and of select_topk under arbitrary arguments; see call.hpp.
#include <algorithm>
#include <vector>

#include "call.hpp"
#include "support/dtypes.hpp"

namespace rapt::testing {
namespace {

constexpr double kMaxElements = 1 << 12;

/// How many there are of each in a call that is right.
struct Sizes {
  std::int64_t b, sq, sk, h, d, n, page_size;
};

Sizes choose_sizes(Choices& c) {
  Sizes s{};
  s.b = c.below(4), s.sq = c.below(5), s.sk = c.one_in(4) ? s.sq : c.below(40);
  s.h = 1 + c.below(5), s.d = c.one_in(4) ? c.below(40) : 1 + c.below(8);
  s.n = c.one_in(8) ? c.below(2) : 1 + c.below(20);
  if (c.one_in(3)) s.page_size = 1 + c.below(5), s.sk = s.sk / s.page_size * s.page_size;
  return s;
}

DType some_key_type(Choices& c) {
  return c.one_of(kIndexKeyTypes);
}

MutableTensorView some_indices(Given& g, std::initializer_list<std::int64_t> shape) {
  MutableTensorView t = output(g, shape);
  t.dtype = DType::i32;
  return t;
}

/// [b, sq] of anything.
TensorView some_ends(Given& g, Choices& c, const Sizes& s) {
  std::vector<std::int64_t> values(static_cast<std::size_t>(s.b * s.sq));
  for (std::int64_t& value : values) value = c.below(50) - 5;
  TensorView t = integers(g, c, values);
  t.ndim = 2, t.shape = {s.b, s.sq, 0, 0}, t.strides = {s.sq, 1, 0, 0};
  return t;
}

void choose_args(IndexScoresArgs& a, const Sizes& s, Given& g, Choices& c) {
  const bool paged = s.page_size > 0;
  const std::int64_t columns = paged ? s.sk / s.page_size : 0, entries = paged ? s.b * columns + 1 : s.b,
                     rows = paged ? s.page_size : s.sk;
  a.q = floats(g, c, {s.b, s.sq, s.h, s.d}, some_type(c));
  a.k = floats(g, c, {entries, rows, s.d}, some_key_type(c));
  a.weights = floats(g, c, {s.b, s.sq, s.h});
  if (c.below(2) || a.k.dtype == DType::i8) a.k_scale = floats(g, c, {entries, rows});
  if (size_of(a.k.dtype) > 1 && !c.one_in(8)) a.k_scale = {};
  a.causal = c.below(2);
  const int align = c.below(4);
  if (align == 1) a.align = Align::top_left();
  if (align == 2) a.align = Align::bottom_right();
  if (align == 3) a.align = Align::offset(c.one_in(8) ? kBig : c.below(60) - 20);
  if (c.one_in(16)) a.align = Align{static_cast<Align::Kind>(c.below(8)), 0};
  if (paged || c.one_in(3)) {
    std::vector<std::int64_t> lengths(static_cast<std::size_t>(s.b));
    for (std::int64_t& length : lengths) length = c.below(static_cast<int>(s.sk) + 1);
    a.seqlens = integers(g, c, lengths);
  }
  if (paged) {
    std::vector<std::int64_t> pages(static_cast<std::size_t>(s.b * columns));
    for (std::size_t i = 0; i < pages.size(); ++i) pages[i] = c.one_in(4) ? 0 : static_cast<std::int64_t>(i);
    a.block_table = integers(g, c, pages);
    a.block_table.ndim = 2, a.block_table.shape = {s.b, columns, 0, 0}, a.block_table.strides = {columns, 1, 0, 0};
  }
  if (c.one_in(4)) a.key_begin = some_ends(g, c, s);
  if (c.one_in(4)) a.key_end = some_ends(g, c, s);
  if (c.one_in(4)) a.scale = some_float(c);
  a.relu = c.below(4) != 0;
  if (c.below(2)) a.scores = output(g, {s.b, s.sq, s.sk});
  if (!a.scores || c.below(2)) a.indices = some_indices(g, {s.b, s.sq, s.n});
}

template <class... View>
bool are_small(const View&... views) {
  const auto is_small = [](const Layout& t) {
    double elements = 1;
    for (const std::int64_t size : t.shape) elements *= std::max(1.0, static_cast<double>(size));
    return elements <= kMaxElements;
  };
  return (is_small(views) && ...);
}

void check_selection(Given& g, Choices c) {
  SelectTopkArgs a;
  const std::int64_t rows = c.below(5), more = 1 + c.below(3), sk = c.below(60), n = c.one_in(8) ? 0 : 1 + c.below(70);
  if (c.below(2)) a.scores = floats(g, c, {rows, sk}), a.indices = some_indices(g, {rows, n});
  else a.scores = floats(g, c, {more, rows, sk}), a.indices = some_indices(g, {more, rows, n});
  Call call;
  call.inputs = {&a.scores}, call.outputs = {&a.indices};
  call.is_small = [&] { return are_small(a.scores, a.indices); };
  call.plan = [&] { Plan(a, fuzz_context()); };
  call.run = [&] { select_topk(a, fuzz_context()); };
  for (int twists = c.below(4); twists > 0; --twists) twist_any(call, g, c);
  check_call(g, call);
}

void check(Given& g, Choices c) {
  clear(g);
  if (c.one_in(4)) return check_selection(g, c);
  IndexScoresArgs a;
  choose_args(a, choose_sizes(c), g, c);
  Call call;
  call.indices = {&a.seqlens, &a.block_table};
  call.inputs = {&a.q, &a.k, &a.weights, &a.k_scale, &a.key_begin, &a.key_end};
  call.outputs = {&a.scores, &a.indices};
  call.is_small = [&] { return are_small(a.q, a.k, a.weights, a.block_table, a.scores, a.indices); };
  call.plan = [&] { Plan(a, fuzz_context()); };
  call.run = [&] { index_scores(a, fuzz_context()); };
  for (int twists = c.below(4); twists > 0; --twists) twist_any(call, g, c);
  check_call(g, call);
}

}  // namespace
}  // namespace rapt::testing

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static rapt::testing::Given given;
  rapt::testing::check(given, {data, size});
  return 0;
}
