// The tokens of a state head in shared memory, as the recurrence of delta_rule needs them.
#pragma once

#include "cuda/tile/delta_rule.cuh"

namespace rapt::cuda {

constexpr int kScalars = 4;  // of a token, behind its rows: decay and beta

// How a state is cut among lanes.
struct DeltaRuleConfig {
  int d;        // rows of a state, padded
  int columns;  // of each lane
  bool channel_decay;
  friend constexpr bool operator==(const DeltaRuleConfig&, const DeltaRuleConfig&) = default;

  RAPT_HOST_DEVICE constexpr int lanes() const { return d <= 128 ? 8 : 16; }  // that share a column
  RAPT_HOST_DEVICE constexpr int rows() const { return d / lanes(); }         // of each lane
  RAPT_HOST_DEVICE constexpr int warp_columns() const { return 32 / lanes() * columns; }
  // Numbers of a token in shared memory.
  RAPT_HOST_DEVICE constexpr int record_size(int reads, int block_columns) const {
    return d * (1 + channel_decay + reads) + kScalars + block_columns;
  }
};

// Query heads [first, first + count) of each state head. More than fit into a launch take several, each from the
// initial state; the last one writes the final state.
struct Reads {
  int first, count;
  bool writes_state;
};

// A token's numbers in shared memory.
template <DeltaRuleConfig kConfig>
struct Record {
  float* at;
  __device__ float* k() const { return at; }
  __device__ float* decay() const { return at + kConfig.d; }
  __device__ float* q(int read) const { return at + kConfig.d * (1 + kConfig.channel_decay + read); }
  __device__ float* scalars(int reads) const { return q(reads); }
  __device__ float* v(int reads) const { return q(reads) + kScalars; }
};

// Loads a head's tokens, a group ahead of write(), which prepares them in shared memory.
template <DeltaRuleConfig kConfig>
class TokenPreparation {
 public:
  static constexpr int kD = kConfig.d, kSteps = RowElements<kD>::kSteps;

  // With columns from `column` on of v.
  __device__ TokenPreparation(const DeltaRuleParams& p, const Reads& reads, std::int64_t b, std::int64_t h,
                              TokenRange range, std::int64_t column, int columns)
      : p_(p),
        reads_(reads),
        head_(p, h),
        k_(p.k, p.begin ? 0 : b, range.first, h / p.k_group),
        q_(p.q, p.begin ? 0 : b, range.first, h / p.q_group * p.reads + reads.first),
        v_(p.v, p.begin ? 0 : b, range.first, h / p.v_group),
        g_(p.g, p.begin ? 0 : b, range.first, h),
        beta_(p.beta, p.begin ? 0 : b, range.first, h),
        count_(range.count),
        column_(static_cast<int>(column)),
        columns_(columns) {
    const int warp = threadIdx.x / 32, warps = blockDim.x / 32;
#pragma unroll
    for (int kind = 0; kind < 3; ++kind) token_[kind] = (warp + warps * ((kind + 3 - warp % 3) * (warps % 3) % 3)) / 3;
#pragma unroll
    for (int i = 0; i < 4 * kSteps; ++i) {
      const int c = kConfig.channel_decay ? 4 * lane() + i / 4 * 128 + i % 4 : 0;
      bias_[i] = c < p.d ? head_.bias(c) : 0;
    }
  }

  __device__ void load(std::int64_t group) {
    const int d = static_cast<int>(p_.d);
    if (group + token_[0] < count_) k_row_ = k_.template row<kD>(group + token_[0], d);
    if (group + token_[1] < count_) q_row_ = q_.template row<kD>(group + token_[1], d);
    const std::int64_t token = group + token_[2];
    if (token >= count_) return;
    if constexpr (kConfig.channel_decay) g_row_ = g_.template row<kD>(token, d);
    else if (g_) decay_ = g_.one(token);
    if (beta_) beta_row_ = beta_.one(token);
    if (4 * lane() < columns_) v_row_ = v_.four(token, column_ + 4 * lane(), static_cast<int>(p_.dv));
  }
  __device__ void write(std::int64_t group, float* records) const {
    const auto record = [&](int i) {
      return Record<kConfig>{records + i * kConfig.record_size(reads_.count, columns_)};
    };
    const RowNumbers<kD> k(k_row_, k_.type), q(q_row_, q_.type);
    float k_factor = 1, q_factor = 1;
    if (p_.l2norm) {
      k_factor = norm_factor(over_lanes(k.squares(), Sum()));
      q_factor = norm_factor(over_lanes(q.squares(), Sum()));
    }
    if (group + token_[0] < count_) k.write(k_factor, record(token_[0]).k());
    if (group + token_[1] < count_) {
      q.write(p_.scale * q_factor, record(token_[1]).q(0));
      for (int r = 1; r < reads_.count; ++r) write_query(r, group + token_[1], record(token_[1]).q(r));
    }
    if (group + token_[2] >= count_) return;
    const Record<kConfig> token = record(token_[2]);
    if (4 * lane() < columns_) *reinterpret_cast<float4*>(token.v(reads_.count) + 4 * lane()) = v_row_.numbers(v_.type);
    float* const scalars = token.scalars(reads_.count);
    if (lane() == 0) scalars[1] = beta_ ? head_.beta(beta_row_.one(beta_.type)) : 1;
    if constexpr (kConfig.channel_decay) write_decays(token.decay());
    else if (lane() == 0) scalars[0] = g_ ? head_.decay(decay_.one(g_.type), bias_[0]) : 1;
  }

 private:
  static __device__ int lane() {
    return threadIdx.x % 32;
  }
  // Of query heads but the first, which are not loaded ahead.
  __device__ void write_query(int read, std::int64_t token, float* to) const {
    HeadRows head = q_;
    head.first = static_cast<const std::byte*>(q_.first) + read * p_.q.stride.h * (q_.type == DType::f32 ? 4 : 2);
    const RowNumbers<kD> q(head.template row<kD>(token, static_cast<int>(p_.d)), q_.type);
    q.write(p_.l2norm ? p_.scale * norm_factor(over_lanes(q.squares(), Sum())) : p_.scale, to);
  }
  // Past d they are those of g = 0: finite.
  __device__ void write_decays(float* to) const {
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      const int c = 4 * lane() + 128 * i;
      if (c >= kD) break;
      const float4 g = g_row_.four[i].numbers(g_.type);
      const float* const bias = bias_ + 4 * i;
      *reinterpret_cast<float4*>(to + c) = make_float4(head_.decay(g.x, bias[0]), head_.decay(g.y, bias[1]),
                                                       head_.decay(g.z, bias[2]), head_.decay(g.w, bias[3]));
    }
  }

  const DeltaRuleParams& p_;
  const Reads reads_;
  const DeltaHead head_;
  const HeadRows k_, q_, v_, g_, beta_;
  const std::int64_t count_;
  const int column_, columns_;
  int token_[3];  // which of a group of as many tokens as warps this one prepares k of, q, and the other inputs
  float bias_[4 * kSteps];
  RowElements<kD> k_row_, q_row_, g_row_;
  FourElements v_row_, beta_row_, decay_;
};

}  // namespace rapt::cuda
