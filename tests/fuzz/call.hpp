// What the fuzz targets of calls share: arguments in one small arena, and what must hold of any call. It either throws
// rapt::Error with an argument's name and has written nothing, or it succeeds, has written nothing but its outputs, and
// its result does not depend on what they held before.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "fuzz.hpp"
#include "rapt/rapt.hpp"

namespace rapt::testing {

inline constexpr std::size_t kArenaBytes = 1 << 15;
inline constexpr std::int64_t kBig = std::numeric_limits<std::int64_t>::max();

struct Arena {
  alignas(64) std::array<std::byte, kArenaBytes> bytes;
};

/// Where tensors lie.
struct Given {
  Arena arena;
  std::size_t used = 0;

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

inline float some_float(Choices& c) {
  const float special[] = {0, 1, -1, 1e6f, -1e6f, INFINITY, -INFINITY, NAN};
  return c.one_in(8) ? special[c.below(8)] : static_cast<float>(c.below(256)) / 64 - 2;
}

inline TensorView floats(Given& g, Choices& c, std::initializer_list<std::int64_t> shape, DType dtype = DType::f32) {
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

inline MutableTensorView output(Given& g, std::initializer_list<std::int64_t> shape, DType dtype = DType::f32) {
  MutableTensorView t(static_cast<float*>(nullptr), shape);
  t.dtype = dtype;
  t.data = dtype == DType::f32 ? static_cast<void*>(g.take<float>(elements_of(t)))
                               : static_cast<void*>(g.take<std::uint16_t>(elements_of(t)));
  return t;
}

inline DType some_type(Choices& c) {
  return c.one_of({DType::f32, DType::bf16, DType::f16});
}

template <class T>
TensorView integers(Given& g, const std::vector<std::int64_t>& values) {
  T* data = g.take<T>(static_cast<std::int64_t>(values.size()));
  std::transform(values.begin(), values.end(), data, [](std::int64_t value) { return static_cast<T>(value); });
  return TensorView(data, {static_cast<std::int64_t>(values.size())});
}

inline TensorView integers(Given& g, Choices& c, std::vector<std::int64_t> values) {
  if (!values.empty() && c.one_in(16)) values[static_cast<std::size_t>(c.below(9)) % values.size()] = c.below(16) - 4;
  return c.below(2) ? integers<std::int64_t>(g, values) : integers<std::int32_t>(g, values);
}

/// Borders of `b` sequences of 0 to 5 rows.
inline std::vector<std::int64_t> borders(Choices& c, std::int64_t b) {
  std::vector<std::int64_t> values{0};
  for (std::int64_t n = 0; n < b; ++n) values.push_back(values.back() + c.below(6));
  return values;
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

/// Marks the bytes of every element of `t` in `written`.
inline void mark(const MutableTensorView& t, const Arena& arena, std::array<bool, kArenaBytes>& written) {
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

/// A call of any operation, over arguments that the caller has chosen.
struct Call {
  std::vector<TensorView*> indices;  ///< whose values validation reads
  std::vector<TensorView*> inputs;
  std::vector<MutableTensorView*> outputs;  ///< of which every element is written
  std::vector<MutableTensorView*> updates;  ///< that may be inputs as well, or are written in part
  std::function<bool()> is_small;           ///< whether it does few enough multiplications to be run
  std::function<void()> plan, run;
};

/// Changes one thing about a tensor of the call.
inline void twist_any(const Call& call, Given& g, Choices& c) {
  auto n = static_cast<std::size_t>(
      c.below(static_cast<int>(call.indices.size() + call.inputs.size() + call.outputs.size() + call.updates.size())));
  for (const auto* views : {&call.indices, &call.inputs}) {
    if (n < views->size()) return twist(*(*views)[n], g, c);
    n -= views->size();
  }
  for (const auto* views : {&call.outputs, &call.updates}) {
    if (n < views->size()) return twist(*(*views)[n], g, c);
    n -= views->size();
  }
}

inline void check_runnable(Given& g, const Call& call, bool nonsense) {
  static Arena before, first;
  before = g.arena;
  const bool planned = succeeds(g, call.plan);
  require(before.bytes == g.arena.bytes, "planning writes nothing");
  require(!planned || !nonsense, "a view that describes no memory is refused");
  if (!call.is_small()) return;
  const bool ran = succeeds(g, call.run);
  require(ran == planned, "a call takes what Plan takes");
  if (!ran) return;

  static std::array<bool, kArenaBytes> written, updated;
  written.fill(false), updated.fill(false);
  for (const MutableTensorView* t : call.outputs) mark(*t, g.arena, written);
  for (const MutableTensorView* t : call.updates) mark(*t, g.arena, updated);
  first = g.arena;
  for (std::size_t i = 0; i < kArenaBytes; ++i) {
    require(written[i] || updated[i] || g.arena.bytes[i] == before.bytes[i], "only outputs are written");
    g.arena.bytes[i] = written[i] ? std::byte{0xa5} : before.bytes[i];
  }
  call.run();
  require(first.bytes == g.arena.bytes, "the result does not depend on what outputs held");
}

/// Claims that reach beyond the arena cannot be told from true ones: then nothing that validation reads may be among
/// them, and the call is only planned.
inline void check_call(Given& g, const Call& call) {
  bool nonsense = false, runnable = true;
  for (const TensorView* t : call.indices) {
    if (extent_of(*t, g.arena) == Extent::outside) return;
    nonsense = nonsense || extent_of(*t, g.arena) == Extent::nonsense;
  }
  const auto look = [&](const auto& views) {
    for (const auto* t : views) {
      runnable = runnable && extent_of(*t, g.arena) != Extent::outside;
      nonsense = nonsense || extent_of(*t, g.arena) == Extent::nonsense;
    }
  };
  look(call.inputs), look(call.outputs), look(call.updates);
  if (runnable) {
    check_runnable(g, call, nonsense);
  } else {
    succeeds(g, call.plan);
  }
}

/// Serial.
inline const Context& fuzz_context() {
  static const Context context([] {
    ContextOptions options;
    options.executor = serial_executor();
    return options;
  }());
  return context;
}

inline void clear(Given& g) {
  g.arena.bytes.fill(std::byte{0x3f});  // floats of about 0.75
  g.used = 0;
}

}  // namespace rapt::testing
