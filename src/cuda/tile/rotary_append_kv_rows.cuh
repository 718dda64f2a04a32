// New rows in pieces of 16 bytes, copied or rotated: rows of one type, aligned, that are not quantised. A thread has
// the same 16 channels of several heads of a new row, so that it finds the row's place and its angles once. The bits
// are those of rotary_append_kv.cu and append_row.cuh, which do one row at a time for any types and strides.
#pragma once

#include <algorithm>
#include <type_traits>

#include "cuda/tile/append_row.cuh"
#include "cuda/tile/launch.cuh"
#include "operations/rotary_append_kv/params.hpp"

namespace rapt::cuda {

constexpr int kRowChannels = 16;  // of a thread: two blocks of 8
constexpr int kRowThreads = 128;

// How channels turn: not at all, or in pairs of the two blocks of a thread, or of neighbours.
enum class Turn { none, halves, neighbours };

template <class T>
constexpr DType row_type_of = std::is_same_v<T, float>    ? DType::f32
                              : std::is_same_v<T, __half> ? DType::f16
                                                          : DType::bf16;

// Eight channels as they lie in memory.
template <class T>
struct Piece {
  uint4 chunk[sizeof(T) / 2];

  __device__ static Piece of(const T* from) {
    Piece made;
#pragma unroll
    for (std::size_t i = 0; i < sizeof(T) / 2; ++i) made.chunk[i] = reinterpret_cast<const uint4*>(from)[i];
    return made;
  }
  __device__ void store(T* to) const {
#pragma unroll
    for (std::size_t i = 0; i < sizeof(T) / 2; ++i) reinterpret_cast<uint4*>(to)[i] = chunk[i];
  }
  // Its numbers, to x; and the piece of numbers that are rounded to T.
  __device__ void widen(float* x) const {
    const T* const e = reinterpret_cast<const T*>(chunk);
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] = static_cast<float>(e[i]);
  }
  __device__ static Piece rounded(const float* x) {
    Piece made;
    T* const e = reinterpret_cast<T*>(made.chunk);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if constexpr (std::is_same_v<T, float>) e[i] = x[i];
      else if constexpr (std::is_same_v<T, __half>) e[i] = __float2half_rn(x[i]);
      else e[i] = __float2bfloat16_rn(x[i]);
    }
    return made;
  }
};

// Of RMS norms: the squares of a block, which number(i) gives. A row's are added in the order of over_lanes().
template <class Number>
__device__ float squares_of_block(const Number& number, int n = 8) {
  float sum = 0;
  for (int i = 0; i < n; ++i) {
    const float x = number(i);
    sum = fmaf(x, x, sum);
  }
  return sum;
}
__device__ inline float norm_factor(const RotaryAppendKvParams& p, float squares) {
  return __frcp_rn(__fsqrt_rn(squares / static_cast<float>(p.d) + p.norm_eps));
}

// Eight elements from `at` on, `step` apart: by one piece where it is one of T.
template <class T>
__device__ __forceinline__ void load_eight(const void* base, DType type, std::int64_t at, std::int64_t step, float* x) {
  const T* const from = static_cast<const T*>(base) + at;
  if (type == row_type_of<T> && step == 1 && reinterpret_cast<std::uintptr_t>(from) % 16 == 0) {
    Piece<T>::of(from).widen(x);
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] = load(base, type, at + i * step);
  }
}

// Rows of one tensor to another: where head 0 of a new row lies, and how far the next head is.
template <class T>
struct RowHeads {
  const T* from;
  T* to;
  std::int64_t from_step, to_step;
};

// The channels of a thread: two blocks, and their angles.
template <Turn kTurn>
struct TurningChannels {
  static constexpr bool kTurns = kTurn != Turn::none;
  int column[2];
  bool turns;
  float cos[16], sin[16];

  __device__ TurningChannels(const RotaryAppendKvParams& p, int unit) {
    const int half = kTurns ? static_cast<int>(p.rotary) / 2 : 0;
    turns = 8 * unit < half;
    column[0] = turns ? 8 * unit : kRowChannels * unit;
    column[1] = turns ? 8 * unit + half : kRowChannels * unit + 8;
  }
  // From tables that mostly have the rows' type T.
  template <class T>
  __device__ void load_angles(const RotaryAppendKvParams& p, const AngleRows& rows) {
    if (!kTurns || !turns) return;
    load_table<T>(p, p.cos, rows.cos, p.cos_stride.d, cos);
    load_table<T>(p, p.sin, rows.sin, p.sin_stride.d, sin);
  }
  template <class T>
  __device__ __forceinline__ void load_table(const RotaryAppendKvParams& p, const void* table, std::int64_t row,
                                             std::int64_t step, float (&x)[16]) const {
    if (kTurn == Turn::neighbours && p.half_tables) {  // both of a pair have one angle
#pragma unroll
      for (int i = 0; i < 16; ++i) x[i] = load(table, p.table_type, row + (column[i / 8] + i % 8) / 2 * step);
    } else {
      load_eight<T>(table, p.table_type, row + column[0] * step, step, x);
      load_eight<T>(table, p.table_type, row + (p.half_tables ? column[0] : column[1]) * step, step, x + 8);
    }
  }
  __device__ void turn(float (&x)[16]) const {
    if constexpr (kTurns) {
      if (!turns) return;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const int a = kTurn == Turn::halves ? i : 2 * i, b = kTurn == Turn::halves ? i + 8 : 2 * i + 1;
        const float x1 = x[a], x2 = x[b];
        x[a] = fmaf(-x2, sin[a], x1 * cos[a]), x[b] = fmaf(x1, sin[b], x2 * cos[b]);
      }
    }
  }
};

// Normalises and turns heads [begin, end) of a row. All lanes of a warp call this with as many heads.
template <Turn kTurn, bool kNorms, class T>
__device__ void turn_rows(const RotaryAppendKvParams& p, const RotarySide& s, const TurningChannels<kTurn>& channels,
                          const RowHeads<T>& rows, std::int64_t begin, std::int64_t end, int lanes_of_row,
                          bool exists) {
  const bool norms = kNorms && s.norm;
  float weight[kNorms ? 16 : 1];
  if constexpr (kNorms) {
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const float w = norms ? load(s.norm, s.norm_type, (channels.column[i / 8] + i % 8) * s.norm_stride) : 1;
      weight[i] = norms && p.norm_plus_one ? 1 + w : w;
    }
  }
  Piece<T> next[2];
  const auto fetch = [&](std::int64_t h) {
#pragma unroll
    for (int i = 0; i < 2; ++i)
      if (exists && h < end) next[i] = Piece<T>::of(rows.from + h * rows.from_step + channels.column[i]);
  };
  fetch(begin);
  for (std::int64_t h = begin; h < end; ++h) {
    float x[16];
    next[0].widen(x), next[1].widen(x + 8);
    fetch(h + 1);  // before this row is written, which may be in place
    if (norms) {
      const auto squares_of = [&](int block) { return squares_of_block([&](int i) { return x[8 * block + i]; }); };
      float squares = squares_of(0) + squares_of(1);
      for (int bit = lanes_of_row / 2; bit > 0; bit /= 2) squares += __shfl_xor_sync(~0u, squares, bit);
      const float factor = norm_factor(p, squares);
#pragma unroll
      for (int i = 0; i < 16; ++i) x[i] = x[i] * factor * weight[kNorms ? i : 0];
    }
    channels.turn(x);
#pragma unroll
    for (int i = 0; i < 2; ++i)
      if (exists) Piece<T>::rounded(x + 8 * i).store(rows.to + h * rows.to_step + channels.column[i]);
  }
}

__host__ __device__ inline bool appends_values(const RotaryAppendKvParams& p) {
  return !p.k.to && p.k.heads > 0 && p.sides > 1;
}

// Rows of q and k, and those of v to the cache: heads_of_thread of them from blockIdx.y * heads_of_thread on, of q,
// then of k, then of v.
template <class T, Turn kTurn, bool kNorms>
__global__ void __launch_bounds__(kRowThreads)
    vector_rows(const __grid_constant__ RotaryAppendKvParams p, int lanes_of_row, int heads_of_thread) {
  const std::int64_t thread = std::int64_t{blockIdx.x} * kRowThreads + threadIdx.x, r = thread / lanes_of_row;
  const int unit = static_cast<int>(thread % lanes_of_row);
  bool exists = r < p.total;
  const std::int64_t i = exists ? sequence_with(p, r) : 0, first = p.from_begin ? p.from_begin[i] : 0;
  const std::int64_t t = r - (p.from_begin ? first : i * p.n);
  // Starts may be anything: what they leave out is skipped, and no row beyond the tensors is read.
  exists = exists && t >= 0 && first + t < (p.from_begin ? p.total : p.n);
  exists = exists && !(p.from_begin && t >= p.from_begin[i + 1] - first);
  TurningChannels<kTurn> channels(p, unit);
  if (exists && kTurn != Turn::none) channels.template load_angles<T>(p, angle_rows(p, i, t, first));

  // Of the heads before `done`, which other tensors have.
  std::int64_t done = 0;
  const std::int64_t begin = std::int64_t{blockIdx.y} * heads_of_thread, end = begin + heads_of_thread;
  const auto heads_of = [&](std::int64_t heads, const auto& work) {
    const std::int64_t from = clamp_to(begin - done, 0, heads), to = clamp_to(end - done, 0, heads);
    done += heads;
    if (from < to) work(from, to);
  };
  const auto rows_of = [&](const RotarySide& s) {
    const auto at = [&](const Strides& stride) { return i * stride.b + (first + t) * stride.s; };
    return RowHeads<T>{static_cast<const T*>(s.from) + at(s.from_stride), static_cast<T*>(s.to) + at(s.to_stride),
                       s.from_stride.h, s.to_stride.h};
  };
  heads_of(p.q.heads, [&](std::int64_t from, std::int64_t to) {
    turn_rows<kTurn, kNorms>(p, p.q, channels, rows_of(p.q), from, to, lanes_of_row, exists);
  });
  heads_of(p.k.heads, [&](std::int64_t from, std::int64_t to) {
    RowHeads<T> rows = rows_of(p.k);
    bool has_place = exists;
    if (RowPlace at; !p.k.to) {
      const AppendKvSide& s = p.side[0];
      has_place = exists && find_row(p, s, r, 0, at);
      rows.to = static_cast<T*>(s.to) + (has_place ? at.to : 0), rows.to_step = s.to_stride.h;
    }
    turn_rows<kTurn, kNorms>(p, p.k, channels, rows, from, to, lanes_of_row, has_place);
  });
  if (!appends_values(p)) return;
  heads_of(p.k.heads, [&](std::int64_t from, std::int64_t to) {
    const AppendKvSide& s = p.side[1];
    RowPlace at;
    if (!exists || !find_row(p, s, r, 0, at)) return;
    for (std::int64_t h = from; h < to; ++h)
      for (std::int64_t c = 8 * unit; c < s.size; c += 8 * lanes_of_row)
        Piece<T>::of(static_cast<const T*>(s.from) + at.from + h * s.from_stride.h + c)
            .store(static_cast<T*>(s.to) + at.to + h * s.to_stride.h + c);
  });
}

inline DType row_type(const RotaryAppendKvParams& p) {
  return p.q.heads > 0 ? p.q.from_type : p.k.from_type;
}
// Whether vector_rows() takes a call. (Its grid has 31 bits for the threads of all rows.)
inline bool has_vector_rows(const RotaryAppendKvParams& p) {
  const DType type = row_type(p);
  const std::int64_t size = type == DType::f32 ? 4 : 2, lanes = p.d / kRowChannels;
  const auto is_one = [&](DType of, const void* data, const Strides& s) {
    return of == type && is_vector(data, s, size);
  };
  const auto takes = [&](const RotarySide& s) {
    return is_one(s.from_type, s.from, s.from_stride) && (!s.to || is_one(s.to_type, s.to, s.to_stride));
  };
  if (p.d == 0 || p.d % kRowChannels != 0 || p.total * lanes >= std::int64_t{1} << 37) return false;
  if ((p.q.heads > 0 && !takes(p.q)) || (p.k.heads > 0 && !takes(p.k))) return false;
  if (p.rotary % kRowChannels != 0 || p.rotary_offset != 0) return false;
  // The lanes of a row are a power of two.
  if ((p.q.norm || p.k.norm) && (p.rotary != p.d || lanes > 32 || (lanes & (lanes - 1)) != 0)) return false;
  if (p.k.to || p.k.heads == 0) return true;
  if (p.sides > 2) return false;
  return std::all_of(p.side, p.side + p.sides, [&](const AppendKvSide& s) {
    return s.size % 8 == 0 && is_one(s.from_type, s.from, s.from_stride) && is_one(s.to_type, s.to, s.to_stride);
  });
}

template <class T, Turn kTurn, bool kNorms>
cudaError_t launch_vector_rows(const RotaryAppendKvParams& p, cudaStream_t stream) {
  constexpr std::int64_t kThreadsWanted = 132 * 1536;  // more than that: threads have several heads
  constexpr std::int64_t kMaxBlocks = 65535;           // in y
  const std::int64_t lanes = p.d / kRowChannels, threads = p.total * lanes;
  const std::int64_t heads = p.q.heads + p.k.heads + (appends_values(p) ? p.k.heads : 0);
  const std::int64_t each = std::max({threads * heads / kThreadsWanted, ceil_div(heads, kMaxBlocks), std::int64_t{1}});
  const dim3 blocks(static_cast<unsigned>(at_least_1(ceil_div(threads, kRowThreads))),
                    static_cast<unsigned>(at_least_1(ceil_div(heads, each))));
  return launch_clusters(1, false, vector_rows<T, kTurn, kNorms>, blocks, kRowThreads, 0, stream, p,
                         static_cast<int>(lanes), static_cast<int>(each));
}
// Calls launch(T()) with the type's T.
template <class Launch>
cudaError_t with_row_type(DType type, const Launch& launch) {
  if (type == DType::f32) return launch(float());
  if (type == DType::f16) return launch(__half());
  return launch(__nv_bfloat16());
}

}  // namespace rapt::cuda
