// The records of delta_rule_prefill: a warpgroup loads the rows of a chunk's tokens and prepares what the state's
// products need of them.
//
// Decays may be of any strength. Sums of log decays start anew at the 8th token; products of a token of the second half
// and one of the first have the first half's end between them, where no factor is large. Within a half, factors are
// e^m and e^-m. Strong rows, whose sum m is below what such products take, are summed by ordinary arithmetic, each term
// with its own decay. Whether a row is strong, and all that it gives, depends on no later row. Rows that products
// cannot take at all are left out of the record, with all after them.
#pragma once

#include "cuda/kernels/delta_rule_chunk_parts.cuh"

namespace rapt::cuda {

// What half a chunk's products take, in units of log 2. With decays past 2^-64 rows of small numbers would lose digits,
// which bf16 has down to 2^-126.
constexpr float kMaxGrowth = 7, kMaxDecay = 64;
// The largest A, so that of (I + A)^-1 nothing is larger than 17^15; P; and beta.
constexpr float kMaxInteraction = 16, kMaxWeight = 0x1p60f, kMaxBeta = 0x1p60f;

// A barrier of the warpgroup; whether `is` holds in any of its threads.
__device__ inline bool any_of_warpgroup(int barrier, bool is) {
  int any;
  asm volatile(
      "{\n.reg .pred in, out;\nsetp.ne.b32 in, %1, 0;\n"
      "bar.red.or.pred out, %2, 128, in;\nselp.b32 %0, 1, 0, out;\n}"
      : "=r"(any)
      : "r"(static_cast<int>(is)), "r"(barrier)
      : "memory");
  return any != 0;
}

template <int kD, bool kChannelDecay>
class ChunkFactors {
 public:
  using Memory = FactorMemory<kD>;
  using Record = ChunkRecord<kD>;

  __device__ ChunkFactors(const DeltaRuleParams& p, Memory memory, int barrier)
      : p_(p),
        head_(p),
        memory_(memory),
        barrier_(barrier),
        warp_(threadIdx.x / 32 % 4),
        lane_(threadIdx.x % 32),
        half_(lane_ / 16),
        channel_(32 * warp_ + lane_ % 16 * 2) {}

  // Begins a part. Starts loading its chunk from `token` on, if there is one.
  __device__ void start(const StatePart& part, int token) {
    end_ = part.end;
    if (token >= end_) return;
    const auto rows = [&](const TokenRows& all, std::int64_t group) {
      return HeadRows(all, p_.begin ? 0 : part.b, part.first, part.h / group);
    };
    head_.start(part.h);
    const HeadRows k = rows(p_.k, p_.k_group), q = rows(p_.q, p_.q_group), g = rows(p_.g, 1);
    __syncwarp();
    if (lane_ == 0) keep(kK, k), keep(kQ, q), keep(kG, g), keep(kBeta, rows(p_.beta, 1));
    __syncwarp();
    const auto is_whole = [&](const HeadRows& rows) {
      const int size = rows.type == DType::f32 ? 4 : 2;
      return rows.stride == 1 && (reinterpret_cast<std::uintptr_t>(rows.first) | size * rows.token_stride) % 16 == 0;
    };
    whole_ = p_.d == kD && is_whole(k) && is_whole(q) && (!kChannelDecay || is_whole(g));
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int c = kChannelDecay ? channel_ + i : 0;
      bias_[i] = c < p_.d ? head_.bias(c) : 0;
    }
    load(token);
  }
  // One past the part's last token.
  __device__ int end() const {
    return end_;
  }

  // The record of the chunk from `token` on, which is loaded. Loads the one from `next` on meanwhile. Warp
  // `last_warp`, another one each time as it has other chunks to prepare meanwhile, completes the record, and a thread
  // of it calls `done`.
  template <class Done>
  __device__ void write(const Record& record, int token, int next, int last_warp, const Done& done) {
    copy_wait<0>();
    __syncwarp();
    const int rows = rows_from(token);
    if (!is_common_ || make_products<true>(record, rows) != 0) write_some(record, rows);
    load(next);
    if (warp_ != last_warp) return;
    invert(record);
    fence_async_proxy();
    __syncwarp();
    if (lane_ == 0) done();
  }

 private:
  // Where the part's rows begin lies in shared memory, as registers are short.
  static constexpr int kK = 0, kQ = 1, kG = 2, kBeta = 3;
  __device__ std::uint32_t start_of(int tensor) const {
    return memory_.starts() + (warp_ * 4 + tensor) * 8;
  }
  __device__ void keep(int tensor, const HeadRows& rows) const {
    asm volatile("st.shared.u64 [%0], %1;" ::"r"(start_of(tensor)), "l"(rows.first) : "memory");
  }
  __device__ HeadRows kept(int tensor, const TokenRows& all) const {
    HeadRows rows;
    asm volatile("ld.shared.u64 %0, [%1];" : "=l"(rows.first) : "r"(start_of(tensor)) : "memory");
    rows.token_stride = all.stride.s, rows.stride = all.stride.d, rows.type = all.type;
    return rows;
  }

  // Starts loading the chunk from `token` on; the warp's own channels.
  __device__ void load(int token) {
    if (token >= end_) return;
    // Each address is loaded where it is used: with all of them first, calls that fill the GPU take 1.08x as long.
    const auto k = [&] { return kept(kK, p_.k); };
    const auto q = [&] { return kept(kQ, p_.q); };
    const auto g = [&] { return kept(kG, p_.g); };
    if (warp_ < Memory::kWarps) {
      if (whole_) {
        load_whole_rows<2>(memory_.q(), q(), token), load_whole_rows<2>(memory_.k(), k(), token);
        if (kChannelDecay) {
          if (p_.g.type == DType::f32) load_whole_rows<4>(memory_.g(), g(), token);
          else load_whole_rows<2>(memory_.g(), g(), token);
        }
      } else {
        load_rows(memory_.q(), q(), token), load_rows(memory_.k(), k(), token);
        if (kChannelDecay) load_rows(memory_.g(), g(), token);
      }
    }
    copy_commit();
    const int own = min(token + lane_ % 16, end_ - 1);
    if (!kChannelDecay && p_.g) g_own_ = g().one(own);
    if (p_.beta) beta_own_ = kept(kBeta, p_.beta).one(own);
  }

  // Of the chunk from `token` on.
  __device__ int rows_from(int token) const {
    return min(kChunk, end_ - token);
  }
  // The record of the chunk's tokens that products take, of any decays.
  __device__ void write_some(const Record& record, int rows) {
    while (const unsigned left_out = make_products<false>(record, rows)) {
      if (rows == 0) break;
      rows = min(__ffs(static_cast<int>(left_out)) - 1, rows - 1);
      if (warp_ < Memory::kWarps) clear_rows(rows);
    }
  }

  // Rows of the chunk to shared memory, the warp's 32 channels, of kSize bytes each. Rows past the last token are 0.
  template <int kSize>
  __device__ void load_whole_rows(std::uint32_t to, const HeadRows& rows, int token) const {
    constexpr int kPieces = 2 * kSize, kRows = 32 / kPieces;  // of 16 bytes to a row, rows at once
    const int row = lane_ / kPieces, piece = lane_ % kPieces + warp_ * kPieces;
    const auto* from =
        static_cast<const std::byte*>(rows.first) + std::int64_t{token + row} * rows.token_stride * kSize + piece * 16;
    const std::int64_t step = kRows * rows.token_stride * kSize;
    const int there = rows_from(token) - row;
#pragma unroll
    for (int i = 0; i < kChunk / kRows; ++i, from += step)
      copy16(to + place(row + i * kRows, piece, kSize), from, i * kRows < there ? 16 : 0);
  }
  // The same of any rows.
  __device__ void load_rows(std::uint32_t to, const HeadRows& rows, int token) const {
    const int size = rows.type == DType::f32 ? 4 : 2, each = 16 / size, end = static_cast<int>(p_.d);
#pragma unroll 1
    for (int i = lane_; i < kChunk * 2 * size; i += 32) {
      const int row = i / (2 * size), first = 32 * warp_ + i % (2 * size) * each;
      const int count = token + row < end_ ? min(end - first, each) : 0;
      const auto* const from = static_cast<const std::byte*>(rows.first) +
                               (std::int64_t{token + row} * rows.token_stride + first * rows.stride) * size;
      std::uint32_t x[4] = {};
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        if (e >= count) break;
        if (size == 4) x[e % 4] = __ldg(reinterpret_cast<const std::uint32_t*>(from) + e * rows.stride);
        else
          x[e / 2] |= std::uint32_t{__ldg(reinterpret_cast<const std::uint16_t*>(from) + e * rows.stride)}
                      << e % 2 * 16;
      }
      store16(to + place(row, first * size / 16, size), make_uint4(x[0], x[1], x[2], x[3]));
    }
  }
  // Rows of q and k from `from` on become 0.
  __device__ void clear_rows(int from) const {
#pragma unroll 1
    for (int r = 0; r < kHalf; ++r)
      if (kHalf * half_ + r >= from) store4(memory_.q() + own_place(r, 2), 0), store4(memory_.k() + own_place(r, 2), 0);
    __syncwarp();
  }
  // Where 16 bytes of a row of elements of `size` bytes lie, as Memory::place().
  __device__ static std::uint32_t place(int row, int c, int size) {
    return static_cast<std::uint32_t>(row * size * kD + (c ^ row % 8 ^ row / 8 * 4) * 16);
  }
  // Where the lane's two channels of row `r` of its half lie.
  __device__ std::uint32_t own_place(int r, int size) const {
    return (half_ * kHalf + r) * size * kD + (channel_ * size / 16 ^ r ^ half_ * 4) * 16 + channel_ * size % 16;
  }

  // Returns rows, as bits, that are to be left out; 0 if there are none. kCommon: without what is seldom needed, which
  // would stand between the instructions of every chunk; not 0 if it is needed.
  template <bool kCommon>
  __device__ unsigned make_products(const Record& record, int rows) {
    beta_now_ = lane_ % 16 < rows ? (p_.beta && p_.has_delta ? head_.beta(beta_own_.one(p_.beta.type)) : 1.f) : 0.f;
    unsigned found = 0;  // rows: strong ones, and those to leave out in the upper half
    if (const unsigned out = __ballot_sync(~0u, !(abs_of(beta_now_) <= kMaxBeta))) found = out << 16;
    if (warp_ < Memory::kWarps) found |= write_rows<kCommon>(record, rows);
    if (!kCommon && lane_ == 0) store4(memory_.found() + warp_ * 4, found);
    is_common_ = !any_of_warpgroup(barrier_, found != 0);
    if (!is_common_) {
      if constexpr (kCommon) return ~0u;
      const float4 all = load16(memory_.found());
      found = __float_as_uint(all.x) | __float_as_uint(all.y) | __float_as_uint(all.z) | __float_as_uint(all.w);
      if (found & 0xffff) {
        if (warp_ < Memory::kWarps) sum_strong_rows();
        named_sync(barrier_, 128);
      }
    }
    const unsigned strong = from_first(found & 0xff) & 0xff | from_first(found & 0xff00) & 0xff00;
    if (warp_ == 3) write_scalars(record, rows);
    unsigned out = found & 0xffff0000;
    if (warp_ < 3) out |= finish_products<kCommon>(record, warp_, strong);
    fence_async_proxy();
    if (!any_of_warpgroup(barrier_, out != 0)) return 0;
    return kCommon ? ~0u : find_left_out(out, rows);
  }
  // The lowest bit, and the seven above it.
  __device__ static unsigned from_first(unsigned bits) {
    bits |= bits << 1, bits |= bits << 2;
    return bits | bits << 4;
  }
  __device__ void write_scalars(const Record& record, int rows) const {
    if (lane_ >= kChunk) return;
    const float of_key = norm_of(0, lane_);
    store4(record.prediction_factors() + lane_ * 4, __float_as_uint(of_key));
    store4(record.output_factors() + lane_ * 4, __float_as_uint(p_.scale * norm_of(1, lane_)));
    store4(record.write_factors() + lane_ * 4, __float_as_uint(of_key));
    if (lane_ == 0) store4(record.count(), static_cast<std::uint32_t>(rows));
  }
  // Seldom. Rows of products that are out of range, but for those of q that are not finite: these harm their token
  // alone.
  __device__ unsigned find_left_out(unsigned out, int rows) const {
    unsigned no_queries = 0;
#pragma unroll 1
    for (int r = 0; warp_ < Memory::kWarps && r < kHalf; ++r) {
      const int row = kHalf * half_ + r;
      if (row >= rows) continue;
      if (has_nonfinite(load4_bits(memory_.q() + own_place(r, 2)))) no_queries |= 1u << row;
      if (has_nonfinite(load4_bits(memory_.k() + own_place(r, 2)))) out |= 1u << (16 + row);
    }
    out = __reduce_or_sync(~0u, out), no_queries = __reduce_or_sync(~0u, no_queries);
    if (lane_ == 0) store8(memory_.found() + warp_ * 8, __uint_as_float(out), __uint_as_float(no_queries));
    named_sync(barrier_, 128);
    out = no_queries = 0;
#pragma unroll 1
    for (int w = 0; w < 4; ++w) {
      const float2 of_warp = load8(memory_.found() + w * 8);
      out |= __float_as_uint(of_warp.x), no_queries |= __float_as_uint(of_warp.y);
    }
    named_sync(barrier_, 128);
    // Of weights the lower bits, of all else the upper ones.
    return out >> 16 | (out & 0xffff & ~no_queries);
  }

  // The lane's g of its rows.
  __device__ void load_decays(float2 (&g)[kHalf]) const {
    if (p_.g.type == DType::f32) {
#pragma unroll
      for (int r = 0; r < kHalf; ++r) g[r] = load8(memory_.g() + own_place(r, 4));
      return;
    }
    const bool is_bf16 = p_.g.type == DType::bf16;
#pragma unroll
    for (int r = 0; r < kHalf; ++r) {
      const std::uint32_t pair = load4_bits(memory_.g() + own_place(r, 2));
      g[r] =
          is_bf16 ? make_float2(low_of(pair), high_of(pair)) : __half22float2(*reinterpret_cast<const __half2*>(&pair));
    }
  }

  // The rows that products need, and what the warp has of the products within the chunk. Returns strong rows, and in
  // the upper half those to leave out.
  template <bool kCommon>
  __device__ unsigned write_rows(const Record& record, int rows) {
    float2 g[kHalf];
    if constexpr (kChannelDecay) {
      load_decays(g);
      log2_decays(head_, bias_, g);
    } else {
      const float own = p_.g ? log2_decay(head_, g_own_.one(p_.g.type), bias_[0]) : 0;
#pragma unroll
      for (int r = 0; r < kHalf; ++r) g[r].x = g[r].y = __shfl_sync(~0u, own, kHalf * half_ + r);
    }
    if (rows < kChunk) {
#pragma unroll
      for (int r = 0; r < kHalf; ++r)
        if (kHalf * half_ + r >= rows) g[r] = make_float2(0, 0);
    }
    float max_g = 0;
#pragma unroll
    for (int r = 0; r < kHalf; ++r) {
      m_[r][0] = r > 0 ? m_[r - 1][0] + g[r].x : g[r].x, m_[r][1] = r > 0 ? m_[r - 1][1] + g[r].y : g[r].y;
      max_g = fmaxf(max_g, fmaxf(g[r].x, g[r].y));
    }
    const float(&sum)[2] = m_[kHalf - 1];
    unsigned found = 0;
    // Without growth the sum is the least.
    const bool in_range = max_g <= 0 && sum[0] >= -kMaxDecay && sum[1] >= -kMaxDecay;
    if (const bool all_in_range = __all_sync(~0u, in_range); !all_in_range) {
      if constexpr (kCommon) return ~0u;
      found = __reduce_or_sync(~0u, find_rows(g));
    }
    if (p_.l2norm) sum_squares();
    write_products<!kCommon>(record, in_range);
    __syncwarp();
    multiply_rows(record);
    return found;
  }
  // Strong rows, and in the upper half those whose decays products do not take.
  __device__ unsigned find_rows(const float2 (&g)[kHalf]) const {
    unsigned found = 0;
    float growth[2] = {}, sum[2] = {};
#pragma unroll
    for (int r = 0; r < kHalf; ++r) {
      const int row = kHalf * half_ + r;
      growth[0] += g[r].x > 0 ? g[r].x : 0, growth[1] += g[r].y > 0 ? g[r].y : 0;
      sum[0] += g[r].x, sum[1] += g[r].y;
      if (sum[0] < -kMaxDecay || sum[1] < -kMaxDecay) found |= 1u << row;
      if (growth[0] > kMaxGrowth || growth[1] > kMaxGrowth || isnan(sum[0]) || isnan(sum[1])) found |= 1u << (16 + row);
    }
    return found;
  }

  template <bool kStrong>
  __device__ void write_products(const Record& record, bool in_range) const {
    const float(&sum)[2] = m_[kHalf - 1];
    const float total[] = {exp2_approx(sum[0]), exp2_approx(sum[1])};
    const float other[] = {__shfl_xor_sync(~0u, total[0], 16), __shfl_xor_sync(~0u, total[1], 16)};
    if (half_ == 0) store8(record.decay() + channel_ * 4, other[0] * total[0], other[1] * total[1]);
    const float of_rows[] = {half_ ? other[0] : 1.f, half_ ? other[1] : 1.f},
                of_writes[] = {half_ ? 1.f : other[0], half_ ? 1.f : other[1]};
    const int panel = channel_ / 64, chunk = channel_ % 64 / 8, in_chunk = channel_ % 8 * 2;
    const std::uint32_t first = half_ * kHalf * Record::kRowBytes + in_chunk,
                        rows_at = record.rows() + panel * Record::kPanelBytes + first,
                        writes_at = record.writes() + panel * Record::kWritePanelBytes + first;
#pragma unroll
    for (int r = 0; r < kHalf; ++r) {
      const std::uint32_t own = memory_.at + own_place(r, 2), place = (chunk ^ r) * 16 + r * Record::kRowBytes;
      const float2 k = pair_at(own + Memory::kKeys), q = pair_at(own);
      // Decays from the half's start to the row, their inverse, and from the row to the half's end.
      float from_start[2], to_start[2], to_end[2];
      float start_k[2], start_q[2], end_k[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        from_start[i] = exp2_approx(m_[r][i]), to_start[i] = exp2_approx(-m_[r][i]);
        to_end[i] = total[i] * to_start[i];
        if (kStrong && !in_range) to_end[i] = exp2_approx(sum[i] - m_[r][i]);
        const float key = i == 0 ? k.x : k.y;
        start_k[i] = from_start[i] * key, start_q[i] = from_start[i] * (i == 0 ? q.x : q.y), end_k[i] = to_end[i] * key;
      }
      const auto put = [&](std::uint32_t to, float x, float y) { store4(to, pack<__nv_bfloat16>(x, y)); };
      put(rows_at + place, start_k[0] * of_rows[0], start_k[1] * of_rows[1]);
      put(rows_at + place + kChunk * Record::kRowBytes, start_q[0] * of_rows[0], start_q[1] * of_rows[1]);
      put(writes_at + place, end_k[0] * of_writes[0], end_k[1] * of_writes[1]);
      put(own + Memory::kLeft, to_start[0] * k.x, to_start[1] * k.y);
      put(own + Memory::kAcross, half_ ? start_k[0] : end_k[0], half_ ? start_k[1] : end_k[1]);
      if (half_) put(own + Memory::kQueries, start_q[0], start_q[1]);
    }
  }
  // What the warp has of the squares of rows: the diagonals of their products with themselves.
  __device__ void sum_squares() const {
#pragma unroll
    for (int tensor = 0; tensor < 2; ++tensor) {
      const std::uint32_t rows = tensor == 0 ? memory_.k() : memory_.q();
      float sum[2][4] = {};
#pragma unroll
      for (int step = 0; step < 2; ++step) {
        std::uint32_t x[4];
        load_matrices(rows + Memory::place(lane_ % 16, 4 * warp_ + 2 * step + lane_ / 16), x);
        multiply(sum[0], x, x[0], x[2]), multiply(sum[1], x, x[1], x[3]);
      }
      const float own = lane_ / 4 % 2 ? sum[0][1] : sum[0][0], next = lane_ / 4 % 2 ? sum[1][3] : sum[1][2];
      if (lane_ / 4 / 2 != lane_ % 4) continue;
      const std::uint32_t to = memory_.squares() + ((tensor * kChunk + lane_ / 4) * 4 + warp_) * 4;
      store4(to, __float_as_uint(own)), store4(to + kHalf * 16, __float_as_uint(next));
    }
  }

  // The warp's part of products of rows, over its 32 channels: 12 sums a lane, as they lie in three tiles of A and of
  // P: those of the first half's tokens with each other, of the second half's with the first's, and with each other.
  __device__ void multiply_rows(const Record& record) const {
    float a[3][4] = {}, w[3][4] = {};
    const int row = lane_ % 16, second = lane_ / 16;
    std::uint32_t across[4];
    load_matrices(memory_.at + Memory::kAcross + Memory::place(lane_ % 8, 4 * warp_ + lane_ / 8), across);
#pragma unroll
    for (int step = 0; step < 2; ++step) {
      const int chunk = 4 * warp_ + 2 * step + second, panel = chunk / 8;
      const std::uint32_t first = record.rows() + panel * Record::kPanelBytes;
      std::uint32_t k[4], q[4], left[4];
      load_matrices(row < kHalf ? first + Record::place(row, chunk % 8)
                                : memory_.at + Memory::kAcross + Memory::place(row, chunk),
                    k);
      load_matrices(row < kHalf ? first + Record::place(kChunk + row, chunk % 8)
                                : memory_.at + Memory::kQueries + Memory::place(row, chunk),
                    q);
      load_matrices(
          memory_.at + Memory::kLeft + Memory::place(lane_ % 8 + lane_ / 16 * 8, 4 * warp_ + 2 * step + lane_ / 8 % 2),
          left);
      multiply(a[0], k, left[0], left[1]), multiply(w[0], q, left[0], left[1]);
      multiply(a[1], k, across[2 * step], across[2 * step + 1]),
          multiply(w[1], q, across[2 * step], across[2 * step + 1]);
      multiply(a[2], k, left[2], left[3]), multiply(w[2], q, left[2], left[3]);
    }
    const std::uint32_t own = memory_.sums() + (warp_ * 32 + lane_) * 16;
#pragma unroll
    for (int tile = 0; tile < 3; ++tile) {
      const int first = tile == 0 ? 0 : 2;
      store16(own + tile * 4 * 32 * 16,
              make_uint4(__float_as_uint(a[tile][first]), __float_as_uint(a[tile][first + 1]),
                         __float_as_uint(w[tile][first]), __float_as_uint(w[tile][first + 1])));
    }
  }

  // The same within halves by ordinary arithmetic, of two channels a lane.
  __device__ void sum_strong_rows() const {
    float2 k[kHalf];
#pragma unroll
    for (int j = 0; j < kHalf; ++j) k[j] = pair_at(memory_.k() + own_place(j, 2));
#pragma unroll
    for (int t = 0; t < kHalf; ++t) {
      const float2 q = pair_at(memory_.q() + own_place(t, 2));
#pragma unroll
      for (int j = 0; j <= t; ++j) {
        const float x = exp2_approx(m_[t][0] - m_[j][0]) * k[j].x, y = exp2_approx(m_[t][1] - m_[j][1]) * k[j].y;
        float a = fmaf(x, k[t].x, y * k[t].y), w = fmaf(x, q.x, y * q.y);
#pragma unroll
        for (int bit = 8; bit > 0; bit /= 2) a += __shfl_xor_sync(~0u, a, bit), w += __shfl_xor_sync(~0u, w, bit);
        if (lane_ % 16 == 0) {
          const std::uint32_t at = memory_.strong() + ((warp_ * 2 * kChunk + kHalf * half_ + t) * kHalf + j) * 4;
          store4(at, __float_as_uint(a)), store4(at + kChunk * kHalf * 4, __float_as_uint(w));
        }
      }
    }
  }

  // What gives row `row` of k (0) or q (1) a norm of 1.
  __device__ float norm_of(int tensor, int row) const {
    if (!p_.l2norm) return 1;
    const float4 x = load16(memory_.squares() + (tensor * kChunk + row) * 16);
    return norm_factor(Memory::kWarps == 4 ? x.x + x.y + x.z + x.w : x.x + x.y);
  }

  // Adds up what warps have of a tile; A to interactions(), P to the record. Returns rows that are to be left out: of
  // P, and in the upper half of A.
  template <bool kCommon>
  __device__ unsigned finish_products(const Record& record, int tile, unsigned strong) const {
    const int row = lane_ / 4 + (tile > 0 ? kHalf : 0), column = lane_ % 4 * 2 + (tile == 2 ? kHalf : 0);
    float4 sum = make_float4(0, 0, 0, 0);  // two of A, two of P
#pragma unroll
    for (int w = 0; w < Memory::kWarps; ++w) {
      const float4 x = load16(memory_.sums() + ((tile * 4 + w) * 32 + lane_) * 16);
      sum.x += x.x, sum.y += x.y, sum.z += x.z, sum.w += x.w;
    }
    if (!kCommon && tile != 1 && (strong >> row & 1)) {
      sum = make_float4(0, 0, 0, 0);
      for (int w = 0; w < Memory::kWarps; ++w) {
        const std::uint32_t at = memory_.strong() + ((w * 2 * kChunk + row) * kHalf + column % kHalf) * 4;
        const float2 a = load8(at), p = load8(at + kChunk * kHalf * 4);
        sum.x += a.x, sum.y += a.y, sum.z += p.x, sum.w += p.y;
      }
    }
    const float of_columns[] = {norm_of(0, column), norm_of(0, column + 1)}, of_k = norm_of(0, row),
                of_q = p_.scale * norm_of(1, row), beta = __shfl_sync(~0u, beta_now_, row);
    float a[] = {sum.x * of_k * of_columns[0] * beta, sum.y * of_k * of_columns[1] * beta},
          p[] = {sum.z * of_q * of_columns[0], sum.w * of_q * of_columns[1]};
    bool is_in[2] = {true, true};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (column + i >= row || !p_.has_delta) a[i] = 0;
      if (column + i > row) p[i] = 0;
      is_in[0] &= abs_of(a[i]) <= kMaxInteraction, is_in[1] &= abs_of(p[i]) <= kMaxWeight;
    }
    store8(memory_.interactions() + (row * kChunk + column) * 4, a[0], a[1]);
    const std::uint32_t at = record.weights() + (row * kChunk + column) * 2;
    store4(at, pack<__nv_bfloat16>(p[0], p[1]));
    if (tile == 0) store4(at + kHalf * 2, 0);  // above the diagonal
    return static_cast<unsigned>(!is_in[0]) << row << 16 | static_cast<unsigned>(!is_in[1]) << row;
  }

  // T = (I + A)^-1 diag(beta): each lane solves for a column.
  __device__ void invert(const Record& record) const {
    const int column = lane_ % kChunk;
    const float beta = __shfl_sync(~0u, beta_now_, column);
    float x[kChunk];
#pragma unroll
    for (int t = 0; t < kChunk; ++t) {
      float sum[2] = {t == column ? 1.f : 0.f, 0};
#pragma unroll
      for (int i = 0; i < t; i += 4) {
        const float4 a = load16(memory_.interactions() + (t * kChunk + i) * 4);
        sum[0] = fmaf(-a.x, x[i], sum[0]);
        if (i + 1 < t) sum[1] = fmaf(-a.y, x[i + 1], sum[1]);
        if (i + 2 < t) sum[0] = fmaf(-a.z, x[i + 2], sum[0]);
        if (i + 3 < t) sum[1] = fmaf(-a.w, x[i + 3], sum[1]);
      }
      x[t] = sum[0] + sum[1];
    }
    if (lane_ >= kChunk) return;
#pragma unroll
    for (int t = 0; t < kChunk; ++t) {
      const std::uint16_t bits = __bfloat16_as_ushort(__float2bfloat16_rn(x[t] * beta));
      asm volatile("st.shared.b16 [%0], %1;" ::"r"(record.inverse() + (t * kChunk + column) * 2), "h"(bits) : "memory");
    }
  }

  const DeltaRuleParams& p_;
  DeltaHead head_;
  const Memory memory_;
  int end_ = 0;
  const int barrier_, warp_, lane_, half_, channel_;  // the lane's half of the rows, and its first of two channels
  bool whole_;                                        // rows are whole and can be copied
  float bias_[2];
  FourElements g_own_{}, beta_own_{};  // of the token of row lane % 16
  float beta_now_ = 0;
  bool is_common_ = true;  // the chunk before, and so, most likely, this one
  float m_[kHalf][2];      // sums of log decays from the half's start
};

}  // namespace rapt::cuda
