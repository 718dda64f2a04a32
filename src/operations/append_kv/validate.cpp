// append_kv: arguments -> Call, or an Error that names the argument; and its problem's text. Nothing is written, and
// nothing is read but lengths, block tables, and, where codes are made with given scales, those scales and the new
// rows; on a device nothing at all.
#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <span>
#include <string>
#include <tuple>
#include <vector>

#include "core/dtypes.hpp"
#include "core/fields.hpp"
#include "core/span.hpp"
#include "core/text.hpp"
#include "operations/append_kv/operation.hpp"
#include "operations/attention/check.hpp"
#include "operations/c_values.hpp"

namespace rapt {
namespace {

using std::int64_t;
using Kind = KvSource::Kind;
using P = AppendKvProblem;
using Op = OperationOf<AppendKvArgs>;

constexpr auto& kFields = append_fields<P>;

// An element that is Inf or NaN; 0 for numbers.
float non_finite_part(const void* data, DType dtype, int64_t index) {
  constexpr float kInf = std::numeric_limits<float>::infinity(), kNan = std::numeric_limits<float>::quiet_NaN();
  if (dtype == DType::f32) {
    const float x = static_cast<const float*>(data)[index];
    return std::isfinite(x) ? 0 : x;
  }
  const unsigned bits = static_cast<const std::uint16_t*>(data)[index],
                 exponent = dtype == DType::f16 ? 0x7c00 : 0x7f80;
  if ((bits & exponent) != exponent) return 0;
  if ((bits & 0x7fff & ~exponent) != 0) return kNan;
  return bits & 0x8000 ? -kInf : kInf;
}

// Elements of a row: of i4x2 there are two to a byte.
int64_t row_size(const TensorView& cache) {
  return cache.shape[3] * (cache.dtype == DType::i4x2 ? 2 : 1);
}

AppendKvSide side_of(const TensorView& fresh, const MutableTensorView& cache) {
  AppendKvSide s{};
  s.from = fresh.data, s.to = cache.data;
  s.from_type = fresh.dtype, s.to_type = cache.dtype;
  s.from_stride = fresh.ndim == 3 ? strides_along(fresh, -1, 1, 0, 2) : aligned_strides(fresh, true);
  s.to_stride = aligned_strides(cache, true);
  s.size = s.group = row_size(cache);
  return s;
}

// The last columns of the new keys, and the tensor that they go to.
AppendKvSide tail_side(const AppendKvArgs& args, const AppendKvSide& k) {
  AppendKvSide s = side_of(args.k_new, args.cache.k_tail);
  s.from = element_at(args.k_new, k.size * k.from_stride.d);
  return s;
}

// Whether scales or zeros have an element for every row of the cache.
bool has_all_rows(const TensorView& scale, const TensorView& cache) {
  return scale.shape[0] == cache.shape[0] && scale.shape[2] == cache.shape[2];
}

// One side's scales and zeros, whose groups are `groups` of a row.
struct Coding {
  const char *scale_name, *zero_name;
  const MutableTensorView &scale, &zero;
  int64_t groups;
  bool is_computed;
};

void set_coding(const Coding& c, const TensorView& cache, AppendKvSide& s) {
  if (c.zero && !needs_scales(cache.dtype))
    throw Error(c.zero_name, "zeros for " + std::string(to_string(cache.dtype)), "none: i8 and i4x2 have zeros");
  if (!c.scale) return check_scales(c.scale_name, cache.dtype, s.size, 0);
  if (c.groups < 1) throw Error(c.scale_name, "shape " + shape_text(c.scale), "1 group of a row or more");
  check_scales(c.scale_name, cache.dtype, s.size, c.groups);
  s.group = s.size / c.groups;
  s.computes_scale = c.is_computed;
  s.scale = static_cast<float*>(c.scale.data), s.scale_stride = aligned_strides(c.scale, true);
  if (!c.zero) return;
  if (has_all_rows(c.zero, cache) != c.is_computed)
    throw Error(c.zero_name, "shape " + shape_text(c.zero), "an element for every row just where scales have");
  s.zero = static_cast<float*>(c.zero.data), s.zero_stride = aligned_strides(c.zero, true);
}

// Whether `part` is columns first, first + 1, ... of `whole`: the same rows, from another element on.
bool is_columns(const TensorView& part, const TensorView& whole, int64_t first) {
  const auto last = static_cast<std::size_t>(whole.ndim - 1);
  if (part.ndim != whole.ndim || part.dtype != whole.dtype) return false;
  if (first < 0 || first > whole.shape[last] - part.shape[last]) return false;
  for (std::size_t i = 0; i <= last; ++i)
    if ((i < last && part.shape[i] != whole.shape[i]) || (part.shape[i] > 1 && part.strides[i] != whole.strides[i]))
      return false;
  return part.data == element_at(whole, first * whole.strides[last]);
}

// The column of cache.k that cache.v begins at, if it lies there (latent attention): it is written with the keys, once.
// -1: it has memory of its own.
int64_t shared_column(const KvCache& cache) {
  const TensorView k = cache.k, v = cache.v;
  int64_t first = 0;
  if (k.shape[3] > 1) {
    const auto delta = reinterpret_cast<std::uintptr_t>(v.data) - reinterpret_cast<std::uintptr_t>(k.data);
    first = static_cast<int64_t>(delta) / (k.strides[3] * static_cast<int64_t>(size_of(k.dtype)));
  }
  if (!is_columns(v, k, first)) return -1;
  return first * (k.dtype == DType::i4x2 ? 2 : 1);
}

// Of values that are columns of the keys from `first` on: scales are those of these columns, and so are the new rows.
void check_shared_columns(const AppendKvArgs& args, const AppendKvParams& f, int64_t first) {
  const KvCache& cache = args.cache;
  const int64_t group = f.side[0].group, dv = f.side[1].size;
  for (const auto& [name, part, whole] :
       {std::tuple<const char*, TensorView, TensorView>{"cache.v_scale", cache.v_scale, cache.k_scale},
        {"cache.v_zero", cache.v_zero, cache.k_zero}}) {
    if (!part && !whole) continue;
    const bool is_part =
        part && whole && first % group == 0 && part.shape[3] * group == dv && is_columns(part, whole, first / group);
    if (!is_part)
      throw Error(name, "other groups than those of the columns of cache.k that cache.v is",
                  "a view of these groups, which begin and end where cache.v does");
  }
  if (f.total > 0 && f.hk > 0 && !is_columns(args.v_new, args.k_new, first))
    throw Error("v_new", "rows of its own for values that are columns of cache.k",
                "columns " + std::to_string(first) + " to " + std::to_string(first + dv - 1) +
                    " of k_new, as cache.v is of cache.k");
}

// Whether a cache of any room takes any number of keys.
bool is_endless(const CacheProblem& p) {
  return KvFeatures::of(p) & KvFeatures::endless;
}

// Every new row has a place of its own.
void check_places(const KvCache& cache, const AppendKvParams& f, bool is_endless) {
  const int64_t capacity = is_endless && f.room > 0 ? std::numeric_limits<int64_t>::max() : f.room;
  for (int64_t i = 0; i < f.b; ++i)
    if (const int64_t n = new_rows(f, i).count; n > 0 && f.len_before[i] > capacity - n)
      throw Error("seqlens", std::to_string(f.len_before[i]) + " keys and " + std::to_string(n) + " new ones",
                  "at most " + std::to_string(capacity) + ", the cache's room for sequence " + std::to_string(i));
  if (cache.kind != Kind::paged) return;
  struct Run {
    int64_t page, begin, end;
  };
  std::vector<Run> runs;
  const int64_t rows = cache.k.shape[2];
  for (int64_t i = 0; i < f.b; ++i) {
    const int64_t begin = f.len_before[i], end = begin + new_rows(f, i).count;
    for (int64_t at = begin; at < end;) {
      const int64_t page = f.pages.element(i * f.pages_stride_b + at / rows * f.pages.stride), row = at % rows,
                    stop = std::min(rows, row + end - at);
      check_page("cache.block_table", "cache.k", f.page_count, page,
                 [&] { return " for key " + std::to_string(at) + " of sequence " + std::to_string(i); });
      runs.push_back({page, row, stop});
      at += stop - row;
    }
  }
  std::sort(runs.begin(), runs.end(),
            [](const Run& a, const Run& b) { return std::tie(a.page, a.begin) < std::tie(b.page, b.begin); });
  for (std::size_t i = 1; i < runs.size(); ++i)
    if (runs[i].page == runs[i - 1].page && runs[i].begin < runs[i - 1].end)
      throw Error("cache.block_table", "page " + std::to_string(runs[i].page) + " twice for new keys",
                  "a row of its own for every one");
}

// Given scales are usable, and so are the numbers that integers are made of with them.
void check_numbers(const std::string& name, const AppendKvParams& f, const AppendKvSide& s) {
  if (!s.scale || s.computes_scale) return;
  for (int64_t i = 0; i < f.b; ++i) {
    const NewRows rows = new_rows(f, i);
    for (int64_t t = first_kept(f, rows.count); t < rows.count; ++t)
      for (int64_t h = 0; h < f.hk; ++h) {
        const auto check_finite = [&](const char* what, const float* data, const Strides& stride, bool positive) {
          const float* const at = data + key_index(f, stride, i, h, 0, f.len_before[i] + t);
          for (int64_t g = 0; data && g < s.size / s.group; ++g)
            if (const float x = at[g * stride.d]; !std::isfinite(x) || (positive && !(x > 0)))
              throw Error("cache." + name + what, shortest(x), positive ? "finite numbers above 0" : "finite numbers");
        };
        check_finite("_scale", s.scale, s.scale_stride, true);
        if (s.zero) check_finite("_zero", s.zero, s.zero_stride, false);
        if (!needs_scales(s.to_type)) continue;
        const int64_t from = i * s.from_stride.b + h * s.from_stride.h + (rows.first + t) * s.from_stride.s;
        for (int64_t c = 0; c < s.size; ++c)
          if (const float x = non_finite_part(s.from, s.from_type, from + c * s.from_stride.d); x != 0)
            throw Error(name + "_new", shortest(x), "finite numbers where the scale of integers is given");
      }
  }
}

}  // namespace

std::string AppendKvProblem::to_string() const {
  return print_fields("append_kv", *this, kFields);
}

AppendKvProblem AppendKvProblem::parse(std::string_view text) {
  const Words words(text, "append_kv");
  P p;
  words.read(p, kFields);
  if (!words.has("dv")) p.dv = p.d;
  return p;
}

void check(const AppendKvProblem& p) {
  for (const auto& [name, size] : {std::pair{"b", p.b}, {"hk", p.hk}, {"n", p.n}, {"sk", p.sk}})
    if (size < 0 || size > kMaxSize) throw Error(name, std::to_string(size), "0 to 2^48");
  if (p.ragged < -1 || p.ragged > kMaxSize) throw Error("cu_seqlens", std::to_string(p.ragged), "0 to 2^48 new rows");
  check_ragged("cu_seqlens", p.ragged, "new rows", p.b, p.n);
  if (int64_t rows = 0; p.ragged < 0 && (__builtin_mul_overflow(p.b, p.n, &rows) || rows > kMaxSize))
    throw Error("k_new", "b = " + std::to_string(p.b) + ", n = " + std::to_string(p.n), "at most 2^48 new rows");
  if (p.b > 0 && p.n > (is_endless(p) && p.sk > 0 ? kMaxSize : p.sk))
    throw Error("seqlens", std::to_string(p.n) + " new keys",
                "at most sk = " + std::to_string(p.sk) + ", the cache's room");
  check_type("k_new", p.new_dtype, kFloatTypes);
  check_type("cache.k", p.kv_dtype, kCacheTypes);
  for (const auto& [name, size] : {std::pair{"cache.k", p.d}, {"cache.v", p.dv}})
    if (size < 1 || size > kMaxHeadDim) throw Error(name, "rows of " + std::to_string(size), "1 to 8192 elements");
  check_cache(p, p.sk, "cache.k", "cache.kind");
  const int64_t d = p.d - p.k_tail;  // of cache.k's own rows
  check_tail("cache.k_tail", p.kv_dtype, p.d, p.k_tail, p.k_tail_dtype);
  check_scales("cache.k_scale", p.kv_dtype, d, p.k_groups);
  check_scales("cache.v_scale", p.kv_dtype, p.dv, p.v_groups);
  const bool scaled = p.k_groups > 0 || p.v_groups > 0;
  if (p.given_scales && !scaled) throw Error("cache.k_scale", "no tensor", "scales that are given");
  if (p.zeros && !needs_scales(p.kv_dtype))
    throw Error("cache.k_zero", "zeros for " + std::string(to_string(p.kv_dtype)), "none: i8 and i4x2 have zeros");
  if (!p.values_are_keys) return;
  if (p.dv > d) throw Error("cache.v", "more columns than cache.k has", "memory of its own");
  if (scaled && (p.k_groups == 0 || p.v_groups == 0 || d / p.k_groups != p.dv / p.v_groups))
    throw Error("cache.v_scale", std::to_string(p.v_groups) + " groups", "those that cache.k has in these columns");
}

unsigned AppendFeatures::of(const AppendKvArgs& args) {
  const KvCache& cache = args.cache;
  constexpr const char* kWanted = "one of KvCache's factories";
  unsigned features = KvFeatures::of(cache.kind, "cache.kind", kWanted);
  if (!(features & KvFeatures::caches)) throw Error("cache.kind", KvFeatures::name_of(features), kWanted);
  if (args.cu_seqlens) features |= ragged;
  if (has_all_rows(cache.k_scale, cache.k)) features |= computes_k;
  if (has_all_rows(cache.v_scale, cache.v)) features |= computes_v;
  return features;
}

void derive_room(const AppendKvArgs& args, const AppendDimensions& dims, Bound& bound) {
  const KvCache& cache = args.cache;
  if (!cache.k) return;
  for (const auto& [name, size] : {std::pair{"cache.k", bound[dims.dk]}, {"cache.v", bound[dims.dv]}})
    if (size < 1 || size > kMaxHeadDim) throw Error(name, "rows of " + std::to_string(size), "1 to 8192 elements");
  const bool is_paged = bound.features & KvFeatures::paged;
  if (is_paged) {
    int64_t room = 0;
    if (__builtin_mul_overflow(bound[dims.m], cache.k.shape[2], &room)) room = kMaxSize;
    bound.derive(dims.sk, std::min(room, kMaxSize));
  }
  // Of three batches that should be one, the one that is alone is named.
  const int64_t b = args.seqlens.shape[0], fresh = args.cu_seqlens ? args.cu_seqlens.shape[0] - 1 : args.k_new.shape[0];
  if (b != fresh || b == bound[dims.b]) return;
  throw Error(is_paged ? "cache.block_table" : "cache.k",
              "shape " + shape_text(is_paged ? cache.block_table : TensorView(cache.k)),
              "the batch b = " + std::to_string(b));
}

// The columns of keys that are quantised, and those that are not.
void derive_head_dim(const AppendKvArgs& args, const AppendDimensions& dims, Bound& bound) {
  if (!args.cache.k) return;
  const TensorView tail = args.cache.k_tail;
  const int64_t size = bound[dims.dk];
  bound.derive(dims.d, size + (tail ? tail.shape[3] : 0));
  if (!tail) return;
  if (tail.shape[3] < 1 || tail.shape[3] > kMaxHeadDim - size)
    throw Error("cache.k_tail", "shape " + shape_text(tail), "1 to 8192 columns with those of cache.k");
  check_tail("cache.k_tail", args.cache.k.dtype, size + tail.shape[3], tail.shape[3], tail.dtype);
}

void bind_append(const AppendKvArgs& args, const AppendDimensions& dims, Bound& bound, P& p, AppendKvParams& f) {
  using Features = AppendFeatures;
  const KvCache& cache = args.cache;
  const bool is_host = bound.device.type == DeviceType::cpu;  // lengths, tables and scales can be read here
  const bool is_ragged = bound.features & Features::ragged;
  p.device = bound.device.type;
  p.new_dtype = args.k_new.dtype, p.kv_dtype = cache.k ? cache.k.dtype : args.k_new.dtype;
  p.b = f.b = bound[dims.b], p.hk = f.hk = bound[dims.hk];
  p.d = bound[dims.d], p.dv = cache.k ? bound[dims.dv] : p.d;
  if (cache.k) {
    p.sk = f.room = bound[dims.sk];
    fill_cache(bound.features, cache.k.shape[2], p);
    fill_layout(p, p.sk, f);
    KeyKinds::visit(bound.features & KvFeatures::caches, [&]<class K>(K) {
      if constexpr (KeyKinds::can_be<K, CacheProblem>) K::fill_tensors(cache, f);
    });
  }
  if (args.seqlens) f.len_before = integers_of(args.seqlens);
  if (is_ragged) {
    p.ragged = f.total = bound[dims.total];
    f.from_begin = integers_of(args.cu_seqlens);
    // On a device of any lengths, but none has more rows than there is room for.
    p.n = is_host                     ? check_starts("cu_seqlens", f.from_begin, args.cu_seqlens.shape[0], f.total)
          : is_endless(p) || !cache.k ? f.total
                                      : std::min(f.total, p.sk);
  } else {
    p.n = f.n = bound[dims.n];
    if (__builtin_mul_overflow(p.b, p.n, &f.total) || f.total > kMaxSize)
      throw Error("k_new", "shape " + shape_text(args.k_new), "at most 2^48 new rows");
  }
  for (int64_t i = 0; is_host && f.len_before && i < p.b; ++i)
    if (const int64_t n = f.len_before[i]; n < 0 || n > kMaxOffset)
      throw Error("seqlens", "length " + std::to_string(n) + " of sequence " + std::to_string(i), "0 to 2^52");

  if (!cache.k) return;
  AppendKvSide &k = f.side[0], &v = f.side[1];
  k = side_of(args.k_new, cache.k), v = side_of(args.v_new, cache.v);
  if (cache.k_scale) p.k_groups = bound[dims.k_groups];
  if (cache.v_scale) p.v_groups = bound[dims.v_groups];
  set_coding({"cache.k_scale", "cache.k_zero", cache.k_scale, cache.k_zero, p.k_groups,
              (bound.features & Features::computes_k) != 0},
             cache.k, k);
  set_coding({"cache.v_scale", "cache.v_zero", cache.v_scale, cache.v_zero, p.v_groups,
              (bound.features & Features::computes_v) != 0},
             cache.v, v);
  p.zeros = cache.k_zero || cache.v_zero;
  p.given_scales = (k.scale && !k.computes_scale) || (v.scale && !v.computes_scale);
  if (cache.k_tail) p.k_tail = cache.k_tail.shape[3], p.k_tail_dtype = cache.k_tail.dtype;

  const int64_t shared = bound.tensors().front().bytes > 0 ? shared_column(cache) : -1;
  p.values_are_keys = shared >= 0;
  if (p.values_are_keys) {
    check_shared_columns(args, f, shared);
    for (const char* name : {"cache.v", "cache.v_scale", "cache.v_zero"}) bound.set_alias(name);
  }
  f.sides = p.values_are_keys ? 1 : 2;
  if (p.k_tail > 0 && f.total > 0 && f.hk > 0) f.side[f.sides++] = tail_side(args, k);
}

void check_append_values(const AppendKvArgs& args, const P& p, const AppendKvParams& f) {
  if (f.sides == 0) return;
  check_places(args.cache, f, is_endless(p));
  check_numbers("k", f, f.side[0]);
  if (!p.values_are_keys) check_numbers("v", f, f.side[1]);
}

void Op::room(const void* args, Bound& bound) {
  derive_room(*static_cast<const Args*>(args), kAppendDimensions<Args>, bound);
}
void Op::head_dim(const void* args, Bound& bound) {
  derive_head_dim(*static_cast<const Args*>(args), kAppendDimensions<Args>, bound);
}

Call Op::bind(const Args& args, Bound& bound) {
  P p;
  AppendKvParams f{};
  bind_append(args, kAppendDimensions<Args>, bound, p, f);
  return {p, f, bound.device, f.total == 0 || f.hk == 0, nullptr};
}

void Op::check_values(const Args& args, const Call& call) {
  if (call.device.type != DeviceType::cpu) return;
  check_append_values(args, std::get<P>(call.problem), std::get<AppendKvParams>(call.params));
}

void Op::set_scalars(const C& c, Args& args) {
  args.cache.kind = c::to_enum(c.kv_kind, KvFeatures::last, "cache.kind");
}

Needs needs_of(const AppendKvProblem& p) {
  return {set_of(p.kv_dtype), p.d, p.dv};
}

}  // namespace rapt
