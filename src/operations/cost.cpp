#include "rapt/cost.hpp"

#include <algorithm>
#include <initializer_list>
#include <optional>
#include <vector>

namespace rapt {
namespace {

/// One value of an i32 or i64 tensor.
std::int64_t element(const TensorView& view, std::initializer_list<std::int64_t> index) {
  std::int64_t at = 0;
  std::size_t dim = 0;
  for (const std::int64_t i : index) at += i * view.strides[dim++];
  if (view.dtype == DType::i32) return static_cast<const std::int32_t*>(view.data)[at];
  return static_cast<const std::int64_t*>(view.data)[at];
}
std::int64_t element(const TensorView& view, std::int64_t index) {
  return element(view, {index});
}

std::int64_t offset_of(const std::optional<Align>& align, std::int64_t len_q, std::int64_t len_k) {
  if (!align) return 0;
  switch (align->kind) {
    case Align::Kind::top_left:
      return 0;
    case Align::Kind::bottom_right:
      return len_k - len_q;
    case Align::Kind::offset:
      return align->value;
  }
  return 0;
}

/// What the rows of a sequence see of its keys [gone, len_k).
struct Attended {
  std::int64_t pairs = 0;  ///< (row, key)
  std::int64_t keys = 0;   ///< that some row sees

  Attended(const ScoreSpec& score, std::int64_t len_q, std::int64_t gone, std::int64_t len_k) {
    const std::int64_t offset = offset_of(score.align, len_q, len_k);
    const std::int64_t left = score.window ? score.window->left : -1;
    const std::int64_t right = score.window ? score.window->right : -1;
    std::int64_t next = gone;  // rows see ranges that move on: keys before this one are counted
    for (std::int64_t i = 0; i < len_q; ++i) {
      const std::int64_t here = i + offset;
      const std::int64_t first = left < 0 ? gone : std::max(gone, here - left);
      std::int64_t end = len_k;
      if (score.causal) end = std::min(end, here + 1);
      if (right >= 0) end = std::min(end, here + right + 1);
      pairs += std::max<std::int64_t>(0, end - first);
      keys += std::max<std::int64_t>(0, end - std::max(first, next));
      next = std::max(next, end);
    }
  }
};

/// Of `rows` rows of n elements.
double row_bytes(std::int64_t rows, std::int64_t n, DType dtype) {
  return static_cast<double>(rows) * static_cast<double>(n) * bytes_of(dtype);
}

double whole_bytes(const TensorView& t) {
  double bytes = t ? bytes_of(t.dtype) : 0;
  for (int dim = 0; dim < t.ndim; ++dim) bytes *= static_cast<double>(t.shape[static_cast<std::size_t>(dim)]);
  return bytes;
}

/// Of scales or zeros for `rows` rows. Where they broadcast, there are fewer.
double scale_bytes(const TensorView& t, std::int64_t rows) {
  if (!t) return 0;
  std::int64_t size = 1;
  for (int dim = 0; dim < t.ndim; ++dim) size *= t.shape[static_cast<std::size_t>(dim)];
  return static_cast<double>(std::min(size, rows * t.shape[static_cast<std::size_t>(t.ndim - 1)])) * sizeof(float);
}

/// What causal, window, align, lengths, rings and lists leave of a call, in all its heads.
struct Work {
  std::int64_t pairs = 0, rows = 0, keys = 0;

  Work(const AttentionArgs& args, const AttentionProblem& p) {
    if (p.gathered) count_lists(args.kv, p);
    else count_sequences(args, p);
    pairs *= p.hq, rows *= p.hq, keys *= p.hk;
  }

 private:
  void count_lists(const KvSource& kv, const AttentionProblem& p) {
    const std::int64_t of_entry = kv.k.shape[2];
    std::vector<bool> seen(static_cast<std::size_t>(kv.k.shape[0] * of_entry));
    for (std::int64_t n = 0; n < p.b; ++n)
      for (std::int64_t i = 0; i < p.sq; ++i) {
        const std::int64_t count = kv.counts ? element(kv.counts, {n, i}) : p.sk;
        for (std::int64_t j = 0; j < count; ++j) {
          const std::int64_t row = element(kv.indices, {n, i, j});
          if (row < 0) continue;
          ++pairs;
          seen[static_cast<std::size_t>((kv.k.shape[0] == 1 ? 0 : n) * of_entry + row)] = true;
        }
      }
    rows = p.b * p.sq;
    keys = std::count(seen.begin(), seen.end(), true);
  }
  void count_sequences(const AttentionArgs& args, const AttentionProblem& p) {
    const TensorView &starts_q = args.cu_seqlens_q, &starts_k = args.kv.cu_seqlens;
    for (std::int64_t n = 0; n < p.b; ++n) {
      const std::int64_t len_q = starts_q ? element(starts_q, n + 1) - element(starts_q, n) : p.sq;
      std::int64_t len_k = starts_k ? element(starts_k, n + 1) - element(starts_k, n) : p.sk;
      if (args.kv.seqlens) len_k = element(args.kv.seqlens, n);
      const std::int64_t gone = p.ring ? std::max<std::int64_t>(0, len_k - p.sk) : 0;
      const Attended attended(args.score, len_q, gone, len_k);
      pairs += attended.pairs;
      rows += len_q;
      keys += attended.keys;
    }
  }
};

}  // namespace

Cost cost_of(const AttentionArgs& args) {
  const auto p = AttentionProblem::of(args);
  const Work work(args, p);
  Cost cost;
  cost.flops = 2 * static_cast<double>(work.pairs) * static_cast<double>(p.d + p.dv);
  cost.bytes = row_bytes(work.rows, p.d, p.q_dtype) +
               row_bytes(work.keys, p.latent ? p.d - p.k_tail : p.d - p.k_tail + p.dv, p.kv_dtype) +
               row_bytes(work.keys, p.k_tail, p.k_tail_dtype) + row_bytes(work.rows, p.dv, p.out_dtype);
  const KvSource& kv = args.kv;
  for (const TensorView* t : {&kv.k_scale, &kv.k_zero}) cost.bytes += scale_bytes(*t, work.keys);
  if (kv.k_scale && kv.v_scale.data == kv.k_scale.data) return cost;
  for (const TensorView* t : {&kv.v_scale, &kv.v_zero}) cost.bytes += scale_bytes(*t, work.keys);
  return cost;
}

Cost cost_of(const AttentionBackwardArgs& args) {
  const auto p = AttentionBackwardProblem::of(args);
  const AttentionArgs forward{args.q, args.kv, {}, args.score, {}, args.cu_seqlens_q};
  const Work work(forward, p);
  const bool scores = (p.grads & (p.kDq | p.kDk)) || p.dbias || p.dsinks || p.dalibi;  // else P alone is needed
  const std::int64_t of_d = 1 + (p.grads & p.kDq ? 1 : 0) + (p.grads & p.kDk ? 1 : 0),
                     of_dv = (scores ? 1 : 0) + (p.grads & p.kDv ? 1 : 0);
  Cost cost;
  cost.flops = 2 * static_cast<double>(work.pairs) * static_cast<double>(of_d * p.d + of_dv * p.dv);
  cost.bytes = row_bytes(work.rows, p.d, p.q_dtype) + row_bytes(work.keys, p.d + p.dv, p.kv_dtype) +
               row_bytes(work.rows, p.dv, p.out_dtype) + row_bytes(work.rows, p.dv, p.dout_dtype) +
               row_bytes(work.rows, p.dlse ? 2 : 1, DType::f32);
  if (args.dq) cost.bytes += row_bytes(work.rows, p.d, args.dq.dtype);
  if (args.dk) cost.bytes += row_bytes(work.keys, p.d, args.dk.dtype);
  if (args.dv) cost.bytes += row_bytes(work.keys, p.dv, args.dv.dtype);
  return cost;
}

Cost cost_of(const AppendKvArgs& args) {
  const auto p = AppendKvProblem::of(args);
  std::int64_t rows = 0;
  for (std::int64_t i = 0; i < p.b; ++i) {
    const std::int64_t n = args.cu_seqlens ? element(args.cu_seqlens, i + 1) - element(args.cu_seqlens, i) : p.n;
    rows += p.ring ? std::min(n, p.sk) : n;
  }
  rows *= p.hk;
  const std::int64_t size = p.values_are_keys ? p.d : p.d + p.dv;
  Cost cost;
  cost.bytes = row_bytes(rows, size, p.new_dtype) + row_bytes(rows, size - p.k_tail, p.kv_dtype) +
               row_bytes(rows, p.k_tail, p.k_tail_dtype);
  const KvCache& cache = args.cache;
  for (const MutableTensorView* t : {&cache.k_scale, &cache.k_zero}) cost.bytes += scale_bytes(*t, rows);
  if (p.values_are_keys) return cost;
  for (const MutableTensorView* t : {&cache.v_scale, &cache.v_zero}) cost.bytes += scale_bytes(*t, rows);
  return cost;
}

Cost cost_of(const MergeStatesArgs& args) {
  const auto p = MergeStatesProblem::of(args);
  Cost cost;
  cost.flops = 2 * static_cast<double>(p.rows) * static_cast<double>(p.dv) * static_cast<double>(p.count);
  cost.bytes = row_bytes(p.rows, p.dv, p.out_dtype) + row_bytes(p.rows, p.count + (p.lse ? 1 : 0), DType::f32);
  for (const TensorView& out : args.outs) cost.bytes += row_bytes(p.rows, p.dv, out.dtype);
  return cost;
}

Cost cost_of(const DeltaRuleArgs& args) {
  const auto p = DeltaRuleProblem::of(args);
  const bool has_delta = p.rule == UpdateRule::delta || p.rule == UpdateRule::gated_delta;
  const std::int64_t h = p.state_heads(), tokens = p.ragged >= 0 ? p.ragged : p.b * p.t, outs = std::max(p.hq, h);
  const double state = static_cast<double>(p.d) * static_cast<double>(p.dv);
  Cost cost;
  cost.flops = static_cast<double>(tokens) * state *
               (static_cast<double>(h) * (has_delta ? 4 : 2) + static_cast<double>(outs) * 2);
  cost.bytes = row_bytes(tokens * p.hq, p.d, args.q.dtype) + row_bytes(tokens * p.hk, p.d, args.k.dtype) +
               row_bytes(tokens * p.hv, p.dv, args.v.dtype) + row_bytes(tokens * outs, p.dv, args.out.dtype);
  if (args.beta) cost.bytes += row_bytes(tokens, h, args.beta.dtype);
  if (p.decay == Decay::constant) cost.bytes += row_bytes(1, h, args.g.dtype);
  else if (args.g) cost.bytes += row_bytes(tokens * h, p.decay == Decay::channel ? p.d : 1, args.g.dtype);
  const double elements = state * static_cast<double>(p.b * h);
  if (args.initial_state) cost.bytes += elements * bytes_of(args.initial_state.dtype);
  if (args.final_state)
    cost.bytes += elements * bytes_of(args.final_state.dtype) * static_cast<double>(p.steps > 0 ? p.t : 1);
  return cost;
}

Cost cost_of(const DeltaRuleBackwardArgs& args) {
  const auto p = DeltaRuleBackwardProblem::of(args);
  const bool has_delta = p.rule == UpdateRule::delta || p.rule == UpdateRule::gated_delta;
  const std::int64_t h = p.state_heads(), tokens = p.ragged >= 0 ? p.ragged : p.b * p.t;
  const DeltaRuleArgs& f = args.forward;
  Cost cost;
  cost.flops = static_cast<double>(tokens * p.d * p.dv) *
               static_cast<double>(h * (has_delta ? 16 : 10) + 4 * std::max<std::int64_t>(p.hq - h, 0));
  for (const TensorView* t :
       {&f.q, &f.k, &f.v, &f.g, &f.beta, &f.initial_state, &f.a_log, &f.dt_bias, &args.dout, &args.dfinal_state})
    cost.bytes += whole_bytes(*t);
  for (const MutableTensorView* t :
       {&args.dq, &args.dk, &args.dv, &args.dg, &args.dbeta, &args.dinitial_state, &args.da_log, &args.ddt_bias})
    cost.bytes += whole_bytes(*t);
  return cost;
}

Cost cost_of(const IndexScoresArgs& args) {
  const auto p = IndexScoresProblem::of(args);
  std::int64_t pairs = 0, keys = 0;  // keys: from the first that some query of a sequence sees to the last
  for (std::int64_t i = 0; i < p.b; ++i) {
    const std::int64_t len_k = args.seqlens ? element(args.seqlens, i) : p.sk,
                       offset = offset_of(args.align, p.sq, len_k);
    std::int64_t first = len_k, last = 0;
    for (std::int64_t token = 0; token < p.sq; ++token) {
      std::int64_t begin = 0, end = args.causal ? std::min(len_k, token + offset + 1) : len_k;
      if (args.key_begin) begin = std::max(begin, element(args.key_begin, {i, token}));
      if (args.key_end) end = std::min(end, element(args.key_end, {i, token}));
      if (begin >= end) continue;
      pairs += end - begin;
      first = std::min(first, begin), last = std::max(last, end);
    }
    keys += std::max<std::int64_t>(last - first, 0);
  }
  const std::int64_t rows = p.b * p.sq;
  Cost cost;
  cost.flops = 2 * static_cast<double>(pairs) * static_cast<double>(p.h) * static_cast<double>(p.d);
  cost.bytes = row_bytes(rows * p.h, p.d, p.q_dtype) + row_bytes(rows, p.h, DType::f32) +
               row_bytes(keys, p.d, p.k_dtype) + row_bytes(p.scales ? keys : 0, 1, DType::f32) +
               row_bytes(p.scores ? rows : 0, p.sk, DType::f32) + row_bytes(rows, p.topk, DType::i32);
  return cost;
}

Cost cost_of(const SelectTopkArgs& args) {
  const auto p = SelectTopkProblem::of(args);
  Cost cost;
  cost.bytes = row_bytes(p.rows, p.sk, DType::f32) + row_bytes(p.rows, p.n, DType::i32);
  return cost;
}

}  // namespace rapt
