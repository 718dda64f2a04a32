// rotary_append_kv: rows of q and k, normalised and rotated -> q_out, and with v -> rows of the cache.
//
//     for each new row:                    widen its cos and sin, [rotary / 2] for each of a pair
//       for each head of q, then of k:     x = row in fp32
//         x *= w / sqrt(mean(x^2) + eps)   where there are weights
//         (x1, x2) = (x1 cos1 - x2 sin1, x2 cos2 + x1 sin2)
//         store x, rounded or quantised; of k also the row of v
#include "cpu/kernels/append_kv_row.hpp"
#include "cpu/kernels/rotary_append_kv_table.hpp"
#include "cpu/tile/bump_allocator.hpp"

namespace rapt::cpu::RAPT_ISA {
namespace {

struct RotaryScratch {
  float *row, *q_norm, *k_norm;
  float *cos[2], *sin[2];  // of the first and the second channel of each pair
  std::uint8_t* codes;

  RotaryScratch(BumpAllocator& allocator, std::int64_t size) {
    // A part of a row may begin anywhere, and is read by whole vectors.
    const std::int64_t n = round_up(size, kLanes) + kLanes;
    for (float** part : {&row, &q_norm, &k_norm, &cos[0], &cos[1], &sin[0], &sin[1]}) *part = allocator.take<float>(n);
    codes = allocator.take<std::uint8_t>(size);
  }
};

// What a norm multiplies by.
void load_norm(const RotarySide& s, std::int64_t d, bool plus_one, float* to) {
  if (!s.norm) return;
  with_float_type(s.norm_type,
                  [&](auto element) { pack_row(static_cast<const decltype(element)*>(s.norm), s.norm_stride, d, to); });
  for (std::int64_t c = 0; plus_one && c < d; c += kLanes) store(to + c, load(to + c) + vec(1.f));
}

void load_angles(const RotaryAppendKvParams& p, const AngleRows& at, const RotaryScratch& w) {
  const Pair first = pair_of(p, 0);
  const std::int64_t stride = p.interleaved && !p.half_tables ? 2 : 1, n = p.rotary / 2;
  with_float_type(p.table_type, [&](auto element) {
    using T = decltype(element);
    for (int i = 0; i < 2; ++i) {
      pack_row(static_cast<const T*>(p.cos) + at.cos + first.angle[i] * p.cos_stride.d, stride * p.cos_stride.d, n,
               w.cos[i]);
      pack_row(static_cast<const T*>(p.sin) + at.sin + first.angle[i] * p.sin_stride.d, stride * p.sin_stride.d, n,
               w.sin[i]);
    }
  });
}

// Rows end in zeros up to whole vectors.
void normalise(float* row, std::int64_t d, float eps, const float* norm) {
  vec sum(0.f);
  for (std::int64_t c = 0; c < d; c += kLanes) {
    const vec x = load(row + c);
    sum = fma(x, x, sum);
  }
  alignas(64) float sums[kLanes];
  store(sums, sum);
  float squares = 0;
  for (const float part : sums) squares += part;
  // xsimd's root is an estimate on NEON, and NaN of Inf.
  const vec factor(1 / __builtin_sqrtf(squares / static_cast<float>(d) + eps));
  for (std::int64_t c = 0; c < d; c += kLanes) store(row + c, load(row + c) * factor * load(norm + c));
}

void rotate(const RotaryAppendKvParams& p, const RotaryScratch& w) {
  const Pair first = pair_of(p, 0);
  const std::int64_t stride = p.interleaved ? 2 : 1, n = p.rotary / 2;
  float *const row1 = w.row + first.channel[0], *const row2 = w.row + first.channel[1];
  for (std::int64_t i = 0; i < n; i += kLanes) {
    const std::int64_t count = min(kLanes, n - i);
    const vec x1 = load_strided(row1 + i * stride, stride, count), x2 = load_strided(row2 + i * stride, stride, count);
    const vec y1 = fma(-x2, load(w.sin[0] + i), x1 * load(w.cos[0] + i));
    const vec y2 = fma(x1, load(w.sin[1] + i), x2 * load(w.cos[1] + i));
    store_strided(row1 + i * stride, stride, count, y1);
    store_strided(row2 + i * stride, stride, count, y2);
  }
}

// The row of a head, ready, in w.row.
void make_row(const RotaryAppendKvParams& p, const RotarySide& s, std::int64_t from, const float* norm,
              const RotaryScratch& w) {
  with_float_type(s.from_type, [&](auto element) {
    pack_row(static_cast<const decltype(element)*>(s.from) + from, s.from_stride.d, p.d, w.row);
  });
  if (s.norm) normalise(w.row, p.d, p.norm_eps, norm);
  rotate(p, w);
}

void store_row(const RotaryAppendKvParams& p, const RotarySide& s, std::int64_t at, const float* row) {
  with_float_type(s.to_type, [&](auto element) {
    auto* const to = static_cast<decltype(element)*>(s.to) + at;
    for (std::int64_t c = 0; c < p.d; c += kLanes)
      store_strided(to + c * s.to_stride.d, s.to_stride.d, min(kLanes, p.d - c), load(row + c));
  });
}

// New row t of sequence i, whose first row in ragged tensors is `first`.
struct NewRow {
  std::int64_t i, t, first, count;

  std::int64_t in(const Strides& s, std::int64_t h) const { return i * s.b + h * s.h + (first + t) * s.s; }
};

void append_head(const RotaryAppendKvParams& p, const NewRow& at, std::int64_t h, const RotaryScratch& w) {
  if (at.t < first_kept(p, at.count)) return;
  const std::int64_t j = p.len_before[at.i] + at.t;
  make_row(p, p.k, at.in(p.k.from_stride, h), w.k_norm, w);
  for (int part = 0; part < p.sides; ++part)
    if (p.key_column[part] >= 0)
      write_numbers(p.side[part], w.row + p.key_column[part], places_of_key(p, p.side[part], at.i, h, j, 0), w.codes);
  for (int part = 0; part < p.sides; ++part)
    if (const AppendKvSide& s = p.side[part]; p.key_column[part] < 0)
      write_row(s, places_of_key(p, s, at.i, h, j, at.in(s.from_stride, h)), w.row, w.codes);
}

void run(const RotaryAppendKvParams& p, std::int64_t begin, std::int64_t end, std::byte* scratch) noexcept {
  const FloatEnvironment environment;
  BumpAllocator allocator(scratch);
  std::int64_t size = p.d;
  for (int side = 0; side < p.sides; ++side) size = max(size, p.side[side].size);
  const RotaryScratch w(allocator, size);
  load_norm(p.q, p.d, p.norm_plus_one, w.q_norm), load_norm(p.k, p.d, p.norm_plus_one, w.k_norm);
  const std::int64_t heads = p.q.heads + p.k.heads;
  for (std::int64_t item = begin; item < end;) {
    const std::int64_t row = item / heads, i = sequence_with(p, row);
    const NewRows rows = new_rows(p, i);
    const NewRow at{i, row - (p.from_begin ? rows.first : i * p.n), rows.first, rows.count};
    load_angles(p, angle_rows(p, i, at.t, at.first), w);
    for (std::int64_t last = min(end, (row + 1) * heads); item < last; ++item) {
      const std::int64_t h = item - row * heads - p.q.heads;
      if (h < 0) {
        make_row(p, p.q, at.in(p.q.from_stride, h + p.q.heads), w.q_norm, w);
        store_row(p, p.q, at.in(p.q.to_stride, h + p.q.heads), w.row);
      } else if (p.k.to) {
        make_row(p, p.k, at.in(p.k.from_stride, h), w.k_norm, w);
        store_row(p, p.k, at.in(p.k.to_stride, h), w.row);
      } else {
        append_head(p, at, h, w);
      }
    }
  }
}

}  // namespace

const RotaryAppendKvKernel kRotaryAppendKv = {.facts = {.operation = Operation::rotary_append_kv,
                                                        .phase = Phase::all,
                                                        .arithmetic = "f32",
                                                        .dtypes = kCacheTypes},
                                              .scratch_bytes = bytes_of<RotaryScratch>,
                                              .run = run};

}  // namespace rapt::cpu::RAPT_ISA
