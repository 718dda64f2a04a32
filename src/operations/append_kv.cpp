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
#include "core/float_environment.hpp"
#include "core/span.hpp"
#include "core/text.hpp"
#include "operations/attention/check.hpp"
#include "operations/call.hpp"

namespace rapt {
namespace {

using std::int64_t;
using Kind = KvSource::Kind;
using P = AppendKvProblem;

constexpr Field<P> kFields[] = {
    {"dtype", false,
     [](const P& p, std::string_view key, std::string& text) {
       if (p.new_dtype == p.kv_dtype && p.new_dtype != DType::f32) print_word(text, key, to_string(p.new_dtype));
     },
     [](P& p, const Word& word) { p.new_dtype = p.kv_dtype = word.dtype(); }},
    {"new", false,
     [](const P& p, std::string_view key, std::string& text) {
       if (p.new_dtype != p.kv_dtype && p.new_dtype != DType::f32) print_word(text, key, to_string(p.new_dtype));
     },
     [](P& p, const Word& word) { p.new_dtype = word.dtype(); }},
    {"kv", false,
     [](const P& p, std::string_view key, std::string& text) {
       if (p.new_dtype != p.kv_dtype && p.kv_dtype != DType::f32) print_word(text, key, to_string(p.kv_dtype));
     },
     [](P& p, const Word& word) { p.kv_dtype = word.dtype(); }},
    device_field<P>(),
    size_field<P, &P::b>("b"),
    size_field<P, &P::hk>("hk"),
    size_field<P, &P::n>("n"),
    size_field<P, &P::sk>("sk"),
    size_field<P, &P::d>("d"),
    size_field_like<P, &P::dv, &P::d>("dv"),
    integer_field<P, &P::ragged, -1>("ragged"),
    integer_field<P, &P::page_size, 0>("page"),
    flag_field<P, &P::ring>("ring"),
    groups_field<P>(),
    own_groups_field<P, &P::k_groups>("k_groups"),
    own_groups_field<P, &P::v_groups>("v_groups"),
    flag_field<P, &P::zeros>("zeros"),
    integer_field<P, &P::k_tail, 0>("tail"),
    dtype_field<P, &P::k_tail_dtype>("tail_dtype"),
    flag_field<P, &P::given_scales>("given_scales"),
    flag_field<P, &P::values_are_keys>("values_are_keys"),
};

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

const void* element(const TensorView& t, int64_t index) {
  return static_cast<const char*>(t.data) + index * static_cast<int64_t>(size_of(t.dtype));
}

class Validator {
 public:
  explicit Validator(const AppendKvArgs& args)
      : args_(args), cache_(args.cache), device_(args.cache.k.device), host_(device_.type == DeviceType::cpu) {}

  Call run(std::span<const std::byte> workspace) {
    rows_of_cache();
    lengths();
    tail();
    AppendKvSide &k = f_.side[0], &v = f_.side[1];
    k = side("k", args_.k_new, cache_.k), v = side("v", args_.v_new, cache_.v);
    codings("k", k, cache_.k, cache_.k_scale, cache_.k_zero, p_.k_groups);
    codings("v", v, cache_.v, cache_.v_scale, cache_.v_zero, p_.v_groups);
    find_shared_columns();
    agree();
    check_overlaps(all_);
    check_apart(workspace, all_);
    if (host_) places();
    p_.device = device_.type;
    p_.d = k.size + p_.k_tail, p_.dv = v.size;
    p_.zeros = cache_.k_zero || cache_.v_zero;
    p_.values_are_keys = shared_ >= 0;
    if (host_) numbers("k", k);
    if (host_ && !p_.values_are_keys) numbers("v", v);
    f_.sides = p_.values_are_keys ? 1 : 2;
    const bool nothing = total_ == 0 || f_.hk == 0;
    if (p_.k_tail > 0 && !nothing) f_.side[f_.sides++] = tail_side();
    return {p_, f_, device_, nothing, nullptr};
  }

 private:
  void need(const std::string& name, const TensorView& t, int ndim, const char* shape, bool written = false) {
    if (t.ndim == 0) throw Error(name, "no tensor", shape);
    take(all_, name, t, written, device_);
    if (t.ndim != ndim) throw Error(name, "shape " + shape_text(t), shape);
  }
  // Elements of a row: of i4x2 there are two to a byte.
  static int64_t row_size(const TensorView& cache) { return cache.shape[3] * (cache.dtype == DType::i4x2 ? 2 : 1); }
  Integers integers(const std::string& name, const TensorView& t, const char* shape) {
    need(name, t, 1, shape);
    check_list(name, t);
    return integers_of(t);
  }

  // Whether `part` is columns first, first + 1, ... of `whole`: the same rows, from another element on.
  static bool is_columns(const TensorView& part, const TensorView& whole, int64_t first) {
    const auto last = static_cast<std::size_t>(whole.ndim - 1);
    if (part.ndim != whole.ndim || part.dtype != whole.dtype) return false;
    if (first < 0 || first > whole.shape[last] - part.shape[last]) return false;
    for (std::size_t i = 0; i <= last; ++i)
      if ((i < last && part.shape[i] != whole.shape[i]) || (part.shape[i] > 1 && part.strides[i] != whole.strides[i]))
        return false;
    return part.data == element(whole, first * whole.strides[last]);
  }

  // Values may be columns of the keys (latent attention): they are written with them, once, and so are their scales.
  void find_shared_columns() {
    const TensorView k = cache_.k, v = cache_.v;
    int64_t first = 0;
    if (k.shape[3] > 1) {
      const auto delta = reinterpret_cast<std::uintptr_t>(v.data) - reinterpret_cast<std::uintptr_t>(k.data);
      first = static_cast<int64_t>(delta) / (k.strides[3] * static_cast<int64_t>(size_of(k.dtype)));
    }
    if (all_.front().bytes == 0 || !is_columns(v, k, first)) return;
    shared_ = first * (k.dtype == DType::i4x2 ? 2 : 1);
    const int64_t group = f_.side[0].group, size = f_.side[1].size;
    for (const auto& [name, part, whole] :
         {std::tuple<const char*, TensorView, TensorView>{"cache.v_scale", cache_.v_scale, cache_.k_scale},
          {"cache.v_zero", cache_.v_zero, cache_.k_zero}}) {
      if (!part && !whole) continue;
      const bool is_part = part && whole && shared_ % group == 0 && part.shape[3] * group == size &&
                           is_columns(part, whole, shared_ / group);
      if (!is_part)
        throw Error(name, "other groups than those of the columns of cache.k that cache.v is",
                    "a view of these groups, which begin and end where cache.v does");
    }
    // They overlap what they are parts of.
    std::erase_if(all_, [](const Checked& t) {
      return t.name == "cache.v" || t.name == "cache.v_scale" || t.name == "cache.v_zero";
    });
  }

  // The columns of keys that are not quantised.
  void tail() {
    const TensorView t = cache_.k_tail, k = cache_.k;
    if (!t) return;
    need("cache.k_tail", t, 4, "cache.k's shape but for d", true);
    for (const std::size_t dim : {0, 1, 2})
      check_size("cache.k_tail", t, static_cast<int>(dim), k.shape[dim], "cache.k's size there");
    const int64_t size = row_size(k);
    if (t.shape[3] < 1 || t.shape[3] > kMaxHeadSize - size)
      throw Error("cache.k_tail", "shape " + shape_text(t), "1 to 8192 columns with those of cache.k");
    check_tail("cache.k_tail", k.dtype, size + t.shape[3], t.shape[3], t.dtype);
    p_.k_tail = t.shape[3], p_.k_tail_dtype = t.dtype;
  }
  AppendKvSide tail_side() const {
    const AppendKvSide& k = f_.side[0];
    AppendKvSide s{};
    s.from = element(args_.k_new, k.size * k.from_stride.d), s.to = cache_.k_tail.data;
    s.from_type = k.from_type, s.to_type = cache_.k_tail.dtype;
    s.from_stride = k.from_stride, s.to_stride = row_strides(cache_.k_tail, false, true);
    s.size = s.group = p_.k_tail;
    return s;
  }

  // The cache is there first: what else is given has to fit it.
  void rows_of_cache() {
    if (cache_.kind != Kind::strided && cache_.kind != Kind::paged && cache_.kind != Kind::ring)
      throw Error("cache.kind", "ragged or unknown", "one of KvCache's factories");
    const TensorView k = cache_.k, v = cache_.v;
    for (const auto& [name, cache] : {std::tuple{"cache.k", k}, {"cache.v", v}}) {
      need(name, cache, 4, cache_.kind == Kind::paged ? "[pages, hk, page_size, d]" : "[b, hk, s, d]", true);
      check_cache_type(name, cache.dtype);
      if (cache.shape[3] < 1 || row_size(cache) > kMaxHeadSize)
        throw Error(name, "rows of " + std::to_string(row_size(cache)), "1 to 8192 elements");
    }
    if (v.dtype != k.dtype)
      throw Error("cache.v", "dtype " + std::string(to_string(v.dtype)),
                  "cache.k's, " + std::string(to_string(k.dtype)));
    for (const std::size_t dim : {0, 1, 2})
      check_size("cache.v", v, static_cast<int>(dim), k.shape[dim], "cache.k's size there");
    p_.hk = f_.hk = k.shape[1], p_.kv_dtype = k.dtype;
    f_.ring = p_.ring = cache_.kind == Kind::ring;
    f_.page_size = cache_.kind == Kind::strided ? 0 : k.shape[2];
    if (cache_.kind == Kind::paged) {
      need("cache.block_table", cache_.block_table, 2, "[b, n] of pages");
      const TensorView& t = cache_.block_table;
      check_integers("cache.block_table", t);
      f_.pages = integers_of(t, 1);
      f_.pages_stride_b = t.strides[0], f_.page_count = k.shape[0];
      p_.page_size = k.shape[2];
    } else if (cache_.block_table) {
      throw Error("cache.block_table", "a table for a cache without pages", "KvCache::paged");
    }
  }

  void lengths() {
    const bool ragged = static_cast<bool>(args_.cu_seqlens);
    need("k_new", args_.k_new, ragged ? 3 : 4, ragged ? "[total, hk, d]" : "[b, hk, n, d]");
    f_.len_before = integers("seqlens", args_.seqlens, "[b] lengths before the call");
    const int64_t b = p_.b = f_.b = args_.seqlens.shape[0];
    int64_t given = args_.k_new.shape[0];  // the batch of the new rows
    p_.n = f_.n = ragged ? 0 : args_.k_new.shape[2];
    if (ragged) {
      p_.ragged = total_ = given;
      f_.from_begin = integers("cu_seqlens", args_.cu_seqlens, "[b + 1] starts");
      // On a device of any lengths, but none has more rows than there is room for.
      p_.n = host_ ? check_starts("cu_seqlens", f_.from_begin, args_.cu_seqlens.shape[0], total_) : total_;
      given = args_.cu_seqlens.shape[0] - 1;
    }
    // Of three batches that should be one, the one that is alone is named.
    const bool paged = cache_.kind == Kind::paged;
    const TensorView room = paged ? cache_.block_table : cache_.k;
    if (b != room.shape[0]) {
      if (b == given) check_size(paged ? "cache.block_table" : "cache.k", room, 0, b, "the batch b");
      check_size("seqlens", args_.seqlens, 0, room.shape[0], "the cache's batch b");
    }
    if (given != b) {
      if (ragged) check_size("cu_seqlens", args_.cu_seqlens, 0, b + 1, "b + 1");
      check_size("k_new", args_.k_new, 0, b, "the cache's batch b");
    }
    if (!ragged && (__builtin_mul_overflow(b, p_.n, &total_) || total_ > kMaxSize))
      throw Error("k_new", "shape " + shape_text(args_.k_new), "at most 2^48 new rows");
    f_.room = p_.sk = room_for_keys();
    f_.total = total_;
    if (!host_ && ragged && !p_.ring) p_.n = std::min(p_.n, p_.sk);
    for (int64_t i = 0; host_ && i < b; ++i)
      if (const int64_t n = f_.len_before[i]; n < 0 || n > kMaxOffset)
        throw Error("seqlens", "length " + std::to_string(n) + " of sequence " + std::to_string(i), "0 to 2^52");
  }
  // Of a sequence; of a ring its rows.
  int64_t room_for_keys() const {
    const int64_t rows = cache_.k.shape[2];
    int64_t keys = rows;
    if (cache_.kind == Kind::paged && __builtin_mul_overflow(cache_.block_table.shape[1], rows, &keys)) keys = kMaxSize;
    return std::min(keys, kMaxSize);
  }

  AppendKvSide side(const std::string& name, const TensorView& fresh, const MutableTensorView& cache) {
    const bool ragged = static_cast<bool>(args_.cu_seqlens);
    const std::string new_name = name + "_new";
    if (name != "k") need(new_name, fresh, ragged ? 3 : 4, ragged ? "[total, hk, dv]" : "[b, hk, n, dv]");
    check_float(new_name, fresh.dtype);
    if (name == "k") p_.new_dtype = fresh.dtype;
    AppendKvSide s{};
    s.from = fresh.data, s.to = cache.data;
    s.from_type = fresh.dtype, s.to_type = cache.dtype;
    s.size = s.group = row_size(cache);
    const bool is_k = name == "k";
    check_size(new_name, fresh, fresh.ndim - 1, s.size + (is_k ? p_.k_tail : 0),
               is_k ? "the cache's head size d" : "the cache's head size dv");
    s.from_stride = row_strides(fresh, ragged, true), s.to_stride = row_strides(cache, false, true);
    return s;
  }

  void codings(const std::string& side_name, AppendKvSide& s, const TensorView& cache, const MutableTensorView& scale,
               const MutableTensorView& zero, int64_t& groups) {
    const std::string scale_name = "cache." + side_name + "_scale", zero_name = "cache." + side_name + "_zero";
    if (zero && !is_integer(cache.dtype))
      throw Error(zero_name, "zeros for " + std::string(to_string(cache.dtype)), "none: i8 and i4x2 have zeros");
    if (!scale) return check_scales(scale_name, cache.dtype, s.size, 0);
    s.computes_scale = scale.shape[0] == cache.shape[0] && scale.shape[2] == cache.shape[2];
    for (const auto& [name, t] : {std::tuple<std::string, TensorView>{scale_name, scale}, {zero_name, zero}}) {
      if (!t) continue;
      need(name, t, 4, "the cache's shape with groups for elements, sizes of 1 broadcasting", s.computes_scale);
      check_f32(name, t.dtype);
      check_size(name, t, 1, cache.shape[1], "the cache's heads hk");
      for (const std::size_t dim : {0, 2})
        if (t.shape[dim] != 1)
          check_size(name, t, static_cast<int>(dim), cache.shape[dim], "1 or the cache's size there");
      if (t.shape[3] < 1) throw Error(name, "shape " + shape_text(t), "1 group of a row or more");
      check_scales(name, cache.dtype, s.size, t.shape[3]);
    }
    groups = scale.shape[3];
    s.group = s.size / groups;
    s.scale = static_cast<float*>(scale.data), s.scale_stride = row_strides(scale, false, true);
    if (!s.computes_scale) p_.given_scales = true;
    if (!zero) return;
    check_size(zero_name, zero, 3, groups, "the scale's groups");
    if ((zero.shape[0] == cache.shape[0] && zero.shape[2] == cache.shape[2]) != s.computes_scale)
      throw Error(zero_name, "shape " + shape_text(zero), "an element for every row just where scales have");
    s.zero = static_cast<float*>(zero.data), s.zero_stride = row_strides(zero, false, true);
  }

  // What the new rows of k and v have in common, with the cache too.
  void agree() const {
    for (const auto& [name, t] :
         {std::tuple<const char*, const TensorView&>{"k_new", args_.k_new}, {"v_new", args_.v_new}}) {
      check_size(name, t, 1, f_.hk, "the cache's heads hk");
      check_size(name, t, 0, args_.k_new.shape[0], "k_new's size there");
      if (!args_.cu_seqlens) check_size(name, t, 2, args_.k_new.shape[2], "k_new's rows n");
    }
    const int64_t dv = f_.side[1].size;
    if (shared_ >= 0 && span_of("v_new", args_.v_new, false) > 0 && !is_columns(args_.v_new, args_.k_new, shared_))
      throw Error("v_new", "rows of its own for values that are columns of cache.k",
                  "columns " + std::to_string(shared_) + " to " + std::to_string(shared_ + dv - 1) +
                      " of k_new, as cache.v is of cache.k");
  }

  // Every new row has a place of its own.
  void places() const {
    const int64_t capacity = f_.ring && p_.sk > 0 ? std::numeric_limits<int64_t>::max() : p_.sk;
    for (int64_t i = 0; i < f_.b; ++i)
      if (const int64_t n = new_rows(f_, i).count; n > 0 && f_.len_before[i] > capacity - n)
        throw Error("seqlens", std::to_string(f_.len_before[i]) + " keys and " + std::to_string(n) + " new ones",
                    "at most " + std::to_string(capacity) + ", the cache's room for sequence " + std::to_string(i));
    if (cache_.kind != Kind::paged) return;
    struct Run {
      int64_t page, begin, end;
    };
    std::vector<Run> runs;
    const int64_t rows = cache_.k.shape[2], pages = cache_.k.shape[0];
    for (int64_t i = 0; i < f_.b; ++i) {
      const int64_t begin = f_.len_before[i], end = begin + new_rows(f_, i).count;
      for (int64_t at = begin; at < end;) {
        const int64_t page = f_.pages.element(i * f_.pages_stride_b + at / rows * f_.pages.stride), row = at % rows,
                      stop = std::min(rows, row + end - at);
        if (page < 0 || page >= pages)
          throw Error(
              "cache.block_table",
              "page " + std::to_string(page) + " for key " + std::to_string(at) + " of sequence " + std::to_string(i),
              pages == 0 ? "no new rows, as cache.k has no pages"
                         : "0 to " + std::to_string(pages - 1) + ", one of cache.k's pages");
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
  void numbers(const std::string& name, const AppendKvSide& s) const {
    if (!s.scale || s.computes_scale) return;
    for (int64_t i = 0; i < f_.b; ++i) {
      const NewRows rows = new_rows(f_, i);
      for (int64_t t = f_.ring ? std::max<int64_t>(0, rows.count - f_.page_size) : 0; t < rows.count; ++t)
        for (int64_t h = 0; h < f_.hk; ++h) {
          const auto check_finite = [&](const char* what, const float* data, const Strides& stride, bool positive) {
            const float* const at = data + key_index(f_, stride, i, h, 0, f_.len_before[i] + t);
            for (int64_t g = 0; data && g < s.size / s.group; ++g)
              if (const float x = at[g * stride.d]; !std::isfinite(x) || (positive && !(x > 0)))
                throw Error("cache." + name + what, shortest(x),
                            positive ? "finite numbers above 0" : "finite numbers");
          };
          check_finite("_scale", s.scale, s.scale_stride, true);
          if (s.zero) check_finite("_zero", s.zero, s.zero_stride, false);
          if (!is_integer(s.to_type)) continue;
          const int64_t from = i * s.from_stride.b + h * s.from_stride.h + (rows.first + t) * s.from_stride.s;
          for (int64_t c = 0; c < s.size; ++c)
            if (const float x = non_finite_part(s.from, s.from_type, from + c * s.from_stride.d); x != 0)
              throw Error(name + "_new", shortest(x), "finite numbers where the scale of integers is given");
        }
    }
  }

  const AppendKvArgs& args_;
  const KvCache& cache_;
  const Device device_;
  const bool host_;  // lengths, tables and scales can be read here
  P p_{};
  AppendKvParams f_{};
  std::vector<Checked> all_;
  int64_t total_ = 0;    // new rows
  int64_t shared_ = -1;  // the column of cache.k that cache.v begins at, if it lies there
};

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

AppendKvProblem AppendKvProblem::of(const AppendKvArgs& args) {
  return std::get<AppendKvProblem>(validate(args).problem);
}

void check(const AppendKvProblem& p) {
  for (const auto& [name, size] : {std::pair{"b", p.b}, {"hk", p.hk}, {"n", p.n}, {"sk", p.sk}})
    if (size < 0 || size > kMaxSize) throw Error(name, std::to_string(size), "0 to 2^48");
  if (p.ragged < -1 || p.ragged > kMaxSize) throw Error("cu_seqlens", std::to_string(p.ragged), "0 to 2^48 new rows");
  if (p.ragged >= 0 && (p.ragged < p.n || (p.n > 0 ? (p.ragged - 1) / p.n >= p.b : p.ragged > 0)))
    throw Error("cu_seqlens", std::to_string(p.ragged) + " new rows", "between the longest sequence's and b times it");
  if (int64_t rows = 0; p.ragged < 0 && (__builtin_mul_overflow(p.b, p.n, &rows) || rows > kMaxSize))
    throw Error("k_new", "b = " + std::to_string(p.b) + ", n = " + std::to_string(p.n), "at most 2^48 new rows");
  if (p.b > 0 && p.n > (p.ring && p.sk > 0 ? kMaxSize : p.sk))
    throw Error("seqlens", std::to_string(p.n) + " new keys",
                "at most sk = " + std::to_string(p.sk) + ", the cache's room");
  check_float("k_new", p.new_dtype);
  check_cache_type("cache.k", p.kv_dtype);
  for (const auto& [name, size] : {std::pair{"cache.k", p.d}, {"cache.v", p.dv}})
    if (size < 1 || size > kMaxHeadSize) throw Error(name, "rows of " + std::to_string(size), "1 to 8192 elements");
  if (p.page_size < 0 || (p.page_size > 0 && p.sk % p.page_size != 0))
    throw Error("cache.k", "pages of " + std::to_string(p.page_size) + " rows",
                "a divisor of sk = " + std::to_string(p.sk));
  if (p.page_size > 0 && p.ring) throw Error("cache.kind", "pages and a ring", "one of them");
  const int64_t d = p.d - p.k_tail;  // of cache.k's own rows
  check_tail("cache.k_tail", p.kv_dtype, p.d, p.k_tail, p.k_tail_dtype);
  check_scales("cache.k_scale", p.kv_dtype, d, p.k_groups);
  check_scales("cache.v_scale", p.kv_dtype, p.dv, p.v_groups);
  const bool scaled = p.k_groups > 0 || p.v_groups > 0;
  if (p.given_scales && !scaled) throw Error("cache.k_scale", "no tensor", "scales that are given");
  if (p.zeros && !is_integer(p.kv_dtype))
    throw Error("cache.k_zero", "zeros for " + std::string(to_string(p.kv_dtype)), "none: i8 and i4x2 have zeros");
  if (!p.values_are_keys) return;
  if (p.dv > d) throw Error("cache.v", "more columns than cache.k has", "memory of its own");
  if (scaled && (p.k_groups == 0 || p.v_groups == 0 || d / p.k_groups != p.dv / p.v_groups))
    throw Error("cache.v_scale", std::to_string(p.v_groups) + " groups", "those that cache.k has in these columns");
}

Call validate(const AppendKvArgs& args, std::span<const std::byte> workspace) {
  const FloatEnvironment environment;
  return Validator(args).run(workspace);
}

}  // namespace rapt
