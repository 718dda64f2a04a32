// Argument validation under arbitrary arguments. All tensors lie in one small arena. Whatever the arguments, a call
// either throws rapt::Error with an argument's name and has written nothing, or it succeeds, has written nothing but
// `out` and `lse`, and its result does not depend on what they held before.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "fuzz.hpp"
#include "rapt/rapt.hpp"

namespace rapt::testing {
namespace {

constexpr std::size_t kArenaBytes = 1 << 15;
constexpr double kMaxOperations = 1 << 16;
constexpr std::int64_t kBig = std::numeric_limits<std::int64_t>::max();

struct Arena {
  alignas(64) std::array<std::byte, kArenaBytes> bytes;
};

/// What is given as q, k, v, out, ...: read or written, so the views are rebuilt as the API's two types.
struct Given {
  Arena arena;
  std::size_t used = 0;
  AttentionArgs args;

  /// Memory for `elements` of T, 4 bytes past the last; the start when the arena is full.
  template <class T>
  T* take(std::int64_t elements) {
    const std::size_t bytes = static_cast<std::size_t>(elements) * sizeof(T);
    used = (used + 7) / 8 * 8;
    if (used + bytes > kArenaBytes) used = 0;
    T* data = reinterpret_cast<T*>(arena.bytes.data() + used);
    used += bytes + 4;
    return data;
  }
};

template <class View>
std::int64_t elements_of(const View& t) {
  std::int64_t count = 1;
  for (int n = 0; n < t.ndim; ++n) count *= t.shape[static_cast<std::size_t>(n)];
  return count;
}

float some_float(Choices& c) {
  const float special[] = {0, 1, -1, 1e6f, -1e6f, INFINITY, -INFINITY, NAN};
  return c.one_in(8) ? special[c.below(8)] : static_cast<float>(c.below(256)) / 64 - 2;
}

TensorView floats(Given& g, Choices& c, std::initializer_list<std::int64_t> shape, DType dtype = DType::f32) {
  TensorView t(static_cast<const float*>(nullptr), shape);
  t.dtype = dtype;
  const std::int64_t elements = elements_of(t);
  if (size_of(dtype) == 1) {
    std::uint8_t* data = g.take<std::uint8_t>(elements);
    for (std::int64_t i = 0; i < std::min<std::int64_t>(elements, 8); ++i) data[i] = c.raw<std::uint8_t>();
    t.data = data;
  } else if (dtype == DType::f32) {
    float* data = g.take<float>(elements);
    for (std::int64_t i = 0; i < std::min<std::int64_t>(elements, 64); ++i) data[i] = some_float(c);
    t.data = data;
  } else {
    std::uint16_t* data = g.take<std::uint16_t>(elements);  // 0x3f3f: 0.75 of bf16, 1.8 of f16
    for (std::int64_t i = 0; i < std::min<std::int64_t>(elements, 8); ++i) data[i] = c.raw<std::uint16_t>();
    t.data = data;
  }
  return t;
}

MutableTensorView output(Given& g, std::initializer_list<std::int64_t> shape, DType dtype = DType::f32) {
  MutableTensorView t(static_cast<float*>(nullptr), shape);
  t.dtype = dtype;
  t.data = dtype == DType::f32 ? static_cast<void*>(g.take<float>(elements_of(t)))
                               : static_cast<void*>(g.take<std::uint16_t>(elements_of(t)));
  return t;
}

DType some_type(Choices& c) {
  return c.one_of({DType::f32, DType::bf16, DType::f16});
}

DType some_cache_type(Choices& c) {
  return c.one_in(2) ? c.one_of({DType::i8, DType::f8e4m3, DType::f8e5m2, DType::i4x2}) : some_type(c);
}

template <class T>
TensorView integers(Given& g, const std::vector<std::int64_t>& values) {
  T* data = g.take<T>(static_cast<std::int64_t>(values.size()));
  std::transform(values.begin(), values.end(), data, [](std::int64_t value) { return static_cast<T>(value); });
  return TensorView(data, {static_cast<std::int64_t>(values.size())});
}

TensorView integers(Given& g, Choices& c, std::vector<std::int64_t> values) {
  if (!values.empty() && c.one_in(16)) values[static_cast<std::size_t>(c.below(9)) % values.size()] = c.below(16) - 4;
  return c.below(2) ? integers<std::int64_t>(g, values) : integers<std::int32_t>(g, values);
}

/// Borders of `b` sequences of 0 to 5 rows.
std::vector<std::int64_t> borders(Choices& c, std::int64_t b) {
  std::vector<std::int64_t> values{0};
  for (std::int64_t n = 0; n < b; ++n) values.push_back(values.back() + c.below(6));
  return values;
}

void choose_score(Given& g, Choices& c, std::int64_t b, std::int64_t hq, std::int64_t sq, std::int64_t sk) {
  ScoreSpec& score = g.args.score;
  if (c.one_in(4)) score.scale = some_float(c);
  if (c.one_in(4)) score.softcap = some_float(c);
  if (c.one_in(4)) score.dropout = Dropout{some_float(c), c.raw<std::uint64_t>(), c.raw<std::uint64_t>()};
  score.causal = c.one_in(3);
  if (c.one_in(4)) score.window = Window{c.below(8) - 2, c.below(8) - 2};
  if (c.below(2)) {
    score.align = Align{static_cast<Align::Kind>(c.below(c.one_in(8) ? 5 : 3)), c.below(16) - 8};
    if (c.one_in(16)) score.align->value = c.raw<std::int64_t>();
  }
  const auto maybe = [&](std::int64_t size) { return c.below(2) ? size : 1; };
  if (c.one_in(4)) score.bias = floats(g, c, {maybe(b), maybe(hq), maybe(sq), sk});
  if (c.one_in(4)) score.alibi = c.below(2) ? floats(g, c, {hq}) : floats(g, c, {b, hq});
  if (c.one_in(4)) score.sinks = floats(g, c, {hq});
  if (c.one_in(4)) {
    score.mask = TensorView(static_cast<const bool*>(nullptr), {maybe(hq), maybe(sq), sk});
    auto* data = g.take<std::uint8_t>(elements_of(score.mask));
    for (std::int64_t i = 0; i < elements_of(score.mask); ++i) data[i] = static_cast<std::uint8_t>(c.below(2));
    score.mask.data = data;
  }
}

/// Keys or values of b entries and s rows: strided, paged or in a ring.
TensorView cache(Given& g, Choices& c, std::int64_t b, std::int64_t hk, std::int64_t s, std::int64_t d, DType dtype) {
  return floats(g, c, {b, hk, s, dtype == DType::i4x2 ? d / 2 : d}, dtype);
}

/// Scales of k or v where the type may have them, and zeros.
void choose_scales(Given& g, Choices& c, const TensorView& rows, std::int64_t d, TensorView& scale, TensorView& zero) {
  const bool needed = rows.dtype == DType::i8 || rows.dtype == DType::i4x2;
  if (!(needed || rows.dtype == DType::f8e4m3 || rows.dtype == DType::f8e5m2)) return;
  if (!needed && c.below(2)) return;
  const std::int64_t groups = d % 2 == 0 && c.below(2) ? std::max<std::int64_t>(d / 2, 1) : 1;
  const auto maybe = [&](std::size_t dim) { return c.below(2) ? rows.shape[dim] : 1; };
  const auto make = [&] {
    return rows.ndim == 3 ? floats(g, c, {maybe(0), rows.shape[1], groups})
                          : floats(g, c, {maybe(0), rows.shape[1], maybe(2), groups});
  };
  scale = make();
  if (c.one_in(3)) zero = make();
}

/// Keys of b sequences in some layout; returns the sk that terms of scores must have.
std::int64_t choose_keys(Given& g, Choices& c, std::int64_t b, std::int64_t hk, std::int64_t sk, std::int64_t d,
                         std::int64_t dv) {
  KvSource& kv = g.args.kv;
  const DType dtype = some_cache_type(c);
  std::vector<std::int64_t> lengths(static_cast<std::size_t>(b));
  switch (c.below(5)) {
    case 0: {
      const auto rows = borders(c, b);
      const std::int64_t half = dtype == DType::i4x2 ? 2 : 1;
      kv = KvSource::ragged(floats(g, c, {rows.back(), hk, d / half}, dtype),
                            floats(g, c, {rows.back(), hk, dv / half}, dtype), integers(g, c, rows));
      sk = 5;
      break;
    }
    case 1: {
      const std::int64_t page_size = 1 + c.below(4), columns = c.below(4), pages = 1 + c.below(5);
      sk = page_size * columns;
      std::vector<std::int64_t> table(static_cast<std::size_t>(b * columns));
      for (auto& page : table) page = c.one_in(32) ? c.below(16) - 8 : c.below(static_cast<int>(pages));
      for (auto& length : lengths) length = c.below(static_cast<int>(sk) + 1);
      kv = KvSource::paged(cache(g, c, pages, hk, page_size, d, dtype), cache(g, c, pages, hk, page_size, dv, dtype),
                           integers(g, c, table), integers(g, c, lengths));
      kv.block_table.ndim = 2;
      kv.block_table.shape = {b, columns, 0, 0};
      kv.block_table.strides = {columns, 1, 0, 0};
      break;
    }
    case 2: {
      for (auto& length : lengths) length = c.one_in(8) ? c.raw<std::int32_t>() : c.below(40);
      kv = KvSource::ring(cache(g, c, b, hk, sk, d, dtype), cache(g, c, b, hk, sk, dv, dtype), integers(g, c, lengths));
      break;
    }
    default:
      for (auto& length : lengths) length = c.below(static_cast<int>(sk) + 1);
      kv = KvSource::strided(cache(g, c, b, hk, sk, d, dtype), cache(g, c, b, hk, sk, dv, dtype),
                             c.one_in(3) ? integers(g, c, lengths) : TensorView());
  }
  choose_scales(g, c, kv.k, d, kv.k_scale, kv.k_zero);
  choose_scales(g, c, kv.v, dv, kv.v_scale, kv.v_zero);
  return sk;
}

/// Arguments that are right but for what the choices of single values make of them.
void choose_args(Given& g, Choices& c) {
  const std::int64_t b = c.below(4), hk = c.below(3) + (c.one_in(16) ? 0 : 1), hq = hk * (1 + c.below(3));
  const std::int64_t d = c.one_in(4) ? c.below(40) : 1 + c.below(8), dv = c.below(2) ? d : 1 + c.below(9);
  std::int64_t sq = c.below(7), sk = c.one_in(3) ? sq : c.below(9);
  const DType q_type = some_type(c), out_type = some_type(c);
  AttentionArgs& args = g.args;
  if (c.one_in(3)) {  // ragged queries
    const auto rows = borders(c, b);
    args.cu_seqlens_q = integers(g, c, rows);
    args.q = floats(g, c, {rows.back(), hq, d}, q_type);
    args.out = output(g, {rows.back(), hq, dv}, out_type);
    if (c.one_in(3)) args.lse = output(g, {rows.back(), hq});
    sq = 5;
  } else {
    args.q = floats(g, c, {b, hq, sq, d}, q_type);
    args.out = output(g, {b, hq, sq, dv}, out_type);
    if (c.one_in(3)) args.lse = output(g, {b, hq, sq});
  }
  sk = choose_keys(g, c, b, hk, sk, d, dv);
  choose_score(g, c, b, hq, sq, sk);
}

/// Changes one thing about a tensor.
template <class View>
void twist(View& t, Given& g, Choices& c) {
  const auto n = static_cast<std::size_t>(c.below(kMaxDims));
  const std::int64_t size = c.one_of<std::int64_t>(
      {0, 1, 2, 3, 7, 64, -1, 1 << 20, std::int64_t{1} << 31, std::int64_t{1} << 62, kBig, -kBig - 1});
  switch (c.below(8)) {
    case 0:
      t.shape[n] = size;
      break;
    case 1:
      t.strides[n] = size;
      break;
    case 2:
      t.ndim = c.one_of({0, 1, 2, 3, 4, 5, -1, 1000});
      break;
    case 3:
      t.dtype = static_cast<DType>(c.below(12));
      break;
    case 4:
      t.data = c.below(2) ? nullptr : g.arena.bytes.data() + c.below(256) * 64 + c.one_in(8);
      break;
    case 5:
      t.device = {static_cast<DeviceType>(c.below(4)), c.below(2)};
      break;
    case 6:  // exchange two dimensions
      std::swap(t.shape[n], t.shape[(n + 1) % kMaxDims]);
      std::swap(t.strides[n], t.strides[(n + 1) % kMaxDims]);
      break;
    case 7:
      t.strides[n] += t.strides[n] < kBig - 4 ? c.below(4) : 0;
      break;
  }
}

/// Gives one dimension of all tensors another size, without memory behind it.
void resize_everywhere(AttentionArgs& a, Choices& c) {
  const auto n = static_cast<std::size_t>(c.below(kMaxDims));
  const std::int64_t size = c.one_of<std::int64_t>({0, 1, 5, 1 << 20, std::int64_t{1} << 47, kBig});
  a.q.shape[n] = a.kv.k.shape[n] = a.kv.v.shape[n] = a.out.shape[n] = a.lse.shape[n] = size;
}

void twist_something(Given& g, Choices& c) {
  AttentionArgs& a = g.args;
  TensorView* const inputs[] = {
      &a.q,          &a.kv.k,        &a.kv.v,        &a.kv.seqlens,   &a.kv.cu_seqlens,  &a.score.bias,
      &a.score.mask, &a.score.alibi, &a.score.sinks, &a.cu_seqlens_q, &a.kv.block_table, &a.kv.k_scale,
      &a.kv.v_scale, &a.kv.k_zero,   &a.kv.v_zero};
  switch (c.below(10)) {
    case 0:
      twist(a.out, g, c);
      break;
    case 1:
      twist(a.lse, g, c);
      break;
    case 2:
      a.kv.kind = static_cast<KvSource::Kind>(c.below(5));
      break;
    case 3:
      resize_everywhere(a, c);
      break;
    default:
      twist(*inputs[c.below(static_cast<int>(std::size(inputs)))], g, c);
  }
}

enum class Extent { inside, outside, nonsense };

/// Whether the elements a view claims lie in the arena. Nonsense (bad rank, dtype, sign or alignment, null, more
/// bytes than int64 counts) must be refused without a look at the memory; that a sane claim is false cannot be known.
template <class View>
Extent extent_of(const View& t, const Arena& arena) {
  if (t.ndim == 0) return Extent::inside;
  if (t.ndim < 0 || t.ndim > kMaxDims || t.dtype > DType::i4x2) return Extent::nonsense;
  std::int64_t elements = 1, bytes = 0;
  bool empty = false, overflow = false;
  for (std::size_t n = 0; n < static_cast<std::size_t>(t.ndim); ++n) {
    if (t.shape[n] < 0 || t.strides[n] < 0) return Extent::nonsense;
    std::int64_t step = 0;
    empty = empty || t.shape[n] == 0;
    overflow = __builtin_mul_overflow(t.shape[n] - (t.shape[n] > 0), t.strides[n], &step) || overflow;
    overflow = __builtin_add_overflow(elements, step, &elements) || overflow;
  }
  if (empty) return Extent::inside;
  overflow = __builtin_mul_overflow(elements, static_cast<std::int64_t>(size_of(t.dtype)), &bytes) || overflow;
  const bool misaligned = reinterpret_cast<std::uintptr_t>(t.data) % size_of(t.dtype) != 0;
  if (overflow || misaligned || !t.data) return Extent::nonsense;
  const auto begin = static_cast<const std::byte*>(t.data) - arena.bytes.data();
  return bytes <= static_cast<std::int64_t>(kArenaBytes) - begin ? Extent::inside : Extent::outside;
}

/// Whether a call does few enough multiplications to be run.
bool is_small(const AttentionArgs& a) {
  double operations = 1;
  for (const Layout& t : {Layout(a.q), Layout(a.kv.k)}) {
    for (const std::int64_t size : t.shape) operations *= std::max(1.0, static_cast<double>(size));
  }
  if (a.kv.block_table) operations *= std::max(1.0, static_cast<double>(a.kv.block_table.shape[1]));
  return operations <= kMaxOperations;
}

/// Marks the bytes of every element of `t` in `written`.
void mark(const MutableTensorView& t, const Arena& arena, std::array<bool, kArenaBytes>& written) {
  if (t.ndim == 0) return;
  std::array<std::int64_t, kMaxDims> size{1, 1, 1, 1}, stride{};
  std::copy_n(t.shape.begin(), t.ndim, size.begin());
  std::copy_n(t.strides.begin(), t.ndim, stride.begin());
  const auto begin = static_cast<const std::byte*>(t.data) - arena.bytes.data();
  for (std::int64_t i0 = 0; i0 < size[0]; ++i0) {
    for (std::int64_t i1 = 0; i1 < size[1]; ++i1) {
      for (std::int64_t i2 = 0; i2 < size[2]; ++i2) {
        for (std::int64_t i3 = 0; i3 < size[3]; ++i3) {
          const auto width = static_cast<std::int64_t>(size_of(t.dtype));
          const std::int64_t at = begin + width * (i0 * stride[0] + i1 * stride[1] + i2 * stride[2] + i3 * stride[3]);
          for (std::int64_t byte = at; byte < at + width; ++byte) written[static_cast<std::size_t>(byte)] = true;
        }
      }
    }
  }
}

/// Runs `call`; true if it succeeded. A refusal must name an argument and leave the arena alone.
template <class Call>
bool succeeds(Given& g, Call&& call) {
  static Arena before;
  before = g.arena;
  try {
    call();
    return true;
  } catch (const Error& error) {
    require(!error.argument().empty(), "an Error names an argument");
    require(std::string(error.what()).rfind(error.argument() + ": ", 0) == 0, "what() starts with the argument");
    require(before.bytes == g.arena.bytes, "a refused call writes nothing (" + std::string(error.what()) + ")");
    return false;
  }
}

void check_call(Given& g, const Context& context, bool nonsense) {
  static Arena before, first;
  before = g.arena;
  const bool planned = succeeds(g, [&] { Plan(g.args, context); });
  require(before.bytes == g.arena.bytes, "planning writes nothing");
  require(!planned || !nonsense, "a view that describes no memory is refused");
  if (!is_small(g.args)) return;
  const bool ran = succeeds(g, [&] { attention(g.args, context); });
  require(ran == planned, "attention() takes what Plan takes");
  if (!ran) return;

  static std::array<bool, kArenaBytes> written;
  written.fill(false);
  mark(g.args.out, g.arena, written);
  mark(g.args.lse, g.arena, written);
  first = g.arena;
  for (std::size_t i = 0; i < kArenaBytes; ++i) {
    require(written[i] || g.arena.bytes[i] == before.bytes[i], "only out and lse are written");
    g.arena.bytes[i] = written[i] ? std::byte{0xa5} : before.bytes[i];
  }
  attention(g.args, context);
  require(first.bytes == g.arena.bytes, "the result does not depend on what out and lse held");
}

/// Makes arguments of the bytes and checks them. Claims that reach beyond the arena cannot be told from true ones: then
/// nothing that validation reads may be among them, and the call is only planned.
void check(Given& g, Choices c, const Context& context) {
  g.arena.bytes.fill(std::byte{0x3f});  // floats of about 0.75
  g.used = 0;
  g.args = {};
  choose_args(g, c);
  for (int twists = c.below(4); twists > 0; --twists) twist_something(g, c);

  const AttentionArgs& a = g.args;
  const TensorView index_tensors[] = {a.kv.seqlens, a.kv.cu_seqlens, a.cu_seqlens_q, a.kv.block_table};
  const TensorView others[] = {a.q,          a.kv.k,       a.kv.v,        TensorView(a.out), TensorView(a.lse),
                               a.score.bias, a.score.mask, a.score.alibi, a.score.sinks,     a.kv.k_scale,
                               a.kv.v_scale, a.kv.k_zero,  a.kv.v_zero};
  bool nonsense = false, runnable = true;
  for (const TensorView& t : index_tensors) {
    if (extent_of(t, g.arena) == Extent::outside) return;
    nonsense = nonsense || extent_of(t, g.arena) == Extent::nonsense;
  }
  for (const TensorView& t : others) {
    runnable = runnable && extent_of(t, g.arena) != Extent::outside;
    nonsense = nonsense || extent_of(t, g.arena) == Extent::nonsense;
  }
  if (runnable) {
    check_call(g, context, nonsense);
  } else {
    succeeds(g, [&] { Plan(g.args, context); });
  }
}

}  // namespace
}  // namespace rapt::testing

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace rapt;
  static const Context context([] {
    ContextOptions options;
    options.executor = serial_executor();
    return options;
  }());
  static rapt::testing::Given given;
  rapt::testing::check(given, {data, size}, context);
  return 0;
}
