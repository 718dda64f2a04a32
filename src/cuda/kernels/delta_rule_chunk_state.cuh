// The state of delta_rule_prefill, 64 columns of it, in a warpgroup's registers through a part of its tokens.
#pragma once

#include "cuda/hopper/fragment.cuh"
#include "cuda/hopper/progress.cuh"
#include "cuda/kernels/delta_rule_chunk_parts.cuh"

namespace rapt::cuda {

// S^T [64, kD] as wgmma leaves it: element 4 j + 2 i + b of a lane belongs to column row_of(i) of the state and channel
// 8 j + 2 (lane % 4) + b.
template <int kD>
class ChunkState {
 public:
  using Record = ChunkRecord<kD>;

  __device__ ChunkState(const DeltaRuleParams& p, const StatePart& part, int column)
      : p_(p),
        b_(part.b),
        h_(part.h),
        first_(part.first),
        end_(part.end),
        warp_(threadIdx.x / 32 % 4),
        lane_(threadIdx.x % 32),
        column_(column + 16 * warp_),
        v_(p.v, p.begin ? 0 : part.b, part.first, part.h / p.v_group),
        out_offset_(token_at(p.out.stride, p.begin ? 0 : part.b, part.first, part.h)) {
    const auto are_pairs = [](const void* data, std::int64_t at, std::int64_t token_stride, std::int64_t stride) {
      return stride == 1 && ((reinterpret_cast<std::uintptr_t>(data) / 2 + at) | token_stride) % 2 == 0;
    };
    whole_pairs_ =
        uniform(column + 64 <= p.dv && are_pairs(v_.first, 0, v_.token_stride, v_.stride) && p.out.type != DType::f32 &&
                are_pairs(p.out.data, out_offset_, p.out.stride.s, p.out.stride.d)) != 0;
  }

  // From memory or to it.
  __device__ void load(const StateRows& rows, std::int64_t slot) {
#pragma unroll
    for (float& x : s_) x = 0;
    each(rows, slot, [](float& x, const auto* from) { x = static_cast<float>(*from); });
  }
  __device__ void store(const StateRows& rows, std::int64_t slot) {
    each(rows, slot, [](const float& x, auto* to) { *to = x; });
  }

  // To the same threads of another block and from them.
  __device__ void hand_over(const StateHandover& handover, int block) const {
    float4* const to = handover.states + block * kHandedOver + threadIdx.x % 128;
#pragma unroll
    for (int j = 0; j < kD / 8; ++j) to[128 * j] = make_float4(s_[4 * j], s_[4 * j + 1], s_[4 * j + 2], s_[4 * j + 3]);
    __syncwarp();
    if (lane_ == 0) count_up(handover.ready + 4 * block + warp_);
  }
  __device__ void take_over(const StateHandover& handover, int block) {
    // All lanes poll: a loop in which lanes can diverge costs the loops around it their uniform registers.
    while (uniform(counted(handover.ready + 4 * block + warp_)) == 0) __nanosleep(100);
    __syncwarp();
    const float4* const from = handover.states + block * kHandedOver + threadIdx.x % 128;
#pragma unroll
    for (int j = 0; j < kD / 8; ++j) {
      const float4 four = from[128 * j];
      s_[4 * j] = four.x, s_[4 * j + 1] = four.y, s_[4 * j + 2] = four.z, s_[4 * j + 3] = four.w;
    }
  }

  // Starts loading v of the chunk from `token` on.
  __device__ void load_values(int token) {
    if (whole_pairs_) {
      load_whole_values(token);
      return;
    }
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int at = token + 8 * n + lane_ / 4;
        v_ahead_[n][i] = at < end_ ? load_pair(v_, at, pair_column(i), static_cast<int>(p_.dv)) : 0;
      }
  }

  // What a chunk did that its common case leaves to finish().
  struct Rest {
    int rows;
    int unknown_from[2];  // token of the chunk, in either column
    bool any_unknown;
    float out[2][4];
  };

  // What the chunk's tokens, of which some are in the record, do to the state, and read from it. `done` is called when
  // the record is not needed any more. Returns whether finish() is to be called; what it does is seldom needed, and
  // would stand between the instructions of every chunk.
  template <class Done>
  __device__ bool advance(const Record& record, int token, Rest& rest, const Done& done) {
    round();
    rest.rows = static_cast<int>(__float_as_uint(load4(record.count())));
    float sums[16] = {};  // of predictions, then of read-outs
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kD / 16; ++step)
      wgmma_abt<__nv_bfloat16>(sums, rounded_ + 4 * step,
                               matrix_at(record.rows() + step / 4 * Record::kPanelBytes) + step % 4 * 2, step > 0);
    wgmma_commit();
    float u[2][4];
    float(&out)[2][4] = rest.out;
    rest.unknown_from[0] = rest.unknown_from[1] = kChunk;
    take_values(u, rest.rows);
    if (whole_pairs_) load_whole_values(token + kChunk);
    float prediction_factor[2][2], output_factor[2][2];
    load_factors(prediction_factor, record.prediction_factors()), load_factors(output_factor, record.output_factors());
    std::uint32_t inverse[4], weights[4];
    const std::uint32_t place = ((lane_ % 8 + lane_ / 16 * 8) * kChunk + lane_ / 8 % 2 * 8) * 2;
    load_matrices(record.inverse() + place, inverse), load_matrices(record.weights() + place, weights);
    wgmma_wait<0>();
    pin(sums);
    decay(record);
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (p_.has_delta) u[n][i] = fmaf(-prediction_factor[n][i % 2], sums[4 * n + i], u[n][i]);
        out[n][i] = output_factor[n][i % 2] * sums[8 + 4 * n + i];
      }
    std::uint32_t fragment[4];
    to_fragment(fragment, u);
    rest.any_unknown = take_out(fragment, rest.unknown_from);
    zero(u);
    multiply(u[0], fragment, inverse[0], inverse[1]), multiply(u[1], fragment, inverse[2], inverse[3]);
    to_fragment(fragment, u);
    rest.any_unknown |= take_out(fragment, rest.unknown_from);
    float write_factor[2][2];
    load_factors(write_factor, record.write_factors());
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) u[n][i] *= write_factor[n][i % 2];
    std::uint32_t written[4];
    to_fragment(written, u);
    pin(s_);
    wgmma_fence();
    wgmma_ab<__nv_bfloat16>(s_, written, matrix_at(record.writes(), Record::kWritePanelBytes), 1);
    wgmma_commit();
    multiply(out[0], fragment, weights[0], weights[1]), multiply(out[1], fragment, weights[2], weights[3]);
    const bool is_common = whole_pairs_ && rest.rows >= min(kChunk, end_ - token) && !rest.any_unknown;
    if (is_common) store_whole_out(out, token, rest.rows);
    wgmma_wait<0>();
    pin(s_);
    done();
    return !is_common;
  }
  // The chunk's record may be another one's by now.
  __device__ void finish(int token, Rest& rest) {
    if (!whole_pairs_) load_values(token + kChunk);
    if (rest.any_unknown) make_unknown(rest.out, rest.unknown_from);
    if (whole_pairs_) store_whole_out(rest.out, token, rest.rows);
    else store_out(rest.out, token, rest.rows);
    if (rest.any_unknown) {
#pragma unroll
      for (int i = 0; i < 2; ++i)
        if (rest.unknown_from[i] < kChunk)
#pragma unroll
          for (int j = 0; j < kD / 2; j += 4) s_[j + 2 * i] = s_[j + 2 * i + 1] = not_a_number();
    }
    for (int at = token + rest.rows; at < min(token + kChunk, end_); ++at) recur(at);
  }

 private:
  __device__ int row_of(int i) const {
    return lane_ / 4 + 8 * i;
  }
  __device__ int pair_column(int i) const {
    return column_ + 8 * i + lane_ % 4 * 2;
  }
  // Few instructions: they are executed once a state, so each must be fetched.
  template <class Take>
  __device__ void each(const StateRows& rows, std::int64_t slot, const Take& take) {
    if (!rows || slot < 0) return;
    if (rows.type == DType::f32) each_of(static_cast<float*>(rows.data) + rows.at(slot, h_), rows, take);
    else each_of(static_cast<__nv_bfloat16*>(rows.data) + rows.at(slot, h_), rows, take);
  }
  template <class Element, class Take>
  __device__ void each_of(Element* first, const StateRows& rows, const Take& take) {
    const int channels = static_cast<int>(p_.d) - lane_ % 4 * 2,
              columns = static_cast<int>(p_.dv) - column_ - row_of(0);
    Element* at = first + lane_ % 4 * 2 * rows.d_stride + (column_ + row_of(0)) * rows.dv_stride;
#pragma unroll
    for (int j = 0; j < kD / 8; ++j, at += 8 * rows.d_stride)
#pragma unroll
      for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int b = 0; b < 2; ++b)
          if (8 * j + b < channels && 8 * i < columns)
            take(s_[4 * j + 2 * i + b], at + b * rows.d_stride + 8 * i * rows.dv_stride);
  }
  __device__ void round() {
#pragma unroll
    for (int j = 0; j < kD / 4; ++j) rounded_[j] = pack<__nv_bfloat16>(s_[2 * j], s_[2 * j + 1]);
  }
  __device__ static void zero(float (&x)[2][4]) {
#pragma unroll
    for (auto& four : x)
#pragma unroll
      for (float& y : four) y = 0;
  }
  __device__ static void to_fragment(std::uint32_t (&to)[4], const float (&x)[2][4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) to[i] = pack<__nv_bfloat16>(x[i / 2][i % 2 * 2], x[i / 2][i % 2 * 2 + 1]);
  }
  __device__ void load_factors(float (&to)[2][2], std::uint32_t from) const {
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const float2 pair = load8(from + (8 * n + lane_ % 4 * 2) * 4);
      to[n][0] = pair.x, to[n][1] = pair.y;
    }
  }
  __device__ void decay(const Record& record) {
#pragma unroll
    for (int j = 0; j < kD / 8; ++j) {
      const float2 factor = load8(record.decay() + (8 * j + lane_ % 4 * 2) * 4);
      s_[4 * j] *= factor.x, s_[4 * j + 1] *= factor.y, s_[4 * j + 2] *= factor.x, s_[4 * j + 3] *= factor.y;
    }
  }

  // The loaded v of the chunk's first `rows` tokens.
  __device__ void take_values(float (&v)[2][4], int rows) const {
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int token = 8 * n + lane_ % 4 * 2;
        const std::uint32_t pair = transpose(v_ahead_[n][i]);
        v[n][2 * i] = low_of(pair), v[n][2 * i + 1] = high_of(pair);
        if (rows < kChunk) {
          if (token >= rows) v[n][2 * i] = 0;
          if (token + 1 >= rows) v[n][2 * i + 1] = 0;
        }
      }
  }
  // What is not finite would harm earlier tokens, whose factor of it is 0. So it counts as 0, and the column's results
  // and state are made unknown later, from its token on. Whether anything was taken out, of the warp's.
  __device__ bool take_out(std::uint32_t (&fragment)[4], int (&unknown_from)[2]) const {
    bool any = false;
#pragma unroll
    for (const std::uint32_t pair : fragment) any |= has_nonfinite(pair);
    if (!__any_sync(~0u, any)) return false;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        std::uint32_t& pair = fragment[2 * n + i];
        const int token = 8 * n + lane_ % 4 * 2;
        if (has_nonfinite(pair & 0xffff0000)) pair &= 0xffff, unknown_from[i] = min(unknown_from[i], token + 1);
        if (has_nonfinite(pair & 0xffff)) pair &= 0xffff0000, unknown_from[i] = min(unknown_from[i], token);
      }
#pragma unroll
      for (int bit = 1; bit <= 2; bit *= 2)
        unknown_from[i] = min(unknown_from[i], __shfl_xor_sync(~0u, unknown_from[i], bit));
    }
    return true;
  }
  __device__ void make_unknown(float (&out)[2][4], const int (&unknown_from)[2]) const {
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if (8 * n + lane_ % 4 * 2 + i % 2 >= unknown_from[i / 2]) out[n][i] = not_a_number();
  }

  __device__ void load_whole_values(int token) {
    const auto* const from = static_cast<const std::uint16_t*>(v_.first) +
                             std::int64_t{token + lane_ / 4} * v_.token_stride + pair_column(0);
    const int rows = end_ - token;
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int i = 0; i < 2; ++i)
        v_ahead_[n][i] = 8 * n + lane_ / 4 < rows
                             ? __ldg(reinterpret_cast<const std::uint32_t*>(from + 8 * n * v_.token_stride + 8 * i))
                             : 0;
  }

  __device__ void store_whole_out(const float (&out)[2][4], int token, int rows) const {
    auto* const first = static_cast<std::uint16_t*>(const_cast<void*>(p_.out.data)) + out_offset_ +
                        std::int64_t{token + lane_ / 4} * p_.out.stride.s + pair_column(0);
    const bool is_bf16 = p_.out.type == DType::bf16;
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float* const x = out[n] + 2 * i;
        const std::uint32_t pair = transpose(is_bf16 ? pack<__nv_bfloat16>(x[0], x[1]) : pack<__half>(x[0], x[1]));
        if (8 * n + lane_ / 4 < rows) *reinterpret_cast<std::uint32_t*>(first + 8 * n * p_.out.stride.s + 8 * i) = pair;
      }
  }
  __device__ void store_out(const float (&out)[2][4], int token, int rows) const {
    void* const to = const_cast<void*>(p_.out.data);
    const Strides& stride = p_.out.stride;
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float* const x = out[n] + 2 * i;
        if (p_.out.type == DType::f32) {
          const int column = column_ + row_of(i);
#pragma unroll
          for (int b = 0; b < 2; ++b)
            if (const int at = 8 * n + lane_ % 4 * 2 + b; at < rows && column < p_.dv)
              cuda::store(to, DType::f32, out_offset_ + std::int64_t{token + at} * stride.s + column * stride.d, x[b]);
          continue;
        }
        const std::uint32_t pair =
            transpose(p_.out.type == DType::f16 ? pack<__half>(x[0], x[1]) : pack<__nv_bfloat16>(x[0], x[1]));
        const int at = 8 * n + lane_ / 4, column = pair_column(i);
        auto* const first =
            static_cast<std::uint16_t*>(to) + out_offset_ + std::int64_t{token + at} * stride.s + column * stride.d;
        if (at >= rows || column >= p_.dv) continue;
        if (column + 1 < p_.dv && stride.d == 1 && reinterpret_cast<std::uintptr_t>(first) % 4 == 0) {
          *reinterpret_cast<std::uint32_t*>(first) = pair;
        } else {
          first[0] = static_cast<std::uint16_t>(pair);
          if (column + 1 < p_.dv) first[stride.d] = static_cast<std::uint16_t>(pair >> 16);
        }
      }
  }

  // One token by the recurrence.
  __device__ void recur(int token) {
    const DeltaHead head(p_, h_);
    const std::int64_t b = p_.begin ? 0 : b_, at = first_ + token;
    const HeadRows k_rows(p_.k, b, at, h_ / p_.k_group), q_rows(p_.q, b, at, h_ / p_.q_group), g_rows(p_.g, b, at, h_);
    const int d = static_cast<int>(p_.d), dv = static_cast<int>(p_.dv);
    const auto pair_of = [&](const HeadRows& rows, int j) {
      const std::uint32_t pair = load_pair(rows, 0, j + lane_ % 4 * 2, d);
      return make_float2(low_of(pair), high_of(pair));
    };
    float k_factor = 1, q_factor = p_.scale;
    if (p_.l2norm) {
      float squares[2] = {};
#pragma unroll 1
      for (int j = 0; j < kD; j += 8) {
        const float2 k = pair_of(k_rows, j), q = pair_of(q_rows, j);
        squares[0] = fmaf(k.x, k.x, fmaf(k.y, k.y, squares[0])),
        squares[1] = fmaf(q.x, q.x, fmaf(q.y, q.y, squares[1]));
      }
      k_factor = norm_factor(over_row(squares[0], Sum())), q_factor *= norm_factor(over_row(squares[1], Sum()));
    }
    const auto decay_at = [&](int c) {
      if (!g_rows || c >= d) return 1.f;
      const bool of_channel = p_.decay == Decay::channel;
      const float g = cuda::load(g_rows.first, g_rows.type, of_channel ? c * g_rows.stride : 0),
                  log2 = log2_decay(head, g, head.bias(of_channel ? c : 0));
      return exp2_approx(log2 > kMaxLog2 ? kMaxLog2 : log2);
    };
    float x[2] = {}, y[2] = {}, u[2];
    for_each_four(s_, [&](int j, float(&s)[4]) {
      const int c = j + lane_ % 4 * 2;
      const float2 k = pair_of(k_rows, j);
      const float factor[] = {decay_at(c), decay_at(c + 1)}, key[] = {k.x * k_factor, k.y * k_factor};
#pragma unroll
      for (int i = 0; i < 4; ++i) s[i] *= factor[i % 2], x[i / 2] = fmaf(s[i], key[i % 2], x[i / 2]);
    });
    const float beta = p_.beta ? head.beta(cuda::load(HeadRows(p_.beta, b, at, h_).first, p_.beta.type, 0)) : 1;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int column = column_ + row_of(i);
      const float v = column < dv ? cuda::load(v_.first, DType::bf16, token * v_.token_stride + column * v_.stride) : 0;
      u[i] = p_.has_delta ? beta * (v - over_row(x[i], Sum())) : v;
    }
    for_each_four(s_, [&](int j, float(&s)[4]) {
      const float2 k = pair_of(k_rows, j), q = pair_of(q_rows, j);
      const float key[] = {k.x * k_factor, k.y * k_factor}, query[] = {q.x * q_factor, q.y * q_factor};
#pragma unroll
      for (int i = 0; i < 4; ++i)
        s[i] = fmaf(key[i % 2], u[i / 2], s[i]), y[i / 2] = fmaf(s[i], query[i % 2], y[i / 2]);
    });
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int column = column_ + row_of(i);
      const float out = over_row(y[i], Sum());
      if (lane_ % 4 == 0 && column < dv)
        cuda::store(const_cast<void*>(p_.out.data), p_.out.type,
                    out_offset_ + token * p_.out.stride.s + column * p_.out.stride.d, out);
    }
  }
  static constexpr float kMaxLog2 = 88.02f * kLog2e;         // what decays stay at
  static constexpr std::int64_t kHandedOver = kD / 8 * 128;  // of a block

  const DeltaRuleParams& p_;
  const std::int64_t b_, h_, first_;
  const int end_;
  const int warp_, lane_, column_;
  const HeadRows v_;
  const std::int64_t out_offset_;  // of the first token
  float s_[kD / 2];
  std::uint32_t rounded_[kD / 4];  // S in bf16, as products' left operands
  std::uint32_t v_ahead_[2][2];
  bool whole_pairs_;  // of v and out, whole columns, two at once
};

}  // namespace rapt::cuda
