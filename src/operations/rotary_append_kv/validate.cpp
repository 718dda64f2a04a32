// rotary_append_kv: arguments -> Call, or an Error that names the argument; its problem's text, and its cost.
#include <cmath>
#include <string>

#include "core/dtypes.hpp"
#include "core/elements.hpp"
#include "core/fields.hpp"
#include "core/span.hpp"
#include "operations/c_values.hpp"
#include "operations/cost.hpp"
#include "operations/rotary_append_kv/operation.hpp"

namespace rapt {
namespace {

using std::int64_t;
using P = RotaryAppendKvProblem;
using Op = OperationOf<RotaryAppendKvArgs>;

constexpr std::array kOwnFields = {
    integer_field<P, &P::hq, 0>("hq"),
    size_field<P, &P::rotary>("rotary"),
    integer_field<P, &P::rotary_offset, 0>("offset"),
    dtype_field_like<P, &P::q_dtype, &P::new_dtype>("q"),
    dtype_field_like<P, &P::out_dtype, &P::new_dtype>("out"),
    dtype_field<P, &P::table_dtype>("table"),
    flag_field<P, &P::interleaved>("interleaved"),
    flag_field<P, &P::norm>("norm"),
    flag_field<P, &P::plus_one>("plus_one"),
    flag_field<P, &P::half_tables>("half"),
    flag_field<P, &P::rows>("rows"),
    flag_field<P, &P::positions>("positions"),
    flag_field<P, &P::no_cache>("no_cache"),
};
constexpr auto kFields = join(append_fields<P>, kOwnFields);

// Whether `out` is the memory of `from`, element for element.
bool is_same(const TensorView& from, const TensorView& out) {
  if (from.data != out.data || from.dtype != out.dtype || from.ndim != out.ndim) return false;
  for (std::size_t i = 0; i < static_cast<std::size_t>(from.ndim); ++i)
    if (from.shape[i] != out.shape[i] || (from.shape[i] > 1 && from.strides[i] != out.strides[i])) return false;
  return true;
}

Strides strides_of_rows(const TensorView& t) {
  return t.ndim == 3 ? strides_along(t, -1, 1, 0, 2) : aligned_strides(t, true);
}

RotarySide side_of(const TensorView& from, const MutableTensorView& to, const TensorView& norm) {
  RotarySide s{};
  s.from = from.data, s.from_type = from.dtype, s.from_stride = strides_of_rows(from);
  s.heads = from.shape[1];
  if (to) s.to = to.data, s.to_type = to.dtype, s.to_stride = strides_of_rows(to);
  if (norm) s.norm = norm.data, s.norm_type = norm.dtype, s.norm_stride = norm.strides[0];
  return s;
}

// Calls f(i, t, first) for every new row; of sequence i, whose first row in ragged tensors is `first`.
template <class F>
void for_each_row(const RotaryAppendKvParams& f, const F& visit) {
  for (int64_t i = 0; i < f.b; ++i) {
    const NewRows rows = new_rows(f, i);
    for (int64_t t = 0; t < rows.count; ++t) visit(i, t, rows.first);
  }
}

void check_positions(const RotaryAppendKvArgs& args, const RotaryAppendKvParams& f) {
  if (f.position_count == 0) return;
  for_each_row(f, [&](int64_t i, int64_t t, int64_t first) {
    const int64_t at = position_of(f, i, t, first);
    if (at < 0 || at >= f.position_count)
      throw Error(
          args.positions ? "positions" : "cos",
          "position " + std::to_string(at) + " of new row " + std::to_string(t) + " of sequence " + std::to_string(i),
          "0 to " + std::to_string(f.position_count - 1) + ", the rows of cos");
  });
}

// Integers of given scales have no NaN: what norms and turns the keys is finite.
void check_angles(const RotaryAppendKvArgs& args, const RotaryAppendKvParams& f) {
  const AppendKvSide& k = f.side[0];
  if (f.sides == 0 || !k.scale || k.computes_scale || !(set_of(k.to_type) & kIntegerCodes)) return;
  if (const TensorView& norm = args.k_norm) {
    if (!(args.norm_eps > 0))  // of a row of zeros, a norm with 0 is NaN
      throw Error("norm_eps", shortest(args.norm_eps), "more than 0 where the scale of integers is given");
    with_constant(norm.dtype, [&](auto dtype) {
      for (int64_t c = 0; c < norm.shape[0]; ++c)
        if (const float x = element_of(norm.data, dtype, 1, c * norm.strides[0]); !(std::abs(x) <= 0x1p60f))
          throw Error("k_norm", shortest(x), "numbers of up to 2^60 where the scale of integers is given");
    });
  }
  for_each_row(f, [&](int64_t i, int64_t t, int64_t first) {
    const AngleRows rows = angle_rows(f, i, t, first);
    for (const auto& [name, data, at, step] :
         {std::tuple{"cos", f.cos, rows.cos, f.cos_stride.d}, {"sin", f.sin, rows.sin, f.sin_stride.d}})
      with_constant(f.table_type, [&, name = name, data = data, at = at, step = step](auto dtype) {
        for (int64_t c = 0; c < args.cos.shape[static_cast<std::size_t>(args.cos.ndim - 1)]; ++c)
          if (const float x = element_of(data, dtype, 1, at + c * step); !std::isfinite(x))
            throw Error(name, shortest(x), "finite numbers where the scale of integers is given");
      });
  });
}

// Values that are columns of the keys are written as these are.
void check_shared(const RotaryAppendKvArgs& args, const P& p) {
  if (!p.values_are_keys) return;
  if (args.k_norm) throw Error("k_norm", "a tensor", "none for values that are columns of cache.k");
  const TensorView &k = args.append.k_new, &v = args.append.v_new;
  const auto last = static_cast<std::size_t>(k.ndim - 1);
  const int64_t step = k.strides[last] * static_cast<int64_t>(size_of(k.dtype));
  const auto bytes =
      static_cast<int64_t>(reinterpret_cast<std::uintptr_t>(v.data) - reinterpret_cast<std::uintptr_t>(k.data));
  const int64_t first = step != 0 ? bytes / step : 0;
  if (p.rotary_offset < first + p.dv && first < p.rotary_offset + p.rotary)
    throw Error(
        "rotary_offset", std::to_string(p.rotary_offset),
        "channels that are not those of values, " + std::to_string(first) + " to " + std::to_string(first + p.dv - 1));
}

}  // namespace

std::string RotaryAppendKvProblem::to_string() const {
  return print_fields("rotary_append_kv", *this, kFields);
}

RotaryAppendKvProblem RotaryAppendKvProblem::parse(std::string_view text) {
  const Words words(text, "rotary_append_kv");
  P p;
  words.read(p, kFields);
  if (!words.has("dv")) p.dv = p.d;
  if (!words.has("q")) p.q_dtype = p.new_dtype;
  if (!words.has("out")) p.out_dtype = p.new_dtype;
  if (!words.has("rotary")) p.rotary = p.d;
  return p;
}

void check(const RotaryAppendKvProblem& p) {
  AppendKvProblem append = p;
  if (p.no_cache) {
    append.sk = p.n;
    if (p.dv != p.d || p.kv_dtype != p.new_dtype || CacheProblem(p) != CacheProblem() || p.k_groups || p.v_groups ||
        p.k_tail || p.zeros || p.given_scales || p.values_are_keys)
      throw Error("no_cache", "words of a cache", "none");
  }
  check(append);
  if (p.hq < 0 || p.hq > kMaxSize) throw Error("q", std::to_string(p.hq) + " heads", "0 to 2^48");
  check_type("q", p.q_dtype, kFloatTypes);
  check_type("q_out", p.out_dtype, kFloatTypes);
  check_type("cos", p.table_dtype, kFloatTypes);
  if (p.rotary < 2 || p.rotary % 2 != 0 || p.rotary > p.d)
    throw Error("rotary_dim", std::to_string(p.rotary), "an even number from 2 to d = " + std::to_string(p.d));
  if (p.rotary_offset < 0 || p.rotary_offset > p.d - p.rotary)
    throw Error("rotary_offset", std::to_string(p.rotary_offset), "0 to " + std::to_string(p.d - p.rotary));
  if (p.positions && p.rows) throw Error("positions", "a tensor", "none where cos has a row for each new row");
  if (p.plus_one && !p.norm) throw Error("norm_plus_one", "true", "false without q_norm and k_norm");
  int64_t items = 0;
  const int64_t rows = p.ragged >= 0 ? p.ragged : p.b * p.n;
  if (__builtin_mul_overflow(rows, p.hq + p.hk, &items) || items > kMaxOffset)
    throw Error("k_new", "more than 2^52 rows of heads", "a smaller problem");
}

unsigned Op::features(const Args& args) {
  unsigned features = AppendFeatures::of(args.append);
  const KvCache& cache = args.append.cache;
  if (cache.k && args.k_out) throw Error("k_out", "a tensor", "none with a cache, which keys go to");
  if (!cache.k && cache.kind != KvSource::Kind::strided)
    throw Error("cache.k", "no tensor", std::string("one for ") + KvFeatures::name_of(features & KvFeatures::any));
  if (args.cos.ndim == 1 || args.cos.ndim == 4)
    throw Error("cos", "shape " + shape_text(args.cos),
                std::string("[positions, r], or a row for each new row, ") +
                    (features & Features::ragged ? "[1, total, r]" : "[b or 1, n, r]"));
  features |= cache.k ? Features::cached : Features::returned;
  if (args.q) features |= Features::with_q;
  if (args.cos.ndim == 2) features |= Features::tables;
  return features;
}

void Op::room(const void* args, Bound& bound) {
  derive_room(static_cast<const Args*>(args)->append, kAppendDimensions<Args>, bound);
}
void Op::head_dim(const void* args, Bound& bound) {
  derive_head_dim(static_cast<const Args*>(args)->append, kAppendDimensions<Args>, bound);
}

Call Op::bind(const Args& args, Bound& bound) {
  P p;
  RotaryAppendKvParams f{};
  bind_append(args.append, kAppendDimensions<Args>, bound, p, f);
  p.no_cache = !args.append.cache.k;
  p.hq = args.q ? bound[arguments.id("hq")] : 0;
  p.q_dtype = args.q ? args.q.dtype : p.new_dtype;
  p.out_dtype = args.q_out ? args.q_out.dtype : args.k_out ? args.k_out.dtype : p.new_dtype;
  p.table_dtype = f.table_type = args.cos.dtype;
  const int64_t columns = bound[arguments.id("r")];
  p.rotary = f.rotary = args.rotary_dim == 0 ? columns : args.rotary_dim;
  p.rotary_offset = f.rotary_offset = args.rotary_offset;
  p.norm = args.q_norm || args.k_norm;
  p.plus_one = f.norm_plus_one = args.norm_plus_one;
  p.interleaved = f.interleaved = args.interleaved;
  p.rows = args.cos.ndim == 3, p.positions = static_cast<bool>(args.positions);
  p.half_tables = f.half_tables = columns != p.rotary;
  check(p);
  if (columns != p.rotary && columns != p.rotary / 2)
    throw Error("cos", "shape " + shape_text(args.cos),
                "rows of rotary_dim = " + std::to_string(p.rotary) + " or half as many");
  if (!(args.norm_eps >= 0) || !std::isfinite(args.norm_eps))
    throw Error("norm_eps", shortest(args.norm_eps), "0 or a finite number above");
  if (!p.rows && !args.positions && !args.append.seqlens)
    throw Error("positions", "no tensor", "positions, or the lengths of the sequences, which give them");
  if (!p.rows && args.cos.shape[0] == 0 && f.total > 0) throw Error("cos", "no rows", "a row for every position");
  check_shared(args, p);

  f.d = p.d, f.norm_eps = args.norm_eps;
  f.k = side_of(args.append.k_new, args.k_out, args.k_norm);
  if (args.q) f.q = side_of(args.q, args.q_out, args.q_norm);
  f.key_column[1] = p.values_are_keys ? f.side[0].size : -1;
  if (f.sides == 3) f.key_column[2] = f.side[0].size;
  f.cos = args.cos.data, f.sin = args.sin.data;
  // A row for each new row: ragged ones lie in one entry.
  f.cos_stride = p.rows ? strides_along(args.cos, 0, -1, 1, 2) : strides_along(args.cos, -1, -1, 0, 1);
  f.sin_stride = p.rows ? strides_along(args.sin, 0, -1, 1, 2) : strides_along(args.sin, -1, -1, 0, 1);
  f.position_count = p.rows ? 0 : args.cos.shape[0];
  if (args.positions) {
    f.positions = integers_of(args.positions, 1);
    f.positions_stride_b = args.positions.shape[0] > 1 ? args.positions.strides[0] : 0;
  }
  if (is_same(args.q, args.q_out)) bound.set_alias("q");
  if (is_same(args.append.k_new, args.k_out)) bound.set_alias("k_new");
  const bool is_empty = f.total == 0 || (p.hq == 0 && p.hk == 0);
  return {p, f, bound.device, is_empty, nullptr};
}

void Op::check_values(const Args& args, const Call& call) {
  if (call.device.type != DeviceType::cpu) return;
  const auto& f = std::get<RotaryAppendKvParams>(call.params);
  check_append_values(args.append, std::get<P>(call.problem), f);
  check_positions(args, f);
  check_angles(args, f);
}

void Op::set_scalars(const C& c, Args& args) {
  args.append.cache.kind = c::to_enum(c.kv_kind, KvFeatures::last, "cache.kind");
  args.norm_eps = c.norm_eps;
  args.norm_plus_one = c.norm_plus_one != 0;
  args.interleaved = c.interleaved != 0;
  args.rotary_dim = c.rotary_dim, args.rotary_offset = c.rotary_offset;
}

Needs needs_of(const RotaryAppendKvProblem& p) {
  return {set_of(p.kv_dtype), p.d, p.dv};
}

Cost cost_of(const RotaryAppendKvArgs& args, const Call& call) {
  const auto& p = std::get<P>(call.problem);
  const auto& f = std::get<RotaryAppendKvParams>(call.params);
  Cost cost = p.no_cache ? Cost{} : append_cost(args.append, p, f);
  const auto rows = static_cast<double>(f.total), hq = static_cast<double>(p.hq), hk = static_cast<double>(p.hk);
  cost.flops = rows * (hq + hk) * 3 * static_cast<double>(p.rotary);
  cost.flops += rows * ((args.q_norm ? hq : 0) + (args.k_norm ? hk : 0)) * 4 * static_cast<double>(p.d);
  cost.bytes += row_bytes(rows * hq, p.d, p.q_dtype) + whole_bytes(args.q_out) + whole_bytes(args.k_out);
  if (p.no_cache) cost.bytes += row_bytes(rows * hk, p.d, p.new_dtype);
  const auto columns = args.cos.shape[static_cast<std::size_t>(args.cos.ndim - 1)];
  const double angle_count = p.rows && p.ragged < 0 ? static_cast<double>(args.cos.shape[0] * p.n) : rows;
  cost.bytes += 2 * row_bytes(angle_count, columns, p.table_dtype);
  cost.bytes += whole_bytes(args.q_norm) + whole_bytes(args.k_norm);
  return cost;
}

}  // namespace rapt
