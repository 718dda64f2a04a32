// Fallback rows: rows whose numbers the arithmetic of tensor cores does not carry are recomputed on ordinary cores, key
// by key.
#pragma once

#include <type_traits>

#include "cuda/tile/score.cuh"

namespace rapt::cuda {

constexpr float kHugeScore = 0x1p20f;  // from here on a weight loses digits to the score's size

// Reads q, k and v for a warp that goes over keys: chunks of eight columns, and pairs. Several loads are issued before
// the first is waited for, so there must be no branch between them.
template <class T>  // a 16-bit type
struct RowReader {
  using Chunk = uint4;
  using Pair = std::uint32_t;
  static constexpr int kChunks = 4, kPairs = 8;  // loads in flight

  const AttentionParams& p;
  const bool vector;                // all rows are contiguous, aligned, and multiples of a chunk
  std::int64_t k_at = 0, v_at = 0;  // offsets of the lane's key

  __device__ explicit RowReader(const Head& head)
      : p(head.p),
        vector(is_vector(p.q, p.q_stride, 2) && is_vector(p.k, p.k_stride, 2) && is_vector(p.v, p.v_stride, 2) &&
               p.d % 8 == 0 && p.dv % 8 == 0) {}
  // Selects the lane's key, and prefetches its rows of k and v.
  __device__ void select_key(const Head& head, std::int64_t key) {
    k_at = head.key_at(p.k_stride, key), v_at = head.key_at(p.v_stride, key);
    if (!vector) return;
    for (int line = 0; line < p.d; line += 64) prefetch(static_cast<const T*>(p.k) + k_at + line);
    for (int line = 0; line < p.dv; line += 64) prefetch(static_cast<const T*>(p.v) + v_at + line);
  }
  // Columns of the query from `column` on. Past the last column there may be anything.
  __device__ Chunk query(std::int64_t at, int column) const {
    Chunk chunk[1];
    chunks(p.q, at, p.q_stride.d, column, chunk);
    return chunk[0];
  }
  __device__ void key(int column, Chunk (&chunk)[kChunks]) const { chunks(p.k, k_at, p.k_stride.d, column, chunk); }
  // Pairs of values of the keys of kKeys lanes from `lane` on, 64 columns apart.
  template <int kKeys, int kColumns>
  __device__ void values(int lane, int column, Pair (&pair)[kKeys][kColumns]) const {
    const auto* const data = static_cast<const T*>(p.v);
    const int last = static_cast<int>(p.dv) - 2;
#pragma unroll
    for (int n = 0; n < kKeys; ++n) {
      const T* const from = data + __shfl_sync(~0u, v_at, lane + n);
      if (vector) {
#pragma unroll
        for (int i = 0; i < kColumns; ++i)
          pair[n][i] = *reinterpret_cast<const Pair*>(from + min(column + 64 * i, last));
      } else {
#pragma unroll
        for (int i = 0; i < kColumns; ++i) pair[n][i] = scalars<Pair, 2>(from, p.v_stride.d, column + 64 * i, last + 2);
      }
    }
  }
  __device__ static float element(const Chunk& chunk, int i) {
    return of(&chunk.x + i / 2, i % 2);
  }
  __device__ static float element(const Pair& pair, int i) {
    return of(&pair, i);
  }

 private:
  __device__ static void prefetch(const T* at) {
    asm volatile("prefetch.global.L1 [%0];" ::"l"(at));
  }
  __device__ static float of(const std::uint32_t* two, int i) {
    T elements[2];
    memcpy(elements, two, sizeof elements);
    return static_cast<float>(elements[i]);
  }
  template <class Word, int kCount>
  __device__ static Word scalars(const T* from, std::int64_t stride, int column, int size) {
    T elements[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) elements[i] = from[min(column + i, size - 1) * stride];
    Word word;
    memcpy(&word, elements, sizeof word);
    return word;
  }
  template <int kCount>
  __device__ void chunks(const void* data, std::int64_t at, std::int64_t stride, int column,
                         Chunk (&chunk)[kCount]) const {
    const T* const from = static_cast<const T*>(data) + at;
    const int size = static_cast<int>(p.d);
    if (vector) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) chunk[i] = *reinterpret_cast<const Chunk*>(from + min(column + 8 * i, size - 8));
    } else {
#pragma unroll
      for (int i = 0; i < kCount; ++i) chunk[i] = scalars<Chunk, 8>(from, stride, column + 8 * i, size);
    }
  }
};

// The same for elements or codes of any type.
template <>
struct RowReader<void> {
  struct Chunk {
    float x[8];
  };
  using Pair = float2;
  static constexpr int kChunks = 1, kPairs = 1;

  const AttentionParams& p;
  const Head* head = nullptr;
  std::int64_t key_ = 0;

  __device__ explicit RowReader(const Head& of) : p(of.p), head(&of) {}
  __device__ void select_key(const Head&, std::int64_t key) { key_ = key; }
  __device__ Chunk query(std::int64_t at, int column) const {
    Chunk chunk{};
    for (int i = 0; i < 8 && column + i < p.d; ++i)
      chunk.x[i] = load_query(p.q, p.q_type, at + (column + i) * p.q_stride.d);
    return chunk;
  }
  __device__ void key(int column, Chunk (&chunk)[1]) const {
    const KvRow row = KvRow::of_key(*head, key_);
    for (int i = 0; i < 8; ++i) chunk[0].x[i] = column + i < p.d ? row[column + i] : 0.f;
  }
  template <int kKeys, int kColumns>
  __device__ void values(int lane, int column, Pair (&pair)[kKeys][kColumns]) const {
    for (int n = 0; n < kKeys; ++n) {
      const KvRow row = KvRow::of_value(*head, __shfl_sync(~0u, key_, lane + n));
      for (int i = 0; i < kColumns; ++i) {
        const int at = column + 64 * i;
        pair[n][i] = make_float2(at < p.dv ? row[at] : 0.f, at + 1 < p.dv ? row[at + 1] : 0.f);
      }
    }
  }
  __device__ static float element(const Chunk& chunk, int i) { return chunk.x[i]; }
  __device__ static float element(const Pair& pair, int i) { return i == 0 ? pair.x : pair.y; }
};

// Computes out and lse of rows of a sequence and kv head: row first_row + i for each bit i of `rows`. By a warp, out of
// line. It does a few rows at a time, which share the latency of loads, over blocks of 32 keys, a key to a lane. Hidden
// keys have no influence, whatever their values, and a row's bits do not depend on the other rows. For values of up to
// kMaxSize columns.
template <class T, int kMaxSize, bool kModified>
__device__ __noinline__ void recompute_rows(const AttentionParams& p, int b, int hk, int first_row, unsigned rows) {
  using Reader = RowReader<T>;
  constexpr int kRows = std::is_void_v<T> || kModified ? 1 : 4;  // modifiers need the registers of the other rows
  constexpr int kColumns = kMaxSize / 64;                        // a lane's pairs of columns, 64 apart
  constexpr int kKeys =
      kColumns < Reader::kPairs ? Reader::kPairs / kColumns : 1;  // keys whose values are loaded at once
  const int lane = threadIdx.x % 32, d = static_cast<int>(p.d), dv = static_cast<int>(p.dv);
  const Head head(p, b, hk);
  Reader reader(head);
#pragma unroll 1
  while (rows != 0) {
    // If fewer rows are left, the last one is repeated, with the same result.
    int number[kRows], begin[kRows], end[kRows];  // the keys [begin, end) that it sees, counted from `base`
    std::int64_t q_at[kRows], low = INT64_MAX, high = INT64_MIN;
    [[maybe_unused]] float scale[kRows];  // the factor of a row's scores, if queries may have scales
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      number[i] = rows == 0 ? number[max(i - 1, 0)] : first_row + __ffs(static_cast<int>(rows)) - 1;
      rows &= rows - 1;
      const Row row = row_of(head, number[i]);
      q_at[i] = row_at(p.q_stride, head, row);
      if constexpr (std::is_void_v<T>) scale[i] = score_scale(head, row);
      if (row.first < row.last) low = min(low, row.first), high = max(high, row.last);
    }
    const std::int64_t base = low < high ? low / 32 * 32 : 0;
    const int from = low < high ? static_cast<int>(low - base) : 0, to = low < high ? static_cast<int>(high - base) : 0;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const Row row = row_of(head, number[i]);
      begin[i] = static_cast<int>(clamp_to(row.first - base, 0, to));
      end[i] = static_cast<int>(clamp_to(row.last - base, 0, to));
    }

    double o[kRows][kColumns][2] = {}, row_sum[kRows] = {};
    float row_max[kRows];
#pragma unroll
    for (float& x : row_max) x = -kInfinity;
#pragma unroll 1
    for (int block = 0; block < to; block += 32) {
      const int lane_key = block + lane;
      reader.select_key(head, base + min(max(lane_key, from), to - 1));
      float dot[kRows][2] = {};
#pragma unroll 1
      for (int column = 0; column < d; column += 8 * Reader::kChunks) {
        typename Reader::Chunk k[Reader::kChunks];
        reader.key(column, k);
#pragma unroll
        for (int chunk = 0; chunk < Reader::kChunks; ++chunk) {
          const int at = column + 8 * chunk;
          if (at >= d) break;
#pragma unroll
          for (int i = 0; i < kRows; ++i) {
            const auto q = reader.query(q_at[i], at);
#pragma unroll
            for (int n = 0; n < 8; ++n) {
              const float product = Reader::element(q, n), with = Reader::element(k[chunk], n);
              if (at + n < d) dot[i][n % 2] = fmaf(product, with, dot[i][n % 2]);
            }
          }
        }
      }
      float weight[kRows], of_value[kRows];  // before and after dropout
      double rescale[kRows];
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        float score = -kInfinity;
        if (lane_key >= begin[i] && lane_key < end[i]) {
          score = (dot[i][0] + dot[i][1]) * (std::is_void_v<T> ? scale[i] : p.score.scale_log2);
          if (kModified) score = finish_score(head, row_of(head, number[i]), base + lane_key, score);
        }
        const float before = row_max[i];
        row_max[i] = next_row_max(before, over_lanes(score, Max()));
        rescale[i] = rescale_factor(before, row_max[i]);
        weight[i] = of_value[i] = weight_of(score, shift_of(row_max[i]));
        if constexpr (kModified) {
          const Row row = row_of(head, number[i]);
          if (is_dropped(p.score, {b, row.q_head, row.token, base + lane_key})) of_value[i] = -0.f;  // as if hidden
        }
      }
      float sum[kRows][kColumns][2] = {};
#pragma unroll 1
      for (int n = 0; n < 32; n += kKeys) {  // keys that do not exist have the row of one that does, and a weight of 0
        typename Reader::Pair values[kKeys][kColumns];
        reader.values(n, 2 * lane, values);
#pragma unroll
        for (int key = 0; key < kKeys; ++key)
#pragma unroll
          for (int i = 0; i < kRows; ++i) {
            const float of_key = __shfl_sync(~0u, of_value[i], n + key);
            if (is_hidden(of_key)) continue;
#pragma unroll
            for (int pair = 0; pair < kColumns; ++pair)
#pragma unroll
              for (int e = 0; e < 2; ++e)
                sum[i][pair][e] = fmaf(of_key, Reader::element(values[key][pair], e), sum[i][pair][e]);
          }
      }
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        if (block >= end[i] || block + 32 <= begin[i]) continue;
        row_sum[i] = fma(row_sum[i], rescale[i], static_cast<double>(weight[i]));
#pragma unroll
        for (int pair = 0; pair < kColumns; ++pair)
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            double& x = o[i][pair][e];
            const double add = sum[i][pair][e];
            x = isfinite(x) ? fma(x, rescale[i], add) : x + add;  // so that inf * 0 does not become NaN
          }
      }
    }

#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const Row row = row_of(head, number[i]);
      const auto all = static_cast<float>(over_lanes(row_sum[i], Sum()));
      const FinalizedRow f = finalize_row(row_max[i], all, sink_of(head, row), alibi_shift_log2(head, row));
      const float output_scale = (kModified && p.score.dropout.given ? p.score.dropout.scale : 1) / f.sum;
      const std::int64_t out = row_at(p.out_stride, head, row);
#pragma unroll
      for (int pair = 0; pair < kColumns; ++pair)
#pragma unroll
        for (int e = 0; e < 2; ++e)
          if (const int column = 64 * pair + 2 * lane + e; column < dv)
            store(p.out, p.out_type, out + column * p.out_stride.d,
                  f.sum == 0 ? 0.f : static_cast<float>(o[i][pair][e]) * f.root_scale * f.root_scale * output_scale);
      if (p.lse && lane == 0) p.lse[row_at(p.lse_stride, head, row)] = f.lse;
    }
  }
}

}  // namespace rapt::cuda
