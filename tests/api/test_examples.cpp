// The examples of docs/guide and README.md that attend, run; those of caches are in test_examples_caches.cpp.
#include <Eigen/Core>
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <iostream>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <numeric>
#include <sstream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "api/examples.hpp"
#include "rapt/interop/eigen.hpp"
#include "rapt/rapt.hpp"
#include "support/catch.hpp"

namespace rapt::testing {

TEST_CASE("guide: one call, contiguous and strided", "[examples]") {
  constexpr std::int64_t s = 5;
  const auto q_data = random_floats(b * hq * s * d, 1), k_data = random_floats(b * hq * s * d, 2),
             v_data = random_floats(b * hq * s * d, 3);
  const float *q = q_data.data(), *k = k_data.data(), *v = v_data.data();
  std::vector<float> result_data(q_data.size());
  float* out = result_data.data();
  {
    rapt::TensorView queries(q, {b, hq, s, d}), keys(k, {b, hk, s, d}), values(v, {b, hk, s, d});
    rapt::MutableTensorView result(out, {b, hq, s, d});
    rapt::ScoreSpec score;
    score.causal = true;
    rapt::attention(queries, keys, values, result, score);
  }
  for (std::int64_t i = 0; i < b * hq * s; ++i) {
    const std::int64_t head = i / s / (hq / hk) * s * d;
    check_row(out + i * d, one_row(q + i * d, k + head, v + head, s, d, [&](auto j) { return j <= i % s; }));
  }
  {
    rapt::TensorView queries(q, {b, hq, s, d}, {s * hq * d, d, hq * d, 1});
    rapt::TensorView keys(k, queries.dtype, queries), values(v, queries.dtype, queries);
    rapt::attention(queries, keys, values, {out, queries.dtype, queries});
  }
  for (std::int64_t i = 0; i < b * s * hq; ++i) {
    const std::int64_t head = i / (s * hq) * s * hq * d + i % hq * d;
    check_row(out + i * d, one_row(q + i * d, k + head, v + head, s, hq * d, [](auto) { return true; }));
  }
}

TEST_CASE("guide: bf16 and fp16", "[examples]") {
  constexpr std::int64_t h = 3, s = 6;
  std::vector<float> wide[3], result(b * h * s * d);
  std::vector<Eigen::bfloat16> halves[3];
  for (int t = 0; t < 3; ++t) {
    for (float x : random_floats(b * h * s * d, 11 + t)) {
      halves[t].emplace_back(x);
      wide[t].push_back(static_cast<float>(halves[t].back()));
    }
  }
  const void *q = halves[0].data(), *k = halves[1].data(), *v = halves[2].data();
  float* out = result.data();
  {
    using enum rapt::DType;
    rapt::TensorView queries(q, bf16, {b, h, s, d}), keys(k, bf16, {b, h, s, d}), values(v, bf16, {b, h, s, d});
    rapt::attention(queries, keys, values, rapt::MutableTensorView(out, {b, h, s, d}));  // f32 out
  }
  for (std::int64_t i = 0; i < b * h * s; ++i) {
    const std::int64_t head = i / s * s * d;
    const auto expected =
        one_row(wide[0].data() + i * d, wide[1].data() + head, wide[2].data() + head, s, d, [](auto) { return true; });
    // Probabilities may have been rounded to bf16.
    for (std::int64_t c = 0; c < d; ++c)
      REQUIRE(std::abs(out[i * d + c] - expected[static_cast<std::size_t>(c)]) <= 0x1p-7);
  }
}

TEST_CASE("guide: scores", "[examples]") {
  constexpr std::int64_t sq = 3, sk = 200;
  const auto q_data = random_floats(b * hq * sq * d, 4), k_data = random_floats(b * hk * sk * d, 5),
             v_data = random_floats(b * hk * sk * d, 6);
  const float *q = q_data.data(), *k = k_data.data(), *v = v_data.data();
  std::vector<float> out_data(q_data.size()), lse_data(b * hq * sq);
  float *out = out_data.data(), *lse = lse_data.data();
  bool padding[b * sk];
  for (std::int64_t i = 0; i < b * sk; ++i) padding[i] = i % 7 != 2;

  rapt::AttentionArgs args;
  args.q = rapt::TensorView(q, {b, hq, sq, d});
  args.kv = rapt::KvSource::strided({k, {b, hk, sk, d}}, {v, {b, hk, sk, d}});
  args.out = rapt::MutableTensorView(out, {b, hq, sq, d});
  args.lse = rapt::MutableTensorView(lse, {b, hq, sq});
  args.score.causal = true;
  args.score.window = rapt::Window{.left = 127, .right = -1};
  args.score.align = rapt::Align::bottom_right();
  args.score.mask = rapt::TensorView(padding, {b, 1, 1, sk});  // bool, true = attend
  rapt::attention(args);

  for (std::int64_t i = 0; i < b * hq * sq; ++i) {
    const std::int64_t n = i / (hq * sq), head = (n * hk + i / sq % hq / (hq / hk)) * sk * d;
    const std::int64_t position = i % sq + sk - sq;
    check_row(out + i * d, one_row(q + i * d, k + head, v + head, sk, d, [&](auto j) {
                return j <= position && j >= position - 127 && padding[n * sk + j];
              }));
    CHECK(std::isfinite(lse[i]));
  }
}

TEST_CASE("guide: dropout", "[examples]") {
  constexpr std::int64_t sq = 5, sk = 11;
  constexpr std::uint64_t step = 3;
  const auto q_data = random_floats(b * hq * sq * d, 47), k_data = random_floats(b * hk * sk * d, 48),
             v_data = std::vector<float>(std::size_t(b * hk * sk * d), 1.f);
  std::vector<float> out(q_data.size());
  bool kept[b * hq * sq * sk] = {};
  const rapt::TensorView queries(q_data.data(), {b, hq, sq, d}), keys(k_data.data(), {b, hk, sk, d}),
      values(v_data.data(), {b, hk, sk, d});
  const rapt::MutableTensorView result(out.data(), {b, hq, sq, d});
  {
    rapt::ScoreSpec score;
    score.dropout = rapt::Dropout{.p = 0.1f, .seed = 42, .offset = step};  // another offset for every call
    rapt::attention(queries, keys, values, result, score);
    rapt::dropout_mask(*score.dropout, rapt::MutableTensorView(kept, {b, hq, sq, sk}));  // bool, true = kept
  }
  // Of values of 1, what is left of a row's weights.
  for (std::int64_t row = 0; row < b * hq * sq; ++row) {
    const bool* const own = kept + row * sk;
    const bool all = std::all_of(own, own + sk, [](bool keep) { return keep; });
    CHECK((out[std::size_t(row * d)] == Approx(1 / 0.9).epsilon(1e-5)) == all);
  }
}

TEST_CASE("guide: score modifiers", "[examples]") {
  constexpr std::int64_t sq = 3, sk = 11;
  const auto q_data = random_floats(b * hq * sq * d, 41), k_data = random_floats(b * hk * sk * d, 42),
             v_data = random_floats(b * hk * sk * d, 43), bias_data = random_floats(hq * sq * sk, 44),
             slopes_data = random_floats(hq, 45), sinks_data = random_floats(hq, 46);
  const float *bias = bias_data.data(), *slopes = slopes_data.data(), *sinks = sinks_data.data();
  std::vector<float> out(q_data.size());
  const rapt::TensorView queries(q_data.data(), {b, hq, sq, d}), keys(k_data.data(), {b, hk, sk, d}),
      values(v_data.data(), {b, hk, sk, d});
  const rapt::MutableTensorView result(out.data(), {b, hq, sq, d});
  {
    rapt::ScoreSpec score;
    score.scale = 0.5f;                                 // instead of d^-1/2
    score.softcap = 30.f;                               // x becomes 30 tanh(x / 30)
    score.bias = rapt::TensorView(bias, {hq, sq, sk});  // added; the same for every sequence
    score.alibi = rapt::TensorView(slopes, {hq});       // slope * distance is subtracted
    score.align = rapt::Align::bottom_right();          // from where distances count
    score.sinks = rapt::TensorView(sinks, {hq});        // one more logit in each head's denominator
    rapt::attention(queries, keys, values, result, score);
  }
  for (std::int64_t row = 0; row < b * hq * sq; ++row) {
    const std::int64_t h = row / sq % hq, i = row % sq, head = (row / (hq * sq) * hk + h / (hq / hk)) * sk * d;
    double sum = std::exp(double(sinks[h]));
    std::vector<double> expected(d, 0.0);
    for (std::int64_t j = 0; j < sk; ++j) {
      double x = 0;
      for (std::int64_t c = 0; c < d; ++c)
        x += double(q_data[std::size_t(row * d + c)]) * k_data[std::size_t(head + j * d + c)];
      x = 30 * std::tanh(0.5 * x / 30) + bias[(h * sq + i) * sk + j] - slopes[h] * double(std::abs(i + sk - sq - j));
      sum += std::exp(x);
      for (std::int64_t c = 0; c < d; ++c)
        expected[std::size_t(c)] += std::exp(x) * v_data[std::size_t(head + j * d + c)];
    }
    for (double& value : expected) value /= sum;
    check_row(out.data() + row * d, expected);
  }
}

TEST_CASE("guide: padded batches", "[examples]") {
  constexpr std::int64_t s = 12;
  const auto q_data = random_floats(b * hq * s * d, 51);
  auto k_data = random_floats(b * hk * s * d, 52), v_data = random_floats(b * hk * s * d, 53);
  std::fill(k_data.begin() + 5 * d, k_data.begin() + s * d, std::numeric_limits<float>::quiet_NaN());
  std::vector<float> out(q_data.size());
  const rapt::TensorView queries(q_data.data(), {b, hq, s, d}), keys(k_data.data(), {b, hk, s, d}),
      values(v_data.data(), {b, hk, s, d});
  const rapt::MutableTensorView result(out.data(), {b, hq, s, d});
  {
    const std::int32_t lengths[] = {5, 12};  // keys of each sequence; what lies behind them is never read
    rapt::attention({queries, rapt::KvSource::strided(keys, values, {lengths, {b}}), result});
  }
  for (std::int64_t i = 0; i < b * hq * s; i += s) {
    const std::int64_t n = i / (hq * s), head = (n * hk + i / s % hq / (hq / hk)) * s * d;
    if (n == 0 && head > 0) continue;  // whose padding is no NaN
    check_row(out.data() + i * d, one_row(q_data.data() + i * d, k_data.data() + head, v_data.data() + head, n ? 12 : 5,
                                          d, [](auto) { return true; }));
  }
}

TEST_CASE("guide: ragged batches", "[examples]") {
  const auto q_data = random_floats(10 * hq * d, 7), k_data = random_floats(10 * hk * d, 8),
             v_data = random_floats(10 * hk * d, 9);
  const float *q = q_data.data(), *k = k_data.data(), *v = v_data.data();
  std::vector<float> out_data(q_data.size());
  float* out = out_data.data();

  const std::int32_t offsets[] = {0, 3, 10};  // two sequences: 3 and 7 rows
  rapt::AttentionArgs args;
  args.q = rapt::TensorView(q, {10, hq, d});
  args.kv = rapt::KvSource::ragged({k, {10, hk, d}}, {v, {10, hk, d}}, {offsets, {3}});
  args.out = rapt::MutableTensorView(out, {10, hq, d});
  args.cu_seqlens_q = rapt::TensorView(offsets, {3});
  rapt::attention(args);

  for (std::int64_t i = 0; i < 10 * hq; ++i) {
    const std::int64_t head = i % hq / (hq / hk) * d;
    check_row(out + i * d,
              one_row(q + i * d, k + head, v + head, 10, hk * d, [&](auto j) { return (j < 3) == (i / hq < 3); }));
  }
}

namespace {

/// Gradients of sum(dout * out) + sum(dlse * lse) of causal attention, all [b, heads, s, d], in double.
struct Gradients {
  std::vector<double> q, k, v;

  Gradients(std::int64_t s, const float* query, const float* key, const float* value, const float* dout,
            const float* dlse)
      : q(std::size_t(b * hq * s * d)), k(std::size_t(b * hk * s * d)), v(k.size()) {
    const double scale = 1 / std::sqrt(double(d));
    const auto dot = [](const float* x, const float* y) {
      double sum = 0;
      for (std::int64_t c = 0; c < d; ++c) sum += double(x[c]) * y[c];
      return sum;
    };
    for (std::int64_t row = 0; row < b * hq * s; ++row) {
      const std::int64_t keys = row % s + 1, head = row / s / (hq / hk) * s * d;
      std::vector<double> p, dp;
      double sum = 0, mean = 0;
      for (std::int64_t j = 0; j < keys; ++j) {
        p.push_back(std::exp(scale * dot(query + row * d, key + head + j * d)));
        dp.push_back(dot(dout + row * d, value + head + j * d));
        sum += p.back();
      }
      for (std::size_t j = 0; j < p.size(); ++j) p[j] /= sum, mean += p[j] * dp[j];
      for (std::size_t j = 0; j < p.size(); ++j) {
        const double ds = p[j] * (dp[j] - mean + dlse[row]) * scale;
        for (std::int64_t c = 0; c < d; ++c) {
          const std::int64_t own = row * d + c, other = head + std::int64_t(j) * d + c;
          q[std::size_t(own)] += ds * key[other];
          k[std::size_t(other)] += ds * query[own];
          v[std::size_t(other)] += p[j] * dout[own];
        }
      }
    }
  }
};

}  // namespace

TEST_CASE("guide: training", "[examples]") {
  constexpr std::int64_t s = 9;
  const int steps = 2;
  const float z = 0.1f;
  const auto q_data = random_floats(b * hq * s * d, 62), k_data = random_floats(b * hk * s * d, 63),
             v_data = random_floats(b * hk * s * d, 64), dout_data = random_floats(b * hq * s * d, 65);
  std::vector<float> out(q_data.size()), lse_data(b * hq * s), dlse_data(lse_data.size()), dq_data(q_data.size()),
      dk_data(k_data.size()), dv_data(v_data.size());
  const rapt::TensorView queries(q_data.data(), {b, hq, s, d}), keys(k_data.data(), {b, hk, s, d}),
      values(v_data.data(), {b, hk, s, d});
  const rapt::MutableTensorView result(out.data(), {b, hq, s, d});
  const float* dout = dout_data.data();
  float *lse = lse_data.data(), *dlse = dlse_data.data();
  float *dq = dq_data.data(), *dk = dk_data.data(), *dv = dv_data.data();
  const auto check = [&] {
    const Gradients expected(s, q_data.data(), k_data.data(), v_data.data(), dout, dlse);
    for (const auto& [got, wanted] :
         {std::pair{&dq_data, &expected.q}, {&dk_data, &expected.k}, {&dv_data, &expected.v}})
      for (std::size_t i = 0; i < got->size(); ++i) REQUIRE(std::abs((*got)[i] - (*wanted)[i]) <= 4e-6);
  };

  rapt::AttentionArgs forward;
  forward.q = queries;
  forward.kv = rapt::KvSource::strided(keys, values);
  forward.out = result;
  forward.lse = rapt::MutableTensorView(lse, {b, hq, s});
  forward.score.causal = true;
  rapt::attention(forward);

  rapt::AttentionBackwardArgs backward;
  backward.q = forward.q, backward.kv = forward.kv, backward.score = forward.score;
  backward.out = forward.out, backward.lse = forward.lse;
  backward.dout = rapt::TensorView(dout, {b, hq, s, d});     // the loss's gradient by out, from your model
  backward.dq = rapt::MutableTensorView(dq, {b, hq, s, d});  // written, as are dk and dv
  backward.dk = rapt::MutableTensorView(dk, {b, hk, s, d});
  backward.dv = rapt::MutableTensorView(dv, {b, hk, s, d});
  rapt::attention_backward(backward);

  check();
  // To the loss, z * sum(lse * lse) was added.
  for (std::int64_t row = 0; row < b * hq * s; ++row) dlse[row] = 2 * z * lse[row];
  backward.dlse = rapt::TensorView(dlse, {b, hq, s});
  rapt::attention_backward(backward);

  check();
  for (std::vector<float>* gradient : {&dq_data, &dk_data, &dv_data})
    std::fill(gradient->begin(), gradient->end(), NAN);
  {
    const rapt::Plan plan(backward);
    const std::size_t bytes = plan.workspace_bytes();
    const auto workspace = static_cast<std::byte*>(std::aligned_alloc(64, (bytes + 63) / 64 * 64));
    for (int step = 0; step < steps; ++step) plan.run(backward, {workspace, bytes});
    std::free(workspace);
  }
  check();
}

TEST_CASE("guide: the delta rule and its gradients", "[examples]") {
  constexpr std::int64_t t = 30, h = 3, rows = b * t * h;
  const auto q_data = random_floats(rows * d, 71), v_data = random_floats(rows * d, 72),
             dout_data = random_floats(rows * d, 73);
  auto k_data = random_floats(rows * d, 74), g_data = random_floats(rows * d, 75), beta_data = random_floats(rows, 76);
  for (float& x : k_data) x *= 0.5f;  // of a length near 1
  for (float& x : g_data) x = -std::abs(x);
  for (float& x : beta_data) x = std::abs(x);
  std::vector<float> out_data(q_data.size()), dq_data(out_data), dk_data(out_data), dv_data(out_data),
      dg_data(out_data), dbeta_data(beta_data.size());
  const float *q = q_data.data(), *k = k_data.data(), *v = v_data.data(), *g = g_data.data(), *beta = beta_data.data(),
              *dout = dout_data.data();
  float *out = out_data.data(), *dq = dq_data.data(), *dk = dk_data.data(), *dv = dv_data.data(), *dg = dg_data.data(),
        *dbeta = dbeta_data.data();

  rapt::DeltaRuleArgs rule;
  rule.q = rapt::TensorView(q, {b, t, h, d}), rule.k = rapt::TensorView(k, {b, t, h, d});
  rule.v = rapt::TensorView(v, {b, t, h, d});
  rule.g = rapt::TensorView(g, {b, t, h, d}), rule.beta = rapt::TensorView(beta, {b, t, h});
  rule.out = rapt::MutableTensorView(out, {b, t, h, d});
  rapt::delta_rule(rule);

  rapt::DeltaRuleBackwardArgs backward;
  backward.forward = rule;
  backward.dout = rapt::TensorView(dout, {b, t, h, d});
  backward.dq = rapt::MutableTensorView(dq, {b, t, h, d}), backward.dk = rapt::MutableTensorView(dk, {b, t, h, d});
  backward.dv = rapt::MutableTensorView(dv, {b, t, h, d});
  backward.dg = rapt::MutableTensorView(dg, {b, t, h, d}), backward.dbeta = rapt::MutableTensorView(dbeta, {b, t, h});
  rapt::delta_rule_backward(backward);

  // The output is linear in the queries, and in the values.
  const auto dot = [](const std::vector<float>& x, const std::vector<float>& y) {
    return std::inner_product(x.begin(), x.end(), y.begin(), 0.0);
  };
  const double wanted = dot(dout_data, out_data);
  CHECK(std::abs(wanted) > 1e-2);
  CHECK(std::abs(dot(dq_data, q_data) - wanted) < 1e-4);
  CHECK(std::abs(dot(dv_data, v_data) - wanted) < 1e-4);
  // Along a gradient the loss grows by its square, as far as out's rounding shows it.
  for (auto& [input, gradient] : {std::pair{&k_data, &dk_data}, {&g_data, &dg_data}, {&beta_data, &dbeta_data}}) {
    const double square = dot(*gradient, *gradient), step = 1e-2 / std::sqrt(square);
    const std::vector<float> before = *input;
    const auto loss_at = [&, &x = *input, &dx = *gradient](double factor) {
      for (std::size_t i = 0; i < before.size(); ++i) x[i] = before[i] + static_cast<float>(factor * step) * dx[i];
      rapt::delta_rule(rule);
      return dot(dout_data, out_data);
    };
    const double growth = (loss_at(1) - loss_at(-1)) / (2 * step);
    CHECK(std::abs(growth / square - 1) < 0.01);
    *input = before;
  }
}

TEST_CASE("guide: the indexer of sparse attention", "[examples]") {
  constexpr std::int64_t sq = 5, sk = 9, h = 3, n = 6;
  const auto q_data = random_floats(b * sq * h * d, 81), k_data = random_floats(b * sk * d, 82),
             weights_data = random_floats(b * sq * h, 83);
  std::vector<float> scores_data(b * sq * sk);
  std::vector<std::int32_t> best_data(b * sq * n);
  const float *q = q_data.data(), *k = k_data.data(), *weights = weights_data.data();
  float* scores = scores_data.data();
  std::int32_t* best = best_data.data();

  rapt::IndexScoresArgs index;
  index.q = rapt::TensorView(q, {b, sq, h, d}), index.k = rapt::TensorView(k, {b, sk, d});
  index.weights = rapt::TensorView(weights, {b, sq, h});
  index.align = rapt::Align::bottom_right();  // the last query sits at the last key
  index.indices = rapt::MutableTensorView(best, {b, sq, n});
  rapt::index_scores(index);  // best[i][j][0] is the key that query j of sequence i should attend to first

  const std::vector<std::int32_t> fused = best_data;
  std::fill(best_data.begin(), best_data.end(), 99);

  index.indices = {}, index.scores = rapt::MutableTensorView(scores, {b, sq, sk});
  rapt::index_scores(index);
  rapt::select_topk(index.scores, rapt::MutableTensorView(best, {b, sq, n}));

  CHECK(best_data == fused);
  for (std::int64_t i = 0; i < b * sq; ++i) {
    const std::int64_t seen = sk - sq + i % sq + 1;
    std::vector<double> wanted(sk, -std::numeric_limits<double>::infinity());
    for (std::int64_t j = 0; j < seen; ++j) {
      double& sum = wanted[static_cast<std::size_t>(j)] = 0;
      for (std::int64_t head = 0; head < h; ++head) {
        double product = 0;
        for (std::int64_t c = 0; c < d; ++c)
          product += double(q[(i * h + head) * d + c]) * k[(i / sq * sk + j) * d + c];
        sum += weights[i * h + head] * std::max(product, 0.0) / std::sqrt(double(d));
      }
      REQUIRE(std::abs(scores[i * sk + j] - sum) < 2e-6);
    }
    for (std::int64_t j = seen; j < sk; ++j) REQUIRE(scores[i * sk + j] == -std::numeric_limits<float>::infinity());
    for (std::int64_t place = 0; place < n; ++place) {
      const auto largest = std::max_element(wanted.begin(), wanted.end());
      REQUIRE(best[i * n + place] == (place < seen ? largest - wanted.begin() : -1));
      *largest = -std::numeric_limits<double>::infinity();
    }
  }
}

TEST_CASE("guide: plans, contexts and errors", "[examples]") {
  constexpr std::int64_t s = 6;
  const auto data = random_floats(b * hq * s * d, 10);
  std::vector<float> out(data.size()), expected(data.size());
  const rapt::TensorView queries(data.data(), {b, hq, s, d}), keys = queries, values = queries;
  const rapt::MutableTensorView result(out.data(), {b, hq, s, d});
  rapt::AttentionArgs args;
  args.q = queries;
  args.kv = rapt::KvSource::strided(keys, values);
  args.out = rapt::MutableTensorView(expected.data(), {b, hq, s, d});
  rapt::attention(args);
  args.out = result;

  std::ostringstream captured;
  std::streambuf* const streams[] = {std::cout.rdbuf(captured.rdbuf()), std::clog.rdbuf(captured.rdbuf()),
                                     std::cerr.rdbuf(captured.rdbuf())};
  const int layers = 2;
  {
    const rapt::Plan plan(args);
    std::cout << plan.entry() << " needs " << plan.workspace_bytes() << " bytes\n" << plan.explain();
    for (int layer = 0; layer < layers; ++layer) plan.run(args);

    const rapt::Plan asked(rapt::AttentionProblem::parse("attention b=1 hq=8 hk=2 sq=512 d=64 causal"));
    CHECK(std::get<AttentionProblem>(asked.problem()).sk == 512);
  }
  CHECK(out == expected);
  std::fill(out.begin(), out.end(), 0.f);
  {
    rapt::AttentionProblem largest = rapt::AttentionProblem::of(args);
    largest.b *= 16, largest.sq *= 2, largest.sk *= 8;
    const std::size_t bytes = rapt::max_workspace_bytes(largest);
    const auto workspace = static_cast<std::byte*>(std::aligned_alloc(64, (bytes + 63) / 64 * 64));
    rapt::attention(args, rapt::default_context(), {workspace, bytes});
    std::free(workspace);
  }
  CHECK(out == expected);
  {
    rapt::ContextOptions options;
    options.executor = rapt::serial_executor();  // or openmp_executor(), or an Executor of your own
    options.isa = rapt::usable_isas().back();    // at most this one, the most basic
    options.observer = [](std::string_view line) { std::clog << line << '\n'; };
    const rapt::Context context(options);
    rapt::attention(queries, keys, values, result, {}, context);
  }
  for (std::size_t i = 0; i < out.size(); ++i) REQUIRE(std::abs(out[i] - expected[i]) <= 4e-6f);
  {
    std::mutex mutex;
    std::map<rapt::Task::Kind, double> seconds;
    rapt::ContextOptions options;
    options.task_observer = [&](const rapt::Task& task) {  // from several threads at once
      const std::lock_guard lock(mutex);
      seconds[task.kind] += std::chrono::duration<double>(task.end - task.begin).count();
      if (task.kind == rapt::Task::Kind::call)
        std::clog << task.entry << ", " << task.threads << " threads: " << task.cost.flops << " FLOPs\n";
    };
    rapt::attention(queries, keys, values, result, {}, rapt::Context(options));
    CHECK(seconds.size() == 5);  // all kinds but combine
  }
  {
    rapt::ContextOptions options;
    options.guards = rapt::Guards{.nan = true, .shadow = 16};
    options.guards->handler = [](const rapt::GuardReport& report) {  // without one, a line on standard error
      throw std::runtime_error(to_string(report));                   // comes out of the call, whose results are written
    };
    rapt::attention(queries, keys, values, result, {}, rapt::Context(options));
  }

  std::string culprit;
  rapt::ScoreSpec score;
  score.scale = NAN;
  try {
    rapt::attention(queries, keys, values, result, score);
  } catch (const rapt::Error& error) {
    std::cerr << error.what() << '\n';  // "<argument>: <got>; wanted <wanted>"
    culprit = error.argument();         // "score.scale"
  }
  std::cout.rdbuf(streams[0]), std::clog.rdbuf(streams[1]), std::cerr.rdbuf(streams[2]);
  CHECK(culprit == "score.scale");
  CHECK(captured.str().find("attention b=2 hq=4 sq=6 d=8") != std::string::npos);  // the observer's line
  CHECK(captured.str().find(" threads: ") != std::string::npos);                   // the task observer's
  CHECK(captured.str().find("score.scale: ") != std::string::npos);
}

namespace {

class NewThreads final : public rapt::Executor {
 public:
  std::string_view name() const noexcept override { return "new threads"; }
  int concurrency() const override { return 4; }  // the most workers worth starting
  void run(int workers, void (*work)(void* argument, int worker), void* argument) override {
    std::vector<std::thread> threads;
    for (int worker = 0; worker < workers; ++worker) threads.emplace_back(work, argument, worker);
    for (std::thread& thread : threads) thread.join();
  }
};

}  // namespace

TEST_CASE("guide: threads and memory of one's own", "[examples]") {
  constexpr std::int64_t s = 300;
  const auto numbers = random_floats(b * hq * s * d, 61);
  std::vector<float> out(numbers.size()), expected(numbers.size());
  const rapt::TensorView queries(numbers.data(), {b, hq, s, d}), keys = queries, values = queries;
  const rapt::MutableTensorView result(out.data(), {b, hq, s, d});
  rapt::attention(queries, keys, values, rapt::MutableTensorView(expected.data(), {b, hq, s, d}));
  {
    rapt::ContextOptions options;
    options.executor = std::make_shared<NewThreads>();
    options.threads = 2;  // use at most two of them
    rapt::Allocator allocator;
    allocator.allocate = [](void*, std::size_t bytes, std::size_t alignment) {
      return std::aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment);
    };
    allocator.deallocate = [](void*, void* data, std::size_t, std::size_t) noexcept { std::free(data); };
    options.allocator = allocator;
    rapt::attention(queries, keys, values, result, {}, rapt::Context(options));
  }
  CHECK(out == expected);
}

TEST_CASE("guide: CUDA", "[examples]") {
  constexpr std::int64_t h = 2, s = 8;
  void *stream = nullptr, *q = nullptr, *k = nullptr, *v = nullptr, *out = nullptr;
  const auto call = [&] {
    using enum rapt::DType;
    rapt::AttentionArgs args;
    rapt::TensorView keys(k, bf16, {b, h, s, d}), values(v, bf16, {b, h, s, d});
    args.q = rapt::TensorView(q, bf16, {b, h, s, d});
    args.out = rapt::MutableTensorView(out, bf16, {b, h, s, d});
    args.q.device = keys.device = values.device = args.out.device = {rapt::DeviceType::cuda, 0};
    args.kv = rapt::KvSource::strided(keys, values);

    rapt::ContextOptions options;
    options.stream = stream;  // a cudaStream_t; null is the legacy default stream
    const rapt::Context context(options);
    rapt::attention(args, context);  // queues the work and returns
  };
  // Null pointers are refused before any device is looked for: tests/cuda runs the call.
  CHECK_THROWS_AS(call(), rapt::Error);
}

TEST_CASE("guide: 8-bit products on CUDA", "[examples]") {
  constexpr std::int64_t s = 8;
  void *stream = nullptr, *q = nullptr, *k = nullptr, *v = nullptr, *out = nullptr;
  float *q_scale = nullptr, *k_scale = nullptr, *v_scale = nullptr;
  const auto call = [&] {
    using enum rapt::DType;
    rapt::AttentionArgs args;
    rapt::TensorView keys(k, f8e4m3, {b, hk, s, d}), values(v, f8e4m3, {b, hk, s, d});
    rapt::TensorView k_scales(k_scale, f32, {b, hk, 1, 1}), v_scales(v_scale, f32, {b, hk, 1, 1});
    args.q = rapt::TensorView(q, f8e4m3, {b, hq, s, d});
    args.q_scale = rapt::TensorView(q_scale, f32, {b, hq, 1, 1});
    args.out = rapt::MutableTensorView(out, bf16, {b, hq, s, d});
    args.q.device = args.q_scale.device = args.out.device = {rapt::DeviceType::cuda, 0};
    keys.device = values.device = k_scales.device = v_scales.device = {rapt::DeviceType::cuda, 0};
    args.kv = rapt::KvSource::strided(keys, values).quantized(k_scales, v_scales);

    rapt::ContextOptions options;
    options.kernel = "attention_prefill.f8e4m3.cuda.sm90a";
    options.stream = stream;
    const rapt::Context context(options);  // which refuses other calls of attention
    rapt::attention(args, context);
  };
  // Refused by the context where there is no such GPU, else for null pointers: tests/cuda runs such calls.
  CHECK_THROWS_AS(call(), rapt::Error);
}

TEST_CASE("guide: Eigen", "[examples]") {
  const Eigen::Index s = 7;
  Eigen::MatrixXf q(s, d), k(s, d), v(s, d), out(s, d);
  q.setRandom(), k.setRandom(), v.setRandom();
  using rapt::interop::mutable_view_of, rapt::interop::view_of;
  rapt::attention(view_of(q), view_of(k), view_of(v), mutable_view_of(out));

  const Eigen::MatrixXf p = (q * k.transpose() / std::sqrt(float(d))).array().exp();
  CHECK(((p.array().colwise() / p.rowwise().sum().array()).matrix() * v).isApprox(out, 1e-5f));
}

}  // namespace rapt::testing
