#include "rapt/kv_cache.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <span>
#include <string>
#include <tuple>
#include <vector>

#include "dtypes.hpp"
#include "float_environment.hpp"
#include "float_rows.hpp"
#include "span.hpp"
#include "text.hpp"

namespace rapt {
namespace {

using std::int64_t;
using Kind = KvSource::Kind;

float largest(DType byte_float) {
  return byte_float == DType::f8e4m3 ? F8e4m3::largest() : F8e5m2::largest();
}

// Scale and zero of a group: x is stored as the number nearest to x / scale + zero.
struct Coding {
  float scale = 1, zero = 0;
};

// The integers from -count to count - 1.
int64_t half_range(DType integers) {
  return integers == DType::i8 ? 128 : 8;
}

// Maps `range` onto so many steps.
float scale_for(double range, double steps) {
  if (range == 0) return 1;
  return std::max(static_cast<float>(range / steps), std::numeric_limits<float>::min());
}

Coding code_integers(DType dtype, const float* x, int64_t count, bool with_zero) {
  constexpr float kMost = std::numeric_limits<float>::max();
  float least = x[0], greatest = x[0];
  int infinite = 0;  // a count, not a jump: compilers make vectors of it
  for (int64_t i = 0; i < count; ++i) {
    least = x[i] < least ? x[i] : least;
    greatest = x[i] > greatest ? x[i] : greatest;
    infinite += std::fabs(x[i]) <= kMost ? 0 : 1;
  }
  if (infinite > 0) return {std::numeric_limits<float>::quiet_NaN(), 0};
  const double low = least, high = greatest;
  const double most = std::max(-low, high), half = static_cast<double>(half_range(dtype));
  if (!with_zero || most == 0) return {scale_for(most, half - 1), 0};
  // Of a group whose numbers differ little, zero would grow until (code - zero) loses its digits.
  const float scale = scale_for(std::max((high - low) / (2 * half - 1), most * 0x1p-20), 1);
  return {scale, static_cast<float>(-half - low / scale)};
}

Coding code_floats(DType dtype, const float* x, int64_t count) {
  double most = 0;
  for (int64_t i = 0; i < count; ++i)
    if (std::isfinite(x[i])) most = std::max<double>(most, std::fabs(x[i]));
  return {scale_for(most, largest(dtype)), 0};
}

void encode(DType dtype, const float* x, int64_t count, Coding coding, std::uint8_t* codes) {
  const double factor = 1 / static_cast<double>(coding.scale), zero = coding.zero;
  if (is_integer(dtype)) {  // where the scale is NaN any code will do
    const auto half = static_cast<double>(half_range(dtype));
    constexpr double kRounder = 0x1.8p52;  // numbers of this size are whole
    for (int64_t i = 0; i < count; ++i) {
      const double y = x[i] * factor + zero, above = y > -half ? y : -half;
      const double inside = above < half - 1 ? above : half - 1;
      codes[i] = static_cast<std::uint8_t>(static_cast<int>(inside + kRounder - kRounder));
    }
    return;
  }
  const double most = largest(dtype);
  for (int64_t i = 0; i < count; ++i) {
    const double y = std::isfinite(x[i]) ? std::clamp(x[i] * factor, -most, most) : x[i];
    const auto rounded = static_cast<float>(y);
    codes[i] = static_cast<std::uint8_t>(dtype == DType::f8e4m3 ? F8e4m3::narrow(rounded, true)
                                                                : F8e5m2::narrow(rounded, true));
  }
}

// Where a key lies: row `row` of block `block`, which is a page or a batch entry.
struct Place {
  int64_t block = 0, row = 0;
};

// A tensor indexed by block (or sequence), head, row and element (or group); a dimension that broadcasts has stride 0.
struct Rows {
  void* data = nullptr;  // written through only if it is the cache's
  DType dtype = DType::f32;
  std::array<int64_t, 4> strides{};

  Rows() = default;
  explicit Rows(const TensorView& t) : data(const_cast<void*>(t.data)), dtype(t.dtype), strides(t.strides) {
    for (std::size_t i = 0; i < 4; ++i)
      if (t.shape[i] == 1) strides[i] = 0;
  }
  void* at(int64_t block, int64_t head, int64_t row) const {
    return element(data, dtype, block * strides[0] + head * strides[1] + row * strides[2]);
  }
  explicit operator bool() const { return data != nullptr; }
};

// k or v.
struct Side {
  std::string name;
  Rows fresh, cache, scale, zero;
  int64_t size = 0;       // d
  int64_t groups = 1;     // of a row
  bool computed = false;  // scale and zero are written, not read

  bool quantized() const { return size_of(cache.dtype) == 1; }
};

class Append {
 public:
  explicit Append(const AppendArgs& args) : args_(args), cache_(args.cache) {
    rows_of_cache();
    lengths();
    sides_ = {side("k", args.k_new, cache_.k), side("v", args.v_new, cache_.v)};
    agree();
    codings(sides_[0], cache_.k, cache_.k_scale, cache_.k_zero);
    codings(sides_[1], cache_.v, cache_.v_scale, cache_.v_zero);
    check_overlaps(all_);
    places();
    for (const Side& s : sides_) numbers(s);
  }

  void run() {
    row_.resize(static_cast<std::size_t>(std::max(sides_[0].size, sides_[1].size)));
    codes_.resize(row_.size());
    for (const Side& s : std::span(sides_).first(shared_ >= 0 ? 1 : 2))
      for_each_row([&](int64_t i, int64_t h, int64_t t, Place place) { write(s, i, h, t, place); });
  }

 private:
  void need(const std::string& name, const TensorView& t, int ndim, const char* shape, bool written = false) {
    if (t.ndim == 0) throw Error(name, "no tensor", shape);
    take(all_, name, t, written);
    if (t.ndim != ndim) throw Error(name, "shape " + shape_text(t), shape);
  }
  static void same(const std::string& name, const TensorView& t, std::size_t dim, int64_t wanted, const char* what) {
    if (t.shape[dim] != wanted)
      throw Error(name, "shape " + shape_text(t), std::string(what) + " = " + std::to_string(wanted));
  }
  // Elements of a row: of i4x2 there are two to a byte.
  static int64_t row_size(const TensorView& cache) { return cache.shape[3] * (cache.dtype == DType::i4x2 ? 2 : 1); }
  std::vector<int64_t> integers(const std::string& name, const TensorView& t, const char* shape) {
    need(name, t, 1, shape);
    return read_integers(name, t);
  }

  // Whether `part` is columns first, first + 1, ... of `whole`: the same rows, from another element on.
  static bool is_columns(const TensorView& part, const TensorView& whole, int64_t first) {
    const auto last = static_cast<std::size_t>(whole.ndim - 1);
    if (part.ndim != whole.ndim || part.dtype != whole.dtype) return false;
    if (first < 0 || first > whole.shape[last] - part.shape[last]) return false;
    for (std::size_t i = 0; i <= last; ++i)
      if ((i < last && part.shape[i] != whole.shape[i]) || (part.shape[i] > 1 && part.strides[i] != whole.strides[i]))
        return false;
    return part.data == element(whole.data, whole.dtype, first * whole.strides[last]);
  }

  // Values may be columns of the keys (latent attention): they are written with them, once.
  void find_shared_columns() {
    const TensorView k = cache_.k, v = cache_.v;
    int64_t first = 0;
    if (k.shape[3] > 1) {
      const auto delta = reinterpret_cast<std::uintptr_t>(v.data) - reinterpret_cast<std::uintptr_t>(k.data);
      first = static_cast<int64_t>(delta) / (k.strides[3] * static_cast<int64_t>(size_of(k.dtype)));
    }
    if (all_.front().bytes == 0 || !is_columns(v, k, first)) return;
    if (cache_.k_scale || cache_.v_scale || is_integer(k.dtype))
      throw Error("cache.v", "columns of cache.k in a cache with scales",
                  "memory of its own: codes mean what their scales say");
    shared_ = first;
    all_.pop_back();  // cache.v overlaps what it is a part of
  }

  // The cache is there first: what else is given has to fit it.
  void rows_of_cache() {
    if (cache_.kind != Kind::strided && cache_.kind != Kind::paged && cache_.kind != Kind::ring)
      throw Error("cache.kind", "ragged or unknown", "one of KvCache's factories");
    const TensorView k = cache_.k, v = cache_.v;
    for (const auto& [name, cache] : {std::tuple{"cache.k", k}, {"cache.v", v}}) {
      need(name, cache, 4, cache_.kind == Kind::paged ? "[pages, hk, page_size, d]" : "[b, hk, s, d]", true);
      if (!is_cache(cache.dtype)) throw Error(name, "dtype " + std::string(to_string(cache.dtype)), kCaches);
      if (cache.shape[3] < 1 || row_size(cache) > kMaxHeadSize)
        throw Error(name, "rows of " + std::to_string(row_size(cache)), "1 to 8192 elements");
    }
    if (v.dtype != k.dtype)
      throw Error("cache.v", "dtype " + std::string(to_string(v.dtype)),
                  "cache.k's, " + std::string(to_string(k.dtype)));
    for (const std::size_t dim : {0, 1, 2}) same("cache.v", v, dim, k.shape[dim], "cache.k's size there");
    hk_ = k.shape[1];
    find_shared_columns();
    if (cache_.kind == Kind::paged) {
      need("cache.block_table", cache_.block_table, 2, "[b, n] of pages");
      check_integers("cache.block_table", cache_.block_table);
    } else if (cache_.block_table) {
      throw Error("cache.block_table", "a table for a cache without pages", "KvCache::paged");
    }
  }

  void lengths() {
    ragged_ = static_cast<bool>(args_.cu_seqlens);
    need("k_new", args_.k_new, ragged_ ? 3 : 4, ragged_ ? "[total, hk, d]" : "[b, hk, n, d]");
    begin_ = integers("seqlens", args_.seqlens, "[b] lengths before the call");
    b_ = static_cast<int64_t>(begin_.size());
    int64_t given = args_.k_new.shape[0];  // the batch of the new rows
    if (ragged_) {
      starts_ = integers("cu_seqlens", args_.cu_seqlens, "[b + 1] starts");
      check_starts("cu_seqlens", {starts_.data(), 1, true}, std::ssize(starts_), given);
      given = static_cast<int64_t>(starts_.size()) - 1;
    }
    // Of three batches that should be one, the one that is alone is named.
    const bool paged = cache_.kind == Kind::paged;
    const TensorView room = paged ? cache_.block_table : cache_.k;
    if (b_ != room.shape[0]) {
      if (b_ == given) same(paged ? "cache.block_table" : "cache.k", room, 0, b_, "the batch b");
      same("seqlens", args_.seqlens, 0, room.shape[0], "the cache's batch b");
    }
    if (given != b_) {
      if (ragged_) same("cu_seqlens", args_.cu_seqlens, 0, b_ + 1, "b + 1");
      same("k_new", args_.k_new, 0, b_, "the cache's batch b");
    }
    for (std::size_t i = 0; i < begin_.size(); ++i)
      if (begin_[i] < 0 || begin_[i] > kMaxOffset)
        throw Error("seqlens", "length " + std::to_string(begin_[i]) + " of sequence " + std::to_string(i),
                    "0 to 2^52");
  }

  int64_t count(int64_t i) const {
    const auto at = static_cast<std::size_t>(i);
    return ragged_ ? starts_[at + 1] - starts_[at] : args_.k_new.shape[2];
  }

  Side side(const std::string& name, const TensorView& fresh, const MutableTensorView& cache) {
    Side s;
    s.name = name;
    const std::string new_name = name + "_new";
    if (name != "k") need(new_name, fresh, ragged_ ? 3 : 4, ragged_ ? "[total, hk, dv]" : "[b, hk, n, dv]");
    if (!is_float(fresh.dtype)) throw Error(new_name, "dtype " + std::string(to_string(fresh.dtype)), kFloats);
    s.size = row_size(cache);
    same(new_name, fresh, static_cast<std::size_t>(fresh.ndim) - 1, s.size,
         name == "k" ? "the cache's head size d" : "the cache's head size dv");
    s.fresh = Rows(fresh), s.cache = Rows(cache);
    if (ragged_) s.fresh.strides = {0, fresh.strides[1], fresh.strides[0], fresh.strides[2]};
    return s;
  }

  void codings(Side& s, const TensorView& cache, const TensorView& scale, const TensorView& zero) {
    const std::string scale_name = "cache." + s.name + "_scale", zero_name = "cache." + s.name + "_zero";
    if (zero && !is_integer(cache.dtype))
      throw Error(zero_name, "zeros for " + std::string(to_string(cache.dtype)), "none: i8 and i4x2 have zeros");
    if (scale && is_float(cache.dtype))
      throw Error(scale_name, "scales for " + std::string(to_string(cache.dtype)),
                  "none for a type of 16 or more bits");
    if (!scale && is_integer(cache.dtype))
      throw Error(scale_name, "no tensor", "scales for " + std::string(to_string(cache.dtype)));
    if (!scale) return;
    s.computed = scale.shape[0] == cache.shape[0] && scale.shape[2] == cache.shape[2];
    for (const auto& [name, t] : {std::tuple{scale_name, scale}, {zero_name, zero}}) {
      if (!t) continue;
      need(name, t, 4, "the cache's shape with groups for elements, sizes of 1 broadcasting", s.computed);
      if (t.dtype != DType::f32) throw Error(name, "dtype " + std::string(to_string(t.dtype)), "f32");
      same(name, t, 1, cache.shape[1], "the cache's heads hk");
      for (const std::size_t dim : {0, 2})
        if (t.shape[dim] != 1) same(name, t, dim, cache.shape[dim], "1 or the cache's size there");
      if (t.shape[3] < 1 || s.size % t.shape[3] != 0)
        throw Error(name, std::to_string(t.shape[3]) + " groups", "a divisor of " + std::to_string(s.size));
    }
    if (cache.dtype == DType::i4x2 && s.size / scale.shape[3] % 2 != 0)
      throw Error(scale_name, "groups of " + std::to_string(s.size / scale.shape[3]) + " elements",
                  "an even number of i4x2");
    s.groups = scale.shape[3];
    s.scale = Rows(scale);
    if (!zero) return;
    same(zero_name, zero, 3, s.groups, "the scale's groups");
    if ((zero.shape[0] == cache.shape[0] && zero.shape[2] == cache.shape[2]) != s.computed)
      throw Error(zero_name, "shape " + shape_text(zero), "an element for every row just where scales have");
    s.zero = Rows(zero);
  }

  // What the new rows of k and v have in common, with the cache too.
  void agree() const {
    for (const auto& [name, t] :
         {std::tuple<const char*, const TensorView&>{"k_new", args_.k_new}, {"v_new", args_.v_new}}) {
      same(name, t, 1, hk_, "the cache's heads hk");
      same(name, t, 0, args_.k_new.shape[0], "k_new's size there");
      if (!ragged_) same(name, t, 2, args_.k_new.shape[2], "k_new's rows n");
    }
    const int64_t dv = sides_[1].size;
    if (shared_ >= 0 && span_of("v_new", args_.v_new, false) > 0 && !is_columns(args_.v_new, args_.k_new, shared_))
      throw Error("v_new", "rows of its own for values that are columns of cache.k",
                  "columns " + std::to_string(shared_) + " to " + std::to_string(shared_ + dv - 1) +
                      " of k_new, as cache.v is of cache.k");
  }

  int64_t table(int64_t i, int64_t column) const {
    const TensorView& t = cache_.block_table;
    return Integers{t.data, t.strides[1], t.dtype == DType::i64}.element(i * t.strides[0] + column * t.strides[1]);
  }

  // The keys that a sequence may have.
  int64_t capacity() const {
    const int64_t rows = cache_.k.shape[2];
    int64_t keys = rows;
    if ((cache_.kind == Kind::ring && rows > 0) ||
        (cache_.kind == Kind::paged && __builtin_mul_overflow(cache_.block_table.shape[1], rows, &keys)))
      return std::numeric_limits<int64_t>::max();
    return keys;
  }

  // Every new row has a place of its own.
  void places() const {
    for (int64_t i = 0; i < b_; ++i)
      if (const int64_t n = count(i); n > 0 && begin_[static_cast<std::size_t>(i)] > capacity() - n)
        throw Error(
            "seqlens",
            std::to_string(begin_[static_cast<std::size_t>(i)]) + " keys and " + std::to_string(n) + " new ones",
            "at most " + std::to_string(capacity()) + ", the cache's room for sequence " + std::to_string(i));
    if (cache_.kind != Kind::paged) return;
    struct Run {
      int64_t page, begin, end;
    };
    std::vector<Run> runs;
    const int64_t rows = cache_.k.shape[2], pages = cache_.k.shape[0];
    for (int64_t i = 0; i < b_; ++i) {
      const int64_t begin = begin_[static_cast<std::size_t>(i)], end = begin + count(i);
      for (int64_t at = begin; at < end;) {
        const int64_t page = table(i, at / rows), row = at % rows, stop = std::min(rows, row + end - at);
        if (page < 0 || page >= pages)
          throw Error(
              "cache.block_table",
              "page " + std::to_string(page) + " for key " + std::to_string(at) + " of sequence " + std::to_string(i),
              "0 to " + std::to_string(pages - 1));
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

  Place place(int64_t i, int64_t position) const {
    const int64_t rows = cache_.k.shape[2];
    if (cache_.kind == Kind::paged) return {table(i, position / rows), position % rows};
    return {i, cache_.kind == Kind::ring ? position % rows : position};
  }

  // Calls visit(sequence, head, new row, place) for every row that will be there in the end.
  template <class Visit>
  void for_each_row(const Visit& visit) const {
    for (int64_t i = 0; i < b_; ++i) {
      const int64_t n = count(i);
      const int64_t first = cache_.kind == Kind::ring ? std::max<int64_t>(0, n - cache_.k.shape[2]) : 0;
      for (int64_t t = first; t < n; ++t) {
        const Place at = place(i, begin_[static_cast<std::size_t>(i)] + t);
        for (int64_t h = 0; h < hk_; ++h) visit(i, h, t, at);
      }
    }
  }

  const void* fresh_row(const Side& s, int64_t i, int64_t h, int64_t t) const {
    return s.fresh.at(i, h, ragged_ ? starts_[static_cast<std::size_t>(i)] + t : t);
  }
  Coding given(const Side& s, Place at, int64_t h, int64_t group) const {
    const auto read = [&](const Rows& rows) {
      return static_cast<const float*>(rows.at(at.block, h, at.row))[group * rows.strides[3]];
    };
    return {s.scale ? read(s.scale) : 1, s.zero ? read(s.zero) : 0};
  }

  // Given scales are usable, and so are the numbers that integers are made of with them.
  void numbers(const Side& s) {
    if (!s.scale || s.computed) return;
    row_.resize(static_cast<std::size_t>(s.size));
    for_each_row([&](int64_t i, int64_t h, int64_t t, Place at) {
      for (int64_t g = 0; g < s.groups; ++g) {
        const Coding coding = given(s, at, h, g);
        if (!std::isfinite(coding.scale) || !(coding.scale > 0))
          throw Error("cache." + s.name + "_scale", shortest(coding.scale), "finite numbers above 0");
        if (!std::isfinite(coding.zero))
          throw Error("cache." + s.name + "_zero", shortest(coding.zero), "finite numbers");
      }
      if (!is_integer(s.cache.dtype)) return;
      load_row(fresh_row(s, i, h, t), s.fresh.dtype, s.fresh.strides[3], s.size, row_.data());
      for (const float x : row_)
        if (!std::isfinite(x))
          throw Error(s.name + "_new", shortest(x), "finite numbers where the scale of integers is given");
    });
  }

  void write(const Side& s, int64_t i, int64_t h, int64_t t, Place at) {
    const void* from = fresh_row(s, i, h, t);
    void* to = s.cache.at(at.block, h, at.row);
    const int64_t stride = s.cache.strides[3];
    if (s.fresh.dtype == s.cache.dtype) return copy(s, from, to);
    load_row(from, s.fresh.dtype, s.fresh.strides[3], s.size, row_.data());
    if (!s.quantized()) return store_row(row_.data(), s.size, to, s.cache.dtype, stride);
    const int64_t count = s.size / s.groups;
    for (int64_t g = 0; g < s.groups; ++g) {
      const float* x = row_.data() + g * count;
      const Coding coding = s.computed ? compute(s, x, count, at, h, g) : given(s, at, h, g);
      encode(s.cache.dtype, x, count, coding, codes_.data() + g * count);
    }
    auto* bytes = static_cast<std::uint8_t*>(to);
    if (s.cache.dtype == DType::i4x2)
      for (int64_t c = 0; c < s.size / 2; ++c) bytes[c * stride] = pair(c);
    else
      for (int64_t c = 0; c < s.size; ++c) bytes[c * stride] = codes_[static_cast<std::size_t>(c)];
  }

  static void copy(const Side& s, const void* from, void* to) {
    const auto each = [&](const auto* in, auto* out) {
      for (int64_t c = 0; c < s.size; ++c) out[c * s.cache.strides[3]] = in[c * s.fresh.strides[3]];
    };
    if (s.cache.dtype == DType::f32) each(static_cast<const float*>(from), static_cast<float*>(to));
    else each(static_cast<const std::uint16_t*>(from), static_cast<std::uint16_t*>(to));
  }

  static Coding compute(const Side& s, const float* x, int64_t count, Place at, int64_t h, int64_t group) {
    const Coding coding = is_integer(s.cache.dtype) ? code_integers(s.cache.dtype, x, count, static_cast<bool>(s.zero))
                                                    : code_floats(s.cache.dtype, x, count);
    const auto put = [&](const Rows& rows, float value) {
      static_cast<float*>(rows.at(at.block, h, at.row))[group * rows.strides[3]] = value;
    };
    put(s.scale, coding.scale);
    if (s.zero) put(s.zero, coding.zero);
    return coding;
  }

  std::uint8_t pair(int64_t byte) const {
    const auto at = static_cast<std::size_t>(2 * byte);
    return static_cast<std::uint8_t>((codes_[at] & 0xf) | codes_[at + 1] << 4);
  }

  const AppendArgs& args_;
  const KvCache& cache_;
  std::vector<Checked> all_;
  bool ragged_ = false;
  int64_t b_ = 0, hk_ = 0;
  int64_t shared_ = -1;          // the column of cache.k that cache.v begins at, if it lies there
  std::vector<int64_t> begin_;   // [b] keys before the call
  std::vector<int64_t> starts_;  // ragged: [b + 1] rows of k_new
  std::array<Side, 2> sides_;
  std::vector<float> row_;
  std::vector<std::uint8_t> codes_;
};

}  // namespace

void append_kv(const AppendArgs& args) {
  const FloatEnvironment environment;
  Append(args).run();
}

}  // namespace rapt
