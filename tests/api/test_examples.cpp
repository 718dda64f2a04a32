// The examples of docs/api.md, run, and a test that they are those of the guide.
#include <Eigen/Core>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "rapt/interop/eigen.hpp"
#include "rapt/rapt.hpp"
#include "support/catch.hpp"

namespace rapt::testing {
namespace {

constexpr std::int64_t b = 2, hq = 4, hk = 2, d = 8;

std::vector<float> random_floats(std::int64_t count, int seed) {
  std::srand(static_cast<unsigned>(seed));
  std::vector<float> values(static_cast<std::size_t>(count));
  Eigen::Map<Eigen::VectorXf>(values.data(), count).setRandom();
  return values;
}

/// Softmax of one query row over the keys that `attended` picks, times the values, in double.
template <class Attended>
std::vector<double> one_row(const float* q, const float* k, const float* v, std::int64_t keys, std::int64_t stride,
                            Attended attended) {
  std::vector<double> out(d, 0.0);
  double sum = 0;
  for (std::int64_t j = 0; j < keys; ++j) {
    if (!attended(j)) continue;
    double x = 0;
    for (std::int64_t c = 0; c < d; ++c) x += double(q[c]) * k[j * stride + c];
    const double p = std::exp(x / std::sqrt(double(d)));
    sum += p;
    for (std::int64_t c = 0; c < d; ++c) out[static_cast<std::size_t>(c)] += p * v[j * stride + c];
  }
  for (double& value : out) value /= sum;
  return out;
}

void check_row(const float* got, const std::vector<double>& expected) {
  for (std::size_t c = 0; c < expected.size(); ++c) REQUIRE(std::abs(got[c] - expected[c]) <= 2e-6);
}

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

/// The lines of a file without their indentation, each ended by a newline.
std::string unindented(const std::string& text) {
  std::istringstream in(text);
  std::string out;
  for (std::string line; std::getline(in, line);)
    out += line.substr(std::min(line.find_first_not_of(' '), line.size())) + '\n';
  return out;
}

std::string read(const std::filesystem::path& path) {
  std::ifstream in(path);
  INFO("opening " << path);
  REQUIRE(in.good());
  return {std::istreambuf_iterator<char>(in), {}};
}

}  // namespace

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

TEST_CASE("guide: ragged batches", "[examples]") {
  const auto q_data = random_floats(10 * hq * d, 7), k_data = random_floats(10 * hk * d, 8),
             v_data = random_floats(10 * hk * d, 9);
  const float *q = q_data.data(), *k = k_data.data(), *v = v_data.data();
  std::vector<float> out_data(q_data.size());
  float* out = out_data.data();

  const std::int32_t borders[] = {0, 3, 10};  // two sequences: 3 and 7 rows
  rapt::AttentionArgs args;
  args.q = rapt::TensorView(q, {10, hq, d});
  args.kv = rapt::KvSource::ragged({k, {10, hk, d}}, {v, {10, hk, d}}, {borders, {3}});
  args.out = rapt::MutableTensorView(out, {10, hq, d});
  args.cu_seqlens_q = rapt::TensorView(borders, {3});
  rapt::attention(args);

  for (std::int64_t i = 0; i < 10 * hq; ++i) {
    const std::int64_t head = i % hq / (hq / hk) * d;
    check_row(out + i * d,
              one_row(q + i * d, k + head, v + head, 10, hk * d, [&](auto j) { return (j < 3) == (i / hq < 3); }));
  }
}

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
    options.isa = rapt::usable_isas().back();    // at most this one, the plainest
    options.observer = [](std::string_view line) { std::clog << line << '\n'; };
    const rapt::Context context(options);
    rapt::attention(queries, keys, values, result, {}, context);
  }
  for (std::size_t i = 0; i < out.size(); ++i) REQUIRE(std::abs(out[i] - expected[i]) <= 4e-6f);

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
  CHECK(captured.str().find("score.scale: ") != std::string::npos);
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

TEST_CASE("guide: every example of docs/api.md is compiled here or in tests/c", "[examples]") {
  const auto tests = std::filesystem::path(RAPT_TEST_DATA).parent_path();
  const std::string cpp = unindented(read(tests / "api" / "test_examples.cpp")),
                    c = unindented(read(tests / "c" / "example.c"));
  const std::string guide = read(tests.parent_path() / "docs" / "api.md");
  int blocks = 0;
  for (std::size_t fence = guide.find("\n```c"); fence != std::string::npos; fence = guide.find("\n```c", fence + 1)) {
    const std::size_t begin = guide.find('\n', fence + 1) + 1, end = guide.find("```", begin);
    std::istringstream block(unindented(guide.substr(begin, end - begin)));
    const std::string& source = guide.compare(fence, 7, "\n```cpp") == 0 ? cpp : c;
    // Paragraphs of a block may stand apart in the test.
    std::string paragraph;
    for (std::string line; std::getline(block, line) || !paragraph.empty();) {
      if (block && !line.empty()) {
        paragraph += line + '\n';
        continue;
      }
      CAPTURE(paragraph);
      CHECK(source.find(paragraph) != std::string::npos);
      paragraph.clear();
      if (!block) break;
    }
    ++blocks;
  }
  CHECK(blocks == 15);
}

}  // namespace rapt::testing
