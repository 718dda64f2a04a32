// The examples of docs/guide that have KV caches, run.
#include <algorithm>
#include <cmath>
#include <set>
#include <vector>

#include "api/examples.hpp"
#include "rapt/rapt.hpp"
#include "support/catch.hpp"

namespace rapt::testing {
namespace {

/// A language model of one layer without weights: token t has row t of four tables.
struct ToyModel {
  static constexpr std::int64_t vocabulary = 20;
  std::vector<float> q = random_floats(vocabulary * hq * d, 21), k = random_floats(vocabulary * hk * d, 22),
                     v = random_floats(vocabulary * hk * d, 23), words = random_floats(vocabulary * hq * d, 24);

  /// q [1, hq, n, d], k and v [1, hk, n, d] of the tokens from `first` on, and room for their output.
  struct Step {
    std::vector<int> tokens;  // all of them
    std::vector<float> q_rows, k_rows, v_rows, out_rows;
    rapt::TensorView q, k, v;
    rapt::MutableTensorView out;
  };
  Step project(const std::vector<int>& tokens, std::int64_t first) const {
    Step x;
    x.tokens = tokens;
    for (std::size_t t = static_cast<std::size_t>(first); t < tokens.size(); ++t) {
      for (std::int64_t c = 0; c < hq * d; ++c) x.q_rows.push_back(q[std::size_t(tokens[t] * hq * d + c)]);
      for (std::int64_t c = 0; c < hk * d; ++c) x.k_rows.push_back(k[std::size_t(tokens[t] * hk * d + c)]);
      for (std::int64_t c = 0; c < hk * d; ++c) x.v_rows.push_back(v[std::size_t(tokens[t] * hk * d + c)]);
    }
    const std::int64_t n = static_cast<std::int64_t>(tokens.size()) - first;
    x.out_rows.resize(x.q_rows.size());
    x.q = rapt::TensorView(x.q_rows.data(), {1, hq, n, d}, {0, d, hq * d, 1});
    x.k = rapt::TensorView(x.k_rows.data(), {1, hk, n, d}, {0, d, hk * d, 1});
    x.v = rapt::TensorView(x.v_rows.data(), {1, hk, n, d}, {0, d, hk * d, 1});
    x.out = rapt::MutableTensorView(x.out_rows.data(), {1, hq, n, d}, {0, d, hq * d, 1});
    return x;
  }
  /// The word most like the last row of the output.
  int next_token(const Step& x) const {
    const Eigen::Map<const Eigen::VectorXf> last(x.out_rows.data() + x.out_rows.size() - hq * d, hq * d);
    Eigen::Index best = 0;
    (Eigen::Map<const Eigen::MatrixXf>(words.data(), hq * d, vocabulary).transpose() * last).maxCoeff(&best);
    return static_cast<int>(best);
  }
};

/// Generates tokens with the loop of the guide. Every output has to be attention over all tokens before it.
std::vector<int> generate(const ToyModel& model, const rapt::KvCache& cache, double tolerance) {
  const auto project = [&](const auto&... x) { return model.project(x...); };
  const auto next_token = [&](const ToyModel::Step& x) {
    const ToyModel::Step all = model.project(x.tokens, 0);
    const std::int64_t n = x.q.shape[2], keys = all.k.shape[2];
    for (std::int64_t i = 0; i < n * hq; ++i) {
      const std::int64_t head = i % hq / (hq / hk) * d;
      const auto expected = one_row(x.q_rows.data() + i * d, all.k_rows.data() + head, all.v_rows.data() + head, keys,
                                    hk * d, [&](auto j) { return j <= keys - n + i / hq; });
      for (std::int64_t c = 0; c < d; ++c)
        REQUIRE(std::abs(x.out_rows[std::size_t(i * d + c)] - expected[std::size_t(c)]) <= tolerance);
    }
    return model.next_token(x);
  };
  {
    rapt::ScoreSpec score;
    score.causal = true;
    score.align = rapt::Align::bottom_right();
    std::vector<int> tokens = {3, 14, 15, 9, 2, 6};  // the prompt
    std::int64_t length = 0;                         // keys in the cache
    while (tokens.size() < 30) {
      // q, k and v of the new tokens, from your model: first the prompt's, then one at a time.
      const auto x = project(tokens, length);
      rapt::append_kv({x.k, x.v, cache, {&length, {1}}});
      length = static_cast<std::int64_t>(tokens.size());
      rapt::attention({x.q, cache.source({&length, {1}}), x.out, score});
      tokens.push_back(next_token(x));
    }
    return tokens;
  }
}

}  // namespace

TEST_CASE("guide: generating over a cache", "[examples]") {
  const ToyModel model;
  std::vector<float> k_data(64 * hk * d, NAN), v_data(64 * hk * d, NAN);
  const std::vector<int> tokens =
      generate(model, rapt::KvCache::strided({k_data.data(), {1, hk, 64, d}}, {v_data.data(), {1, hk, 64, d}}), 2e-6);
  CHECK(std::set<int>(tokens.begin() + 6, tokens.end()).size() > 1);

  std::vector<float> k_pages_data(64 * 4 * hk * d, NAN), v_pages_data(64 * 4 * hk * d, NAN);
  float *k_pages = k_pages_data.data(), *v_pages = v_pages_data.data();
  const std::int32_t table[] = {7, 2, 63, 0, 5, 6, 40, 41};
  const rapt::TensorView block_table(table, {1, 8});
  {
    rapt::MutableTensorView k(k_pages, {64, hk, 4, d}), v(v_pages, {64, hk, 4, d});  // 64 pages of 4 keys
    const auto cache = rapt::KvCache::paged(k, v, block_table);  // [b, n]: the pages of each sequence, in order
    CHECK(generate(model, cache, 2e-6) == tokens);
  }
  std::vector<std::int8_t> k_bytes(64 * 4 * hk * d), v_bytes(64 * 4 * hk * d);
  std::vector<float> k_scales(64 * 4 * hk, NAN), v_scales(64 * 4 * hk, NAN);
  {
    using rapt::DType, rapt::MutableTensorView;
    MutableTensorView k(k_bytes.data(), DType::i8, {64, hk, 4, d}), v(v_bytes.data(), DType::i8, {64, hk, 4, d});
    MutableTensorView k_scale(k_scales.data(), {64, hk, 4, 1}), v_scale(v_scales.data(), {64, hk, 4, 1});
    const auto cache = rapt::KvCache::paged(k, v, block_table).quantized(k_scale, v_scale);
    // Numbers of up to 1 are off by up to 1 / 254, and scores of |q| up to 8^1/2 by up to 8 / 254.
    generate(model, cache, 0.04);
  }
}

TEST_CASE("guide: queries of 8 bits", "[examples]") {
  constexpr std::int64_t sq = 5, sk = 20;
  const auto codes = [](std::int64_t count, int seed) {
    std::vector<std::uint8_t> made;
    for (const float x : random_floats(count, seed))
      made.push_back(static_cast<std::uint8_t>((x < 0 ? 0x80 : 0) | static_cast<int>(std::abs(x) * 0x37)));  // below 1
    return made;
  };
  const auto numbers = [](const std::vector<std::uint8_t>& from, const std::vector<float>& scales) {
    std::vector<float> made;
    for (std::size_t i = 0; i < from.size(); ++i) {
      const int code = from[i], exponent = code >> 3 & 15, fraction = code & 7;
      const float x = exponent ? std::ldexp(8.f + static_cast<float>(fraction), exponent - 10)
                               : std::ldexp(static_cast<float>(fraction), -9);
      made.push_back((code & 0x80 ? -x : x) * scales[i / (from.size() / scales.size())]);
    }
    return made;
  };
  const auto q_codes = codes(hq * sq * d, 91), k_codes = codes(hk * sk * d, 92), v_codes = codes(hk * sk * d, 93);
  const std::vector<float> q_scales{0.5f, 1.5f, 2.f, 0.7f}, k_scales{1.25f, 0.6f}, v_scales{0.9f, 1.1f};
  REQUIRE(q_scales.size() == hq);
  REQUIRE(k_scales.size() == hk);
  std::vector<float> out(hq * sq * d, NAN);
  {
    rapt::AttentionArgs args;
    args.q = {q_codes.data(), rapt::DType::f8e4m3, {1, hq, sq, d}};
    args.q_scale = {q_scales.data(), {1, hq, 1, 1}};
    args.kv = rapt::KvSource::strided({k_codes.data(), rapt::DType::f8e4m3, {1, hk, sk, d}},
                                      {v_codes.data(), rapt::DType::f8e4m3, {1, hk, sk, d}})
                  .quantized({k_scales.data(), {1, hk, 1, 1}}, {v_scales.data(), {1, hk, 1, 1}});
    args.out = {out.data(), {1, hq, sq, d}};
    rapt::attention(args);
  }
  const auto q = numbers(q_codes, q_scales), k = numbers(k_codes, k_scales), v = numbers(v_codes, v_scales);
  for (std::int64_t i = 0; i < hq * sq; ++i) {
    const std::int64_t head = i / sq / (hq / hk) * sk * d;
    check_row(out.data() + i * d,
              one_row(q.data() + i * d, k.data() + head, v.data() + head, sk, d, [](auto) { return true; }));
  }
}

TEST_CASE("guide: prefill and decode in one call", "[examples]") {
  constexpr std::int64_t room = 32;
  // The second sequence has 20 keys in the cache, the first has none; the new rows lie end to end.
  const auto q_data = random_floats(6 * hq * d, 71), k_data = random_floats(6 * hk * d, 72),
             v_data = random_floats(6 * hk * d, 73);
  std::vector<float> k_cache = random_floats(2 * hk * room * d, 74), v_cache = random_floats(2 * hk * room * d, 75),
                     out(q_data.size());
  const rapt::TensorView q(q_data.data(), {6, hq, d}), k_new(k_data.data(), {6, hk, d}),
      v_new(v_data.data(), {6, hk, d});
  const auto cache = rapt::KvCache::strided({k_cache.data(), {2, hk, room, d}}, {v_cache.data(), {2, hk, room, d}});
  {
    const std::int32_t rows[] = {0, 5, 6};  // the first sequence prefills 5 tokens, the second decodes one
    std::int64_t lengths[] = {0, 20};       // keys in the cache
    rapt::append_kv({k_new, v_new, cache, {lengths, {2}}, {rows, {3}}});
    lengths[0] += 5, lengths[1] += 1;

    rapt::AttentionArgs args;
    args.q = q;  // [6, hq, d]
    args.kv = cache.source({lengths, {2}});
    args.out = rapt::MutableTensorView(out.data(), {6, hq, d});
    args.cu_seqlens_q = rapt::TensorView(rows, {3});
    args.score.causal = true;
    args.score.align = rapt::Align::bottom_right();
    rapt::attention(args);
  }
  for (std::int64_t i = 0; i < 6 * hq; ++i) {
    const std::int64_t row = i / hq, n = row == 5, keys = n ? 21 : row + 1;
    const std::int64_t head = (n * hk + i % hq / (hq / hk)) * room * d;
    const auto expected = one_row(q_data.data() + i * d, k_cache.data() + head, v_cache.data() + head, keys, d,
                                  [](auto) { return true; });
    check_row(out.data() + i * d, expected);
    const float* given = v_data.data() + (row * hk + i % hq / (hq / hk)) * d;
    CHECK(std::equal(given, given + d, v_cache.data() + head + (keys - 1) * d));
  }
}

TEST_CASE("guide: rotary embedding and norms", "[examples]") {
  constexpr std::int64_t room = 16, n = 3;
  const auto q_data = random_floats(2 * hq * n * d, 91), k_data = random_floats(2 * hk * n * d, 92),
             v_data = random_floats(2 * hk * n * d, 93), angles = random_floats(room * d / 2, 94),
             weights = random_floats(2 * d, 95);
  std::vector<float> cos_data, sin_data, k_cache(2 * hk * room * d), v_cache(k_cache.size()), out(q_data.size());
  for (const float angle : angles) cos_data.push_back(std::cos(angle)), sin_data.push_back(std::sin(angle));
  const std::int64_t lengths[] = {0, 4};
  const rapt::TensorView q(q_data.data(), {2, hq, n, d}), k_new(k_data.data(), {2, hk, n, d}),
      v_new(v_data.data(), {2, hk, n, d}), cos(cos_data.data(), {room, d / 2}), sin(sin_data.data(), {room, d / 2}),
      q_weight(weights.data(), {d}), k_weight(weights.data() + d, {d});
  const rapt::MutableTensorView q_rotated(out.data(), {2, hq, n, d});
  const auto cache = rapt::KvCache::strided({k_cache.data(), {2, hk, room, d}}, {v_cache.data(), {2, hk, room, d}});
  {
    rapt::RotaryAppendKvArgs rotary;
    rotary.append = {k_new, v_new, cache, {lengths, {2}}};
    rotary.q = q, rotary.q_out = q_rotated;  // it may be q itself
    rotary.cos = cos, rotary.sin = sin;      // [positions, d / 2]: one angle for each pair
    rotary.rotary_dim = d;
    rotary.q_norm = q_weight, rotary.k_norm = k_weight;  // optional: RMS norms of heads
    rapt::rotary_append_kv(rotary);
  }
  const auto check_rotated = [&](const float* got, const float* x, const float* weight, std::int64_t position) {
    double squares = 0;
    for (std::int64_t c = 0; c < d; ++c) squares += double{x[c]} * double{x[c]};
    const double factor = 1 / std::sqrt(squares / static_cast<double>(d) + 1e-6);
    for (std::int64_t first = 0, second = d / 2; second < d; ++first, ++second) {
      const auto at = static_cast<std::size_t>(position * d / 2 + first);
      const double x1 = factor * double{x[first]} * double{weight[first]},
                   x2 = factor * double{x[second]} * double{weight[second]};
      CHECK(std::fabs(double{got[first]} - (x1 * double{cos_data[at]} - x2 * double{sin_data[at]})) < 1e-5);
      CHECK(std::fabs(double{got[second]} - (x2 * double{cos_data[at]} + x1 * double{sin_data[at]})) < 1e-5);
    }
  };
  for (std::int64_t i = 0; i < 2; ++i)
    for (std::int64_t t = 0; t < n; ++t) {
      const std::int64_t position = lengths[i] + t;
      for (std::int64_t h = 0; h < hq; ++h) {
        const std::int64_t row = ((i * hq + h) * n + t) * d;
        check_rotated(out.data() + row, q_data.data() + row, weights.data(), position);
      }
      for (std::int64_t h = 0; h < hk; ++h) {
        const std::int64_t row = ((i * hk + h) * n + t) * d, to = ((i * hk + h) * room + position) * d;
        check_rotated(k_cache.data() + to, k_data.data() + row, weights.data() + d, position);
        CHECK(std::equal(v_data.data() + row, v_data.data() + row + d, v_cache.data() + to));
      }
    }
}

TEST_CASE("guide: a ring and a prompt in chunks", "[examples]") {
  constexpr std::int64_t prompt = 29;
  const auto q_data = random_floats(prompt * hq * d, 81), k_data = random_floats(prompt * hk * d, 82),
             v_data = random_floats(prompt * hk * d, 83);
  std::vector<float> k_ring(hk * 12 * d, NAN), v_ring(hk * 12 * d, NAN), out_data(q_data.size());
  const float *q_rows = q_data.data(), *k_rows = k_data.data(), *v_rows = v_data.data();
  float* out_rows = out_data.data();
  {
    constexpr std::int64_t window = 8, chunk = 4, rows = window + chunk;
    const auto cache = rapt::KvCache::ring({k_ring.data(), {1, hk, rows, d}}, {v_ring.data(), {1, hk, rows, d}});
    rapt::ScoreSpec score;
    score.causal = true;
    score.window = rapt::Window{.left = window, .right = 0};
    score.align = rapt::Align::bottom_right();
    for (std::int64_t length = 0, n = 0; length < prompt; length += n) {
      n = std::min(chunk, prompt - length);  // rows of this chunk; the prompt's tensors are [prompt, heads, d]
      rapt::TensorView q(q_rows + length * hq * d, {1, hq, n, d}, {0, d, hq * d, 1});
      rapt::TensorView k(k_rows + length * hk * d, {1, hk, n, d}, {0, d, hk * d, 1});
      rapt::TensorView v(v_rows + length * hk * d, {1, hk, n, d}, {0, d, hk * d, 1});
      rapt::MutableTensorView out(out_rows + length * hq * d, {1, hq, n, d}, {0, d, hq * d, 1});
      const std::int64_t before = length, after = length + n;
      rapt::append_kv({k, v, cache, {&before, {1}}});
      rapt::attention({q, cache.source({&after, {1}}), out, score});
    }
  }
  for (std::int64_t i = 0; i < prompt * hq; ++i) {
    const std::int64_t head = i % hq / (hq / hk) * d, row = i / hq;
    check_row(out_rows + i * d, one_row(q_rows + i * d, k_rows + head, v_rows + head, prompt, hk * d,
                                        [&](auto j) { return j <= row && j >= row - 8; }));
  }
}

TEST_CASE("guide: latent attention", "[examples]") {
  constexpr std::int64_t room = 40, n = 7;
  std::vector<float> cache_data(room * 576, NAN), out(hq * n * 512);
  const auto new_data = random_floats(n * 576, 91), q_data = random_floats(hq * n * 576, 92);
  float* latent = cache_data.data();
  const float* new_rows = new_data.data();
  const rapt::TensorView queries(q_data.data(), {1, hq, n, 576});
  const rapt::MutableTensorView result(out.data(), {1, hq, n, 512});
  {
    // A key is 512 columns of latent values and 64 of rotary position; its value is the first 512 of them.
    constexpr std::int64_t dk = 576, dv = 512;
    rapt::MutableTensorView k(latent, {1, 1, room, dk}), v(latent, {1, 1, room, dv}, {room * dk, room * dk, dk, 1});
    const auto cache = rapt::KvCache::strided(k, v);
    rapt::TensorView k_new(new_rows, {1, 1, n, dk}), v_new(new_rows, {1, 1, n, dv}, {n * dk, n * dk, dk, 1});
    std::int64_t length = 0;
    rapt::append_kv({k_new, v_new, cache, {&length, {1}}});
    length += n;

    rapt::ScoreSpec score;
    score.scale = 1 / std::sqrt(128.f + 64.f);  // the scale of the original 192-column heads
    score.causal = true;
    rapt::attention({queries, cache.source({&length, {1}}), result, score});  // [1, hq, n, 576] to [1, hq, n, 512]
  }
  for (std::int64_t i = 0; i < hq * n; ++i) {
    std::vector<double> expected(512, 0.0);
    double sum = 0;
    for (std::int64_t j = 0; j <= i % n; ++j) {
      double x = 0;
      for (std::int64_t c = 0; c < 576; ++c) x += double(q_data[std::size_t(i * 576 + c)]) * new_rows[j * 576 + c];
      const double p = std::exp(x / std::sqrt(192.0));
      sum += p;
      for (std::int64_t c = 0; c < 512; ++c) expected[std::size_t(c)] += p * new_rows[j * 576 + c];
    }
    for (double& value : expected) value /= sum;
    check_row(out.data() + i * 512, expected);
  }

  const std::vector<float> before = out;
  std::vector<float> row_data(room * 164, NAN);
  auto* const bytes = reinterpret_cast<std::uint8_t*>(row_data.data());
  {
    using rapt::DType, rapt::MutableTensorView;
    MutableTensorView codes(bytes, DType::f8e4m3, {1, 1, room, 512}, {room * 656, 0, 656, 1});
    MutableTensorView scales(bytes + 512, DType::f32, {1, 1, room, 4}, {room * 164, 0, 164, 1});
    MutableTensorView rotary(bytes + 528, DType::bf16, {1, 1, room, 64}, {room * 328, 0, 328, 1});
    const auto cache = rapt::KvCache::strided(codes, codes).quantized(scales, scales).with_tail(rotary);

    std::int64_t length = 0;
    rapt::append_kv(
        {{new_rows, {1, 1, n, 576}}, {new_rows, {1, 1, n, 512}, {n * 576, n * 576, 576, 1}}, cache, {&length, {1}}});
    length += n;
    rapt::ScoreSpec score;
    score.scale = 1 / std::sqrt(128.f + 64.f);
    score.causal = true;
    rapt::attention({queries, cache.source({&length, {1}}), result, score});
  }
  // Numbers of up to 1 are off by up to 1 / 16 of themselves, and scores, in which that averages out, by some
  // hundredths.
  for (std::size_t i = 0; i < out.size(); ++i) CHECK(std::abs(out[i] - before[i]) < 0.1f);
}

TEST_CASE("guide: gathered keys", "[examples]") {
  constexpr std::int64_t prompt = 20, n = 6;
  const auto q_data = random_floats(hq * prompt * d, 93), k_data = random_floats(prompt * d, 94),
             v_data = random_floats(prompt * d, 95);
  std::vector<float> sparse(hq * prompt * d), masked(sparse.size());
  const rapt::TensorView q(q_data.data(), {1, hq, prompt, d}), k(k_data.data(), {1, 1, prompt, d}),
      v(v_data.data(), {1, 1, prompt, d});
  const rapt::MutableTensorView out(sparse.data(), {1, hq, prompt, d});
  // Every third key up to the token's own.
  bool chosen[prompt][prompt] = {};
  const auto select_keys = [&](std::int64_t t, std::int64_t count, std::int32_t* list) {
    for (std::int64_t j = t; j >= 0 && count > 0; j -= 3, --count) {
      *list++ = static_cast<std::int32_t>(j);
      chosen[t][j] = true;
    }
  };
  {
    // The n best keys of each token of a prompt, -1 where a token sees fewer. k and v are [1, 1, prompt, d].
    std::vector<std::int32_t> indices(prompt * n, -1);
    for (std::int64_t t = 0; t < prompt; ++t) select_keys(t, n, &indices[t * n]);
    rapt::attention({q, rapt::KvSource::gathered(k, v, {indices.data(), {1, prompt, n}}), out});
  }
  rapt::ScoreSpec score;
  score.mask = rapt::TensorView(&chosen[0][0], {prompt, prompt});
  rapt::attention(q, k, v, {masked.data(), {1, hq, prompt, d}}, score);
  for (std::size_t i = 0; i < sparse.size(); ++i) CHECK(std::abs(sparse[i] - masked[i]) < 1e-5);
}

TEST_CASE("guide: merging", "[examples]") {
  constexpr std::int64_t sq = 3, shared = 20, own = 9, sk = shared + own;
  const auto q_data = random_floats(b * hq * sq * d, 31), k_data = random_floats(b * hk * sk * d, 32),
             v_data = random_floats(b * hk * sk * d, 33);
  std::vector<float> parts[2], lse_parts[2], out_data(q_data.size());
  const rapt::MutableTensorView out(out_data.data(), {b, hq, sq, d});
  for (const int i : {0, 1}) parts[i].resize(q_data.size()), lse_parts[i].resize(q_data.size() / d);
  rapt::MutableTensorView out_0(parts[0].data(), {b, hq, sq, d}), out_1(parts[1].data(), {b, hq, sq, d});
  rapt::MutableTensorView lse_0(lse_parts[0].data(), {b, hq, sq}), lse_1(lse_parts[1].data(), {b, hq, sq});
  const rapt::TensorView q(q_data.data(), {b, hq, sq, d});
  const rapt::KvSource prefix =
      rapt::KvSource::strided({k_data.data(), {b, hk, shared, d}, {hk * sk * d, sk * d, d, 1}},
                              {v_data.data(), {b, hk, shared, d}, {hk * sk * d, sk * d, d, 1}});
  const rapt::KvSource rest =
      rapt::KvSource::strided({k_data.data() + shared * d, {b, hk, own, d}, {hk * sk * d, sk * d, d, 1}},
                              {v_data.data() + shared * d, {b, hk, own, d}, {hk * sk * d, sk * d, d, 1}});
  {
    rapt::attention({q, prefix, out_0, {}, lse_0});
    rapt::attention({q, rest, out_1, {}, lse_1});
    const rapt::TensorView outs[] = {out_0, out_1}, lses[] = {lse_0, lse_1};
    rapt::merge_states(outs, lses, out);
  }
  for (std::int64_t i = 0; i < b * hq * sq; ++i) {
    const std::int64_t head = (i / (hq * sq) * hk + i / sq % hq / (hq / hk)) * sk * d;
    check_row(out_data.data() + i * d, one_row(q_data.data() + i * d, k_data.data() + head, v_data.data() + head, sk, d,
                                               [](auto) { return true; }));
  }
}

}  // namespace rapt::testing
