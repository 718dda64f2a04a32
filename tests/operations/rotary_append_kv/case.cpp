#include "operations/rotary_append_kv/case.hpp"

#include <algorithm>
#include <cmath>
#include <random>
#include <string>

namespace rapt::testing {
namespace {

using std::int64_t;

/// The call's new rows and its cache; without one, a cache that nobody uses.
AppendKvProblem append_part(const RotaryAppendKvProblem& p) {
  AppendKvProblem append = p;
  if (p.no_cache) append.sk = p.n + 7;
  return append;
}

double unit_of(DType dtype) {
  return dtype == DType::bf16 ? 0x1p-8 : dtype == DType::f16 ? 0x1p-11 : 0x1p-24;
}

void copy(const Tensor& from, Tensor& to) {
  for (int64_t i = 0; i < from.size(); ++i) to.flat(i) = from.flat(i);
}

}  // namespace

RotaryCase::RotaryCase(const RotaryAppendKvProblem& given, std::uint64_t seed, Placement placement, Spacing spacing)
    : problem(given), append(append_part(given), seed, placement, spacing) {
  const RotaryAppendKvProblem& p = problem;
  std::mt19937_64 random(seed + 700);
  const bool ragged = p.ragged >= 0;
  const int64_t rows = ragged ? p.ragged : p.n;
  in_place = seed % 3 == 0 && p.q_dtype == p.out_dtype && (!p.no_cache || p.new_dtype == p.out_dtype);
  const auto heads = [&](int64_t h) { return spaced(ragged ? Dims{rows, h, p.d} : Dims{p.b, h, rows, p.d}, spacing); };
  if (p.hq > 0) {
    q = Tensor(p.q_dtype, heads(p.hq), placement), q_out = Tensor(p.out_dtype, heads(p.hq), placement);
    fill_normal(q, random);
  }
  if (p.no_cache) k_out = Tensor(p.out_dtype, heads(p.hk), placement);
  const int64_t entries = ragged || seed % 2 ? 1 : p.b, angles = p.half_tables ? p.rotary / 2 : p.rotary;
  int64_t table = 1;
  for (int64_t i = 0; i < p.b; ++i) table = std::max(table, append.keys_before(i) + append.count(i));
  if (p.positions) {
    std::uniform_int_distribution<int64_t> place(0, table - 1);
    positions = Tensor(seed % 2 ? DType::i64 : DType::i32, spaced({entries, rows}, spacing), placement);
    for (int64_t i = 0; i < positions.size(); ++i) set_index(positions, i, place(random));
  }
  const Layout layout = spaced(p.rows ? Dims{entries, rows, angles} : Dims{table, angles}, spacing);
  cos = Tensor(p.table_dtype, layout, placement), sin = Tensor(p.table_dtype, layout, placement);
  std::uniform_real_distribution<float> angle(-4, 4);
  for (int64_t i = 0; i < cos.size(); ++i) {
    const float x = angle(random);
    cos.flat(i) = std::cos(x), sin.flat(i) = std::sin(x);
  }
  const auto weights = [&] {
    Tensor norm(seed % 2 ? DType::f32 : p.new_dtype, spaced({p.d}, spacing), placement);
    fill_normal(norm, random);
    return norm;
  };
  if (p.norm && p.hq > 0 && (seed % 4 != 1 || p.values_are_keys)) q_norm = weights();
  if (p.norm && !p.values_are_keys && (seed % 4 != 2 || p.hq == 0)) k_norm = weights();
  clear();
}

RotaryAppendKvArgs RotaryCase::args() {
  RotaryAppendKvArgs args;
  args.append = append.args();
  args.q = q.view(), args.q_out = q_out.mutable_view();
  if (problem.no_cache) {
    args.append.cache = {}, args.append.v_new = {};
    args.k_out = k_out.mutable_view();
  }
  if (in_place) {
    args.q = q_out.view();
    if (problem.no_cache) args.append.k_new = k_out.view();
  }
  args.cos = cos.view(), args.sin = sin.view(), args.positions = positions.view();
  args.q_norm = q_norm.view(), args.k_norm = k_norm.view();
  args.norm_eps = eps, args.norm_plus_one = problem.plus_one, args.interleaved = problem.interleaved;
  args.rotary_dim = problem.rotary, args.rotary_offset = problem.rotary_offset;
  return args;
}

void RotaryCase::protect_inputs() {
  append.protect_inputs();
  for (Tensor* tensor : {&q, &cos, &sin, &positions, &q_norm, &k_norm}) tensor->buffer().protect();
}

std::vector<Tensor*> RotaryCase::outputs() {
  std::vector<Tensor*> tensors;
  if (!problem.no_cache) tensors = append.outputs();
  tensors.insert(tensors.end(), {&q_out, &k_out});
  return tensors;
}

void RotaryCase::clear() {
  for (Tensor* tensor : outputs()) tensor->poison();
  if (!in_place) return;
  copy(q, q_out);
  if (problem.no_cache) copy(append.k.fresh, k_out);
}

RotaryCase::Wanted RotaryCase::wanted(const Tensor& from, const Tensor& norm, int64_t i, int64_t t, int64_t h) const {
  const RotaryAppendKvProblem& p = problem;
  const bool ragged = p.ragged >= 0;
  const int64_t row = append.first_row(i) + t;
  const auto at = [&](int64_t c) { return static_cast<double>(ragged ? from.at({row, h, c}) : from.at({i, h, t, c})); };
  Wanted w{std::vector<double>(static_cast<std::size_t>(p.d)), std::vector<double>(static_cast<std::size_t>(p.d), 0)};
  double squares = 0;
  for (int64_t c = 0; c < p.d; ++c) squares += at(c) * at(c);
  const double factor = 1 / std::sqrt(squares / static_cast<double>(p.d) + static_cast<double>(eps));
  constexpr double u = 0x1p-24;
  for (int64_t c = 0; c < p.d; ++c) {
    double& x = w.x[static_cast<std::size_t>(c)];
    x = at(c);
    if (!norm) continue;
    x *= factor * (static_cast<double>(norm.at({c})) + (p.plus_one ? 1 : 0));
    w.off[static_cast<std::size_t>(c)] = (static_cast<double>(p.d) / 8 + 12) * u * std::fabs(x);
  }
  const auto angle = [&](const Tensor& table, int64_t pair, int64_t of_pair) {
    const int64_t n = p.half_tables ? pair : p.interleaved ? 2 * pair + of_pair : pair + of_pair * p.rotary / 2;
    const auto entry = [&](const Tensor& tensor) { return tensor.layout().shape[0] == 1 ? 0 : i; };
    if (p.rows) return static_cast<double>(table.at({entry(table), row, n}));
    const int64_t position = p.positions ? index_at(positions, {entry(positions), row}) : append.keys_before(i) + t;
    return static_cast<double>(table.at({position, n}));
  };
  const double bound = (norm ? static_cast<double>(p.d) / 8 + 16 : 4) * u;
  for (int64_t pair = 0; pair < p.rotary / 2; ++pair) {
    const auto first = static_cast<std::size_t>(p.rotary_offset + (p.interleaved ? 2 * pair : pair));
    const std::size_t second = first + static_cast<std::size_t>(p.interleaved ? 1 : p.rotary / 2);
    const double x1 = w.x[first], x2 = w.x[second];
    const double a = x1 * angle(cos, pair, 0), b = x2 * angle(sin, pair, 0);
    const double c = x2 * angle(cos, pair, 1), d = x1 * angle(sin, pair, 1);
    w.x[first] = a - b, w.off[first] = bound * (std::fabs(a) + std::fabs(b));
    w.x[second] = c + d, w.off[second] = bound * (std::fabs(c) + std::fabs(d));
  }
  return w;
}

void RotaryCase::compare(const Tensor& from, const Tensor& norm, const Tensor& out, int64_t row_step,
                         Tally& tally) const {
  const RotaryAppendKvProblem& p = problem;
  const double unit = unit_of(out.dtype());
  for (int64_t i = 0; i < p.b; ++i)
    for (int64_t t = 0, n = append.count(i); t < n; t = next_row(t, row_step, n))
      for (int64_t h = 0; h < from.layout().shape[1]; ++h) {
        const Wanted w = wanted(from, norm, i, t, h);
        for (int64_t c = 0; c < p.d; ++c) {
          const auto at = static_cast<std::size_t>(c);
          const float got = p.ragged >= 0 ? out.at({append.first_row(i) + t, h, c}) : out.at({i, h, t, c});
          const double bound =
              w.off[at] * (1 + unit) + unit * std::fabs(w.x[at]) + (out.dtype() == DType::f16 ? 0x1p-25 : 0x1p-126);
          tally.add(static_cast<double>(got), w.x[at], bound);
        }
      }
  if (!out.gaps_intact()) tally.violate("memory between the elements of a result was written");
}

Verdict RotaryCase::verdict(int64_t row_step) const {
  const RotaryAppendKvProblem& p = problem;
  Tally tally;
  if (p.hq > 0) compare(q, q_norm, q_out, row_step, tally);
  if (p.no_cache) {
    compare(append.k.fresh, k_norm, k_out, row_step, tally);
    return tally.verdict();
  }
  const auto& shape = append.k.fresh.layout().shape;
  const Dims dims(shape.begin(), shape.begin() + append.k.fresh.layout().ndim);
  const Layout layout(dims);
  AppendCase::Made keys{Tensor(DType::f32, layout), Tensor(DType::f32, layout)};
  for (int64_t i = 0; i < p.b; ++i)
    for (int64_t t = 0; t < append.count(i); ++t)
      for (int64_t h = 0; h < p.hk; ++h) {
        const Wanted w = wanted(append.k.fresh, k_norm, i, t, h);
        for (int64_t c = 0; c < p.d; ++c) {
          const auto at = static_cast<std::size_t>(c);
          const bool ragged = p.ragged >= 0;
          const auto x = static_cast<float>(w.x[at]);
          const auto off = static_cast<float>(w.off[at] > 0 ? w.off[at] + std::fabs(w.x[at]) * 0x1p-24 : 0);
          const int64_t row = append.first_row(i) + t;
          ragged ? keys.x.at({row, h, c}) = x : keys.x.at({i, h, t, c}) = x;
          ragged ? keys.off.at({row, h, c}) = off : keys.off.at({i, h, t, c}) = off;
        }
      }
  append.compare(row_step, tally, &keys);
  return tally.verdict();
}

std::vector<DType> CaseOf<RotaryAppendKvProblem>::types(const RotaryAppendKvProblem& p) {
  return {p.new_dtype, p.q_dtype, p.table_dtype, p.out_dtype, p.kv_dtype};
}
double CaseOf<RotaryAppendKvProblem>::tensor_bytes(const RotaryAppendKvProblem& p) {
  const double rows = real(p.ragged >= 0 ? p.ragged : p.b * p.n), of_q = rows * real(p.hq) * real(p.d);
  const double own = of_q * (bytes_of(p.q_dtype) + bytes_of(p.out_dtype));
  const double tables = 2 * (p.rows ? rows : real(append_part(p).sk)) * real(p.rotary) * bytes_of(p.table_dtype);
  return own + tables + CaseOf<AppendKvProblem>::tensor_bytes(append_part(p));
}
CaseOf<RotaryAppendKvProblem>::Sizes CaseOf<RotaryAppendKvProblem>::sizes(const RotaryAppendKvProblem& p) {
  Sizes sizes = CaseOf<AppendKvProblem>::sizes(p);
  sizes.insert(sizes.end(), {{"hq", p.hq}, {"rotary", p.rotary}});
  return sizes;
}

void move_tensors(RotaryAppendKvArgs& args, DeviceTensors& tensors) {
  tensors.move(args.q_out), tensors.move(args.k_out);  // before what is in their memory
  move_tensors(args.append, tensors);
  for (TensorView* t : {&args.q, &args.cos, &args.sin, &args.positions, &args.q_norm, &args.k_norm}) tensors.move(*t);
}

}  // namespace rapt::testing
