#include "operations/attention_backward/oracle.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>
#include <optional>

#include "operations/attention_backward/sums.hpp"

namespace rapt::testing {
namespace {

using namespace gradients;
using Index = std::vector<std::int64_t>;
using Flags = Eigen::Array<bool, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;

constexpr std::int64_t kBlock = 64;
double finite(double x) {
  return std::isfinite(x) ? x : 0;
}
Matrix finite_only(const Matrix& m) {
  return m.unaryExpr([](double x) { return finite(x); });
}
Matrix magnitude_of(const Matrix& m) {
  return finite_only(m).cwiseAbs();
}
Matrix squares_of(const Matrix& m) {
  return finite_only(m).cwiseAbs2();
}

/// 0, step, 2 step, ... and n - 1.
Index every(std::int64_t step, std::int64_t n) {
  Index index;
  for (std::int64_t i = 0; i < n; i += step) index.push_back(i);
  if (n > 0 && index.back() != n - 1) index.push_back(n - 1);
  return index;
}
Matrix gather(const Matrix& m, const Index& index) {
  Matrix part(static_cast<Eigen::Index>(index.size()), m.cols());
  for (std::size_t i = 0; i < index.size(); ++i) part.row(static_cast<Eigen::Index>(i)) = m.row(index[i]);
  return part;
}

/// weights * m, where a row of m that is not finite reaches only what sees it.
Matrix product(const Matrix& weights, const Flags& sees, const Matrix& m) {
  Matrix result = times(weights, finite_only(m));
  for (Eigen::Index j = 0; j < m.rows(); ++j) {
    if (m.row(j).allFinite()) continue;
    for (Eigen::Index i = 0; i < weights.rows(); ++i)
      for (Eigen::Index c = 0; sees(i, j) && c < m.cols(); ++c)
        if (!std::isfinite(m(j, c))) result(i, c) += weights(i, j) * m(j, c);
  }
  return result;
}

/// What a row gives to the errors of all its keys.
struct RowFacts {
  bool sees_keys = false;
  double lse = -kInfinity, sink_weight = 0, delta = 0, dlse = 0;
  double lse_error = 0, lse_sigma = 0, delta_error = 0, delta_sigma = 0;
};

/// Some rows of a head with some of its keys. Entries of pairs that do not see each other are 0.
struct Pairs {
  Flags sees, keeps;                   ///< `keeps`: sees, and does not drop
  Matrix p, pf, pd, ds, dx;            ///< P, P f, P with dropout, dS, dX
  Matrix p_error, ds_error, dx_error;  ///< their bounds
  Matrix p_var, ds_var, dx_var;        ///< of their likely errors, without those that a row has in common
  FloatMatrix plain_pd, plain_dx;      ///< of the plain steps
};

class Oracle {
 public:
  Oracle(const AttentionBackwardArgs& args, const Subset& subset)
      : args_(args),
        forward_{args.q, args.kv, {}, args.score, {}, args.cu_seqlens_q},
        subset_(subset),
        step_(subset.step),
        types_(args),
        ragged_q_(static_cast<bool>(args.cu_seqlens_q)),
        ragged_k_(static_cast<bool>(args.kv.cu_seqlens)),
        hq_(args.q.shape[1]),
        hk_(args.kv.k.shape[1]),
        d_(args.q.shape[static_cast<std::size_t>(args.q.ndim - 1)]),
        dv_(args.kv.v.shape[static_cast<std::size_t>(args.kv.v.ndim - 1)]),
        dq_(result_.dq, args.dq, types_.eps, subset.whole()),
        dk_(result_.dk, args.dk, types_.eps, subset.whole()),
        dvalues_(result_.dv, args.dv, types_.eps, subset.whole()),
        dbias_(result_.dbias, args.dbias, 0, false),
        dsinks_(result_.dsinks, args.dsinks, 0, false),
        dalibi_(result_.dalibi, args.dalibi, 0, false) {
    scale_ = args.score.scale ? static_cast<double>(*args.score.scale) : 1 / std::sqrt(static_cast<double>(d_));
    plain_ = types_.eps > 0 && subset.whole();
  }

  BackwardReference run() {
    if (!has_positions(args_.kv)) run_gathered();
    else run_sequences();
    if (!subset_.whole()) return std::move(result_);
    for (Collected* sums : {&dbias_, &dsinks_, &dalibi_}) sums->finish_all();
    for (Collected* sums : {&dq_, &dk_, &dvalues_}) sums->rest_is_zero();
    return std::move(result_);
  }

 private:
  void run_sequences() {
    const std::int64_t sequences = ragged_q_ ? args_.cu_seqlens_q.shape[0] - 1 : args_.q.shape[0];
    for (std::int64_t n = 0; n < sequences; ++n)
      for (std::int64_t h = 0; h < hk_; ++h)
        if ((subset_.sequence < 0 || subset_.sequence == n) && (subset_.kv_head < 0 || subset_.kv_head == h))
          run_group(n, h);
  }

  /// Of each pool and head, the sums of all tokens whose lists are of its rows.
  void run_gathered() {
    const std::int64_t b = args_.q.shape[0], sq = args_.q.shape[2], pools = args_.kv.k.shape[0],
                       pool_rows = args_.kv.k.shape[2];
    const Index some_rows = every(step_, pool_rows);
    const auto count = static_cast<Eigen::Index>(some_rows.size());
    for (std::int64_t pool = 0; pool < pools; ++pool) {
      for (std::int64_t h = 0; h < hk_; ++h) {
        if ((subset_.kv_head >= 0 && subset_.kv_head != h) ||
            (subset_.sequence >= 0 && pools > 1 && subset_.sequence != pool))
          continue;
        PoolSums sums{Sums(count, d_), Sums(count, dv_), std::vector<double>(some_rows.size())};
        for (std::int64_t n = pools == 1 ? 0 : pool; n < (pools == 1 ? b : pool + 1); ++n)
          for (std::int64_t i = 0; i < sq; ++i) run_token(n, i, h, sums);
        for (std::size_t r = 0; r < some_rows.size(); ++r)
          put_key(sums.of_k, sums.of_v, static_cast<Eigen::Index>(r), (pool * hk_ + h) * pool_rows + some_rows[r],
                  sums.terms[r]);
      }
    }
  }

  struct PoolSums {
    Sums of_k, of_v;  ///< of every step-th row and the last one
    std::vector<double> terms;
  };
  void run_token(std::int64_t n, std::int64_t i, std::int64_t kv_head, PoolSums& pool) {
    const std::vector<Slot> slots = listed_slots(args_.kv, n, i);
    const Keys keys(args_.kv, false, kv_head, slots), values(args_.kv, true, kv_head, slots);
    const std::int64_t last_row = args_.kv.k.shape[2] - 1, group = hq_ / hk_;
    Index some_keys;
    for (std::size_t j = 0; j < slots.size(); ++j)
      if (slots[j].row % step_ == 0 || slots[j].row == last_row) some_keys.push_back(static_cast<std::int64_t>(j));
    const Index all_keys = every(1, std::ssize(slots)), one{0};
    Sums of_k(std::ssize(some_keys), d_), of_v(std::ssize(some_keys), dv_);
    for (std::int64_t h = kv_head * group; h < (kv_head + 1) * group; ++h) {
      const Head head{forward_, n, h, 0, 0, keys, values};
      const Matrix q = rows(args_.q, false, n, h, i, 1), dout = rows(args_.dout, false, n, h, i, 1);
      std::vector<RowFacts> facts;
      note_rows(head, 0, q, dout, i, facts);
      add_keys(pairs_of(head, q, dout, one, some_keys, facts), q, dout, one, facts, of_k, of_v);
      if (i % step_ == 0 || i == args_.q.shape[2] - 1)
        put_rows(head, pairs_of(head, q, dout, one, all_keys, facts), one, {i, 1}, all_keys, facts);
    }
    for (std::size_t j = 0; j < some_keys.size(); ++j) {
      const std::int64_t row = slots[static_cast<std::size_t>(some_keys[j])].row;
      const std::int64_t to = row % step_ == 0 ? row / step_ : std::ssize(pool.terms) - 1;
      pool.of_k.add_row(to, of_k, static_cast<Eigen::Index>(j));
      pool.of_v.add_row(to, of_v, static_cast<Eigen::Index>(j));
      pool.terms[static_cast<std::size_t>(to)] += static_cast<double>(group);
    }
  }

  /// All query heads that share a head of keys.
  void run_group(std::int64_t n, std::int64_t kv_head) {
    const Range own_q = rows_of(args_.cu_seqlens_q, n, ragged_q_ ? 0 : args_.q.shape[2]);
    const Range own_k = rows_of(args_.kv.cu_seqlens, n, ragged_k_ ? 0 : args_.kv.k.shape[2]);
    const std::int64_t len_k = args_.kv.seqlens ? read_index(args_.kv.seqlens, n) : own_k.length;
    const std::int64_t offset = key_offset(forward_, own_q.length, len_k);
    const Range seen = seen_keys(forward_, own_q.length, len_k, offset);
    const Keys keys(args_.kv, false, n, kv_head, seen.begin, seen.length),
        values(args_.kv, true, n, kv_head, seen.begin, seen.length);
    const Index all_keys = every(1, seen.length), some_keys = every(step_, seen.length);
    const auto key_count = static_cast<Eigen::Index>(some_keys.size());
    Sums of_k(key_count, d_), of_v(key_count, dv_);
    const std::int64_t group = hq_ / hk_;
    for (std::int64_t h = kv_head * group; h < (kv_head + 1) * group; ++h) {
      const Head head{forward_, n, h, offset, seen.begin, keys, values};
      const Matrix q = rows(args_.q, ragged_q_, n, h, own_q.begin, own_q.length),
                   dout = rows(args_.dout, ragged_q_, n, h, own_q.begin, own_q.length);
      std::vector<RowFacts> facts;
      for (std::int64_t i = 0; i < own_q.length; i += kBlock)
        note_rows(head, i, q.middleRows(i, std::min(kBlock, own_q.length - i)), dout, own_q.begin, facts);
      for (std::int64_t i = 0; i < own_q.length; i += kBlock) {
        const Index block = between(i, std::min(i + kBlock, own_q.length));
        const Pairs pairs = pairs_of(head, gather(q, block), gather(dout, block), block, some_keys, facts);
        add_keys(pairs, gather(q, block), gather(dout, block), block, facts, of_k, of_v);
        if (step_ == 1) {
          put_rows(head, pairs, block, own_q, all_keys, facts);
          add_scores(head, pairs, block, facts);
        }
      }
      if (step_ > 1 && dq_) {
        for (const std::int64_t i : every(step_, own_q.length)) {
          const Index one{i};
          put_rows(head, pairs_of(head, gather(q, one), gather(dout, one), one, all_keys, facts), one, own_q, all_keys,
                   facts);
        }
      }
    }
    put_keys(of_k, of_v, n, kv_head, own_k, seen, some_keys, static_cast<double>(own_q.length * group));
  }

  static Index between(std::int64_t begin, std::int64_t end) {
    Index index(static_cast<std::size_t>(end - begin));
    std::iota(index.begin(), index.end(), begin);
    return index;
  }

  /// lse and delta of rows [first, first + q.rows()), and what the sink gets from them.
  void note_rows(const Head& head, std::int64_t first, const Matrix& q, const Matrix& all_dout, std::int64_t row_begin,
                 std::vector<RowFacts>& facts) {
    const Matrix &k = head.keys.value, &v = head.values.value;
    const Matrix dot = times(q, k.transpose());
    Matrix p = Matrix::Zero(q.rows(), k.rows());
    Flags sees = Flags::Constant(q.rows(), k.rows(), false);
    const double sink = args_.score.sinks ? read_float(args_.score.sinks, {head.h}) : -kInfinity;
    std::vector<RowFacts> noted(static_cast<std::size_t>(q.rows()));
    for (Eigen::Index r = 0; r < q.rows(); ++r) {
      RowFacts& row = noted[static_cast<std::size_t>(r)];
      if (args_.dlse) row.dlse = read_dlse(head, first + r, row_begin);
      double top = sink;
      bool broken = std::isnan(sink) || sink == kInfinity;
      for (Eigen::Index j = 0; j < k.rows(); ++j) {
        const double x = p(r, j) = final_score(head, first + r, head.first + j, dot(r, j), 0, 0).x;
        sees(r, j) = x != -kInfinity;
        row.sees_keys = row.sees_keys || sees(r, j);
        broken = broken || std::isnan(x) || x == kInfinity;
        top = std::max(top, x);
      }
      double sum = 0;
      for (Eigen::Index j = 0; j < k.rows(); ++j)
        if (sees(r, j)) sum += std::exp(p(r, j) - top);
      if (sink != -kInfinity) sum += std::exp(sink - top);
      row.lse = broken ? kNaN : top == -kInfinity ? top : top + std::log(sum);
      for (Eigen::Index j = 0; j < k.rows(); ++j) {
        const double factor = dropout_of(head, first + r, head.first + j);
        p(r, j) = sees(r, j) && factor != 0 ? std::exp(p(r, j) - row.lse) * factor : 0;
        sees(r, j) = sees(r, j) && factor != 0;
      }
      row.sink_weight = sink == -kInfinity ? 0 : std::exp(sink - row.lse);
    }
    const Matrix out = product(p, sees, v), dout = all_dout.middleRows(first, q.rows());
    for (Eigen::Index r = 0; r < q.rows(); ++r) {
      RowFacts& row = noted[static_cast<std::size_t>(r)];
      double sum = 0, magnitude = 0, squares = 0, of_dout = 0;
      for (Eigen::Index c = 0; row.sees_keys && c < dv_; ++c) {
        const double term = dout(r, c) * out(r, c);
        sum += term, magnitude += std::abs(term), squares += term * term, of_dout += std::abs(dout(r, c));
      }
      const double denormal = args_.out.dtype == DType::f16 ? 0x1p-25 : 0;
      if (!row.sees_keys) {  // and gives nothing but dlse, to its sink
        row.delta = -row.dlse;
        row.lse_error = 40 * kUnit * (std::abs(row.lse) + 1);
      } else {
        row.delta = sum - row.dlse;
        row.lse_error = 40 * kUnit * (std::abs(row.lse) + 1);
        row.lse_sigma = kLikely * (2 * std::abs(row.lse) + 4);
        row.delta_error = (types_.out_eps + (std::sqrt(dv_) + 6) * kUnit) * magnitude + denormal * of_dout;
        row.delta_sigma =
            types_.out_eps * std::sqrt(squares) +
            kLikely * (std::sqrt(static_cast<double>(dv_) / 3) * (std::sqrt(squares) + 2 * std::abs(sum)) +
                       std::abs(row.dlse)) +
            denormal * of_dout;
      }
      add_sink(head, row, sink);
      facts.push_back(row);
    }
  }

  void add_sink(const Head& head, const RowFacts& row, double sink) {
    if (!dsinks_ || row.sink_weight == 0) return;
    const double grown = std::expm1(std::min(row.lse_error + 8 * kUnit * std::abs(sink), 600.0));
    const double term = -row.sink_weight * row.delta;
    const double error =
        row.sink_weight * (1 + grown) * (row.delta_error + 4 * kUnit * (std::abs(row.delta))) + grown * std::abs(term);
    const double of_delta = row.sink_weight * row.delta_sigma;
    const double of_weight = term * (row.lse_sigma + 4 * kUnit * std::abs(sink));
    dsinks_.add(static_cast<std::size_t>(head.h), term, error, of_delta * of_delta + of_weight * of_weight);
  }

  /// What dropout multiplies a weight by.
  double dropout_of(const Head& head, std::int64_t i, std::int64_t j) const {
    return args_.score.dropout ? dropout_factor(*args_.score.dropout, hq_, head.n, head.h, i, j) : 1;
  }

  double read_dlse(const Head& head, std::int64_t i, std::int64_t row_begin) const {
    return ragged_q_ ? read_float(args_.dlse, {row_begin + i, head.h})
                     : read_float(args_.dlse, {head.n, head.h, row_begin + i});
  }

  /// Rows `index` of q and dout, which are theirs alone, with keys `key_index`.
  Pairs pairs_of(const Head& head, const Matrix& q, const Matrix& dout, const Index& index, const Index& key_index,
                 const std::vector<RowFacts>& facts) const {
    const Matrix k = gather(head.keys.value, key_index), v = gather(head.values.value, key_index);
    const Matrix dot = times(q, k.transpose()), dot_abs = times(q.cwiseAbs(), k.cwiseAbs().transpose()),
                 dot_squares = times(q.cwiseAbs2(), k.cwiseAbs2().transpose());
    Matrix dp = times(dout, v.transpose()), dp_abs = times(dout.cwiseAbs(), v.cwiseAbs().transpose()),
           dp_squares = times(dout.cwiseAbs2(), v.cwiseAbs2().transpose());
    const Eigen::Index count = q.rows(), keys = k.rows();
    const double root = std::sqrt(static_cast<double>(dv_)), likely_root = std::sqrt(static_cast<double>(dv_) / 3);
    Pairs pairs;
    pairs.sees = pairs.keeps = Flags::Constant(count, keys, false);
    for (Matrix* m : {&pairs.p, &pairs.pf, &pairs.pd, &pairs.ds, &pairs.dx, &pairs.p_error, &pairs.ds_error,
                      &pairs.dx_error, &pairs.p_var, &pairs.ds_var, &pairs.dx_var})
      *m = Matrix::Zero(count, keys);
    Matrix scores = Matrix::Constant(count, keys, -kInfinity), slopes = Matrix::Zero(count, keys);
    for (Eigen::Index r = 0; r < count; ++r) {
      const RowFacts& row = facts[static_cast<std::size_t>(index[static_cast<std::size_t>(r)])];
      for (Eigen::Index j = 0; row.sees_keys && j < keys; ++j) {
        const Score s =
            final_score(head, index[static_cast<std::size_t>(r)], head.first + key_index[static_cast<std::size_t>(j)],
                        dot(r, j), dot_abs(r, j), dot_squares(r, j));
        if (s.x == -kInfinity) continue;
        pairs.sees(r, j) = true, scores(r, j) = s.x, slopes(r, j) = s.slope;
        const double factor =
            dropout_of(head, index[static_cast<std::size_t>(r)], head.first + key_index[static_cast<std::size_t>(j)]);
        pairs.keeps(r, j) = factor != 0;
        if (factor == 0) dp(r, j) = dp_abs(r, j) = dp_squares(r, j) = 0;
        else dp(r, j) *= factor, dp_abs(r, j) *= factor, dp_squares(r, j) *= factor * factor;
        const double p = std::exp(s.x - row.lse), difference = dp(r, j) - row.delta, away = std::abs(s.x - row.lse);
        const double grown = std::expm1(std::min(s.delta + row.lse_error + 2 * kUnit * (away + 6), 600.0));
        const double p_error = p * grown + std::min(p, 0x1p-100);
        const double operands = std::abs(dp(r, j)) + std::abs(row.delta) + std::abs(row.dlse);
        const double of_difference = (root + 6) * kUnit * dp_abs(r, j) + row.delta_error + 4 * kUnit * operands;
        const double ds = p * difference;
        const double ds_error = p_error * std::abs(difference) + (p + p_error) * of_difference;
        pairs.p(r, j) = p, pairs.pf(r, j) = p * s.slope, pairs.ds(r, j) = ds, pairs.dx(r, j) = ds * s.slope;
        pairs.pd(r, j) = factor == 0 ? 0 : p * factor;
        pairs.p_error(r, j) = (p_error + (args_.score.dropout ? 2 * kUnit * p : 0)) * factor,
                         pairs.ds_error(r, j) = ds_error;
        pairs.dx_error(r, j) = ds_error * (s.slope + s.slope_error) + std::abs(ds) * s.slope_error;
        const double of_x = s.sigma / 4 + kLikely * (away + 2);
        const double of_dp =
            likely_root * kLikely * (std::sqrt(dp_squares(r, j)) + 2 * std::abs(dp(r, j))) + kLikely * operands;
        pairs.p_var(r, j) = std::pow(p * factor * of_x, 2);
        pairs.ds_var(r, j) = std::pow(p * of_dp, 2) + std::pow(ds * of_x, 2);
        pairs.dx_var(r, j) = pairs.ds_var(r, j) * s.slope * s.slope + std::pow(ds * s.slope_error / 4, 2);
      }
    }
    if (plain_) note_plain(pairs, scores, slopes, dp, index, key_index, facts, head);
    return pairs;
  }

  /// Softmax and its gradient, step by step on rounded scores.
  void note_plain(Pairs& pairs, const Matrix& scores, const Matrix& slopes, const Matrix& dp, const Index& index,
                  const Index& key_index, const std::vector<RowFacts>& facts, const Head& head) const {
    const auto round = [&](double x) { return rounded(static_cast<float>(x), types_.inputs); };
    const float sink = args_.score.sinks ? static_cast<float>(read_float(args_.score.sinks, {head.h})) : -HUGE_VALF;
    FloatMatrix weights = FloatMatrix::Zero(scores.rows(), scores.cols());
    pairs.plain_pd = pairs.plain_dx = weights;
    for (Eigen::Index r = 0; r < scores.rows(); ++r) {
      const RowFacts& row = facts[static_cast<std::size_t>(index[static_cast<std::size_t>(r)])];
      if (!row.sees_keys || std::isnan(row.lse)) continue;
      float top = sink, sum = 0, delta = -static_cast<float>(row.dlse);
      for (Eigen::Index j = 0; j < scores.cols(); ++j)
        if (pairs.sees(r, j)) top = std::max(top, round(scores(r, j)));
      for (Eigen::Index j = 0; j < scores.cols(); ++j)
        if (pairs.sees(r, j)) sum += weights(r, j) = std::exp(round(scores(r, j)) - top);
      sum += std::exp(sink - top);
      for (Eigen::Index j = 0; j < scores.cols(); ++j) {
        if (!pairs.sees(r, j)) continue;
        float& p = weights(r, j);
        p = round(p / sum);
        delta += p * static_cast<float>(dp(r, j));
        const double factor =
            dropout_of(head, index[static_cast<std::size_t>(r)], head.first + key_index[static_cast<std::size_t>(j)]);
        pairs.plain_pd(r, j) = round(p * factor);
      }
      for (Eigen::Index j = 0; j < scores.cols(); ++j)
        if (pairs.sees(r, j))
          pairs.plain_dx(r, j) = round(round(weights(r, j) * (static_cast<float>(dp(r, j)) - delta)) * slopes(r, j));
    }
  }

  /// A row's own likely errors, as a factor of each of its entries.
  static Eigen::VectorXd each(const Index& index, const std::vector<RowFacts>& facts, double RowFacts::*member) {
    Eigen::VectorXd values(static_cast<Eigen::Index>(index.size()));
    for (std::size_t i = 0; i < index.size(); ++i)
      values(static_cast<Eigen::Index>(i)) = facts[static_cast<std::size_t>(index[i])].*member;
    return values;
  }

  /// dq of some rows, with all keys.
  void put_rows(const Head& head, const Pairs& pairs, const Index& index, const Range& own, const Index& keys,
                const std::vector<RowFacts>& facts) {
    if (!dq_) return;
    const Matrix &k = head.keys.value, k_abs = magnitude_of(k), k_squares = squares_of(k);
    const double size = std::abs(scale_);
    Sums sums(pairs.p.rows(), d_);
    sums.value = scale_ * product(pairs.dx, pairs.sees, k);
    sums.magnitude = size * times(pairs.dx.cwiseAbs(), k_abs);
    sums.error = size * times(pairs.dx_error, k_abs);
    sums.squares = size * size * times(pairs.dx.cwiseAbs2(), k_squares);
    // What is off by the same delta, and the same lse, in the whole row.
    const Matrix of_delta =
                     each(index, facts, &RowFacts::delta_sigma).asDiagonal() * times(pairs.pf, finite_only(k)) * size,
                 of_lse = each(index, facts, &RowFacts::lse_sigma).asDiagonal() * finite_only(sums.value);
    sums.variance = size * size * times(pairs.dx_var, k_squares) + of_delta.cwiseAbs2() + of_lse.cwiseAbs2();
    if (plain_) sums.plain = static_cast<float>(scale_) * times_fp32(pairs.plain_dx, finite_only(k).cast<float>());
    for (std::size_t r = 0; r < index.size(); ++r) {
      const std::int64_t row = ragged_q_ ? (own.begin + index[r]) * hq_ + head.h
                                         : (head.n * hq_ + head.h) * args_.q.shape[2] + own.begin + index[r];
      dq_.put(static_cast<std::size_t>(row * d_), sums, static_cast<Eigen::Index>(r), static_cast<double>(keys.size()));
    }
  }

  /// What some rows give to dk and dv.
  void add_keys(const Pairs& pairs, const Matrix& q, const Matrix& dout, const Index& index,
                const std::vector<RowFacts>& facts, Sums& of_k, Sums& of_v) const {
    const Flags seen = pairs.sees.transpose();
    const Matrix q_abs = magnitude_of(q), q_squares = squares_of(q), dout_abs = magnitude_of(dout),
                 dout_squares = squares_of(dout);
    const auto lse_var = each(index, facts, &RowFacts::lse_sigma).cwiseAbs2().eval();
    const auto delta_var = each(index, facts, &RowFacts::delta_sigma).cwiseAbs2().eval();
    if (dk_) {
      const double size = std::abs(scale_);
      of_k.value += scale_ * product(pairs.dx.transpose(), seen, q);
      of_k.magnitude += size * times(pairs.dx.cwiseAbs().transpose(), q_abs);
      of_k.error += size * times(pairs.dx_error.transpose(), q_abs);
      of_k.squares += size * size * times(pairs.dx.cwiseAbs2().transpose(), q_squares);
      const Matrix variance =
          pairs.dx_var + delta_var.asDiagonal() * pairs.pf.cwiseAbs2() + lse_var.asDiagonal() * pairs.dx.cwiseAbs2();
      of_k.variance += size * size * times(finite_only(variance).transpose(), q_squares);
      if (plain_)
        of_k.plain += static_cast<float>(scale_) * times_fp32(pairs.plain_dx.transpose(), finite_only(q).cast<float>());
    }
    if (dvalues_) {
      of_v.value += product(pairs.pd.transpose(), pairs.keeps.transpose(), dout);
      of_v.magnitude += times(pairs.pd.transpose(), dout_abs);
      of_v.error += times(pairs.p_error.transpose(), dout_abs);
      of_v.squares += times(pairs.pd.cwiseAbs2().transpose(), dout_squares);
      const Matrix variance = pairs.p_var + lse_var.asDiagonal() * pairs.pd.cwiseAbs2();
      of_v.variance += times(finite_only(variance).transpose(), dout_squares);
      if (plain_) of_v.plain += times_fp32(pairs.plain_pd.transpose(), finite_only(dout).cast<float>());
    }
  }

  void put_keys(const Sums& of_k, const Sums& of_v, std::int64_t n, std::int64_t h, const Range& own, const Range& seen,
                const Index& index, double terms) {
    for (std::size_t r = 0; r < index.size(); ++r) {
      const std::int64_t j = seen.begin + index[r];
      const std::int64_t row = ragged_k_ ? (own.begin + j) * hk_ + h : (n * hk_ + h) * args_.kv.k.shape[2] + j;
      put_key(of_k, of_v, static_cast<Eigen::Index>(r), row, terms);
    }
  }
  void put_key(const Sums& of_k, const Sums& of_v, Eigen::Index r, std::int64_t row, double terms) {
    if (dk_) dk_.put(static_cast<std::size_t>(row * d_), of_k, r, terms);
    if (dvalues_) dvalues_.put(static_cast<std::size_t>(row * dv_), of_v, r, terms);
  }

  /// What some rows give to dbias and dalibi.
  void add_scores(const Head& head, const Pairs& pairs, const Index& index, const std::vector<RowFacts>& facts) {
    if (!dbias_ && !dalibi_) return;
    TensorView logical = args_.score.bias;  // whose offsets are row-major positions
    for (std::int64_t stride = 1, dim = logical.ndim - 1; dim >= 0; --dim) {
      logical.strides[static_cast<std::size_t>(dim)] = stride;
      stride *= logical.shape[static_cast<std::size_t>(dim)];
    }
    const auto bias_at = [&](std::int64_t row, std::int64_t key) {
      return static_cast<std::size_t>(broadcast_offset(logical, {head.n, head.h, row, key}));
    };
    const bool one_key = dbias_ && logical.shape[static_cast<std::size_t>(logical.ndim - 1)] == 1;
    const auto slope = static_cast<std::size_t>(args_.score.alibi.ndim == 2 ? head.n * hq_ + head.h : head.h);
    for (std::size_t r = 0; r < index.size(); ++r) {
      const RowFacts& row = facts[static_cast<std::size_t>(index[r])];
      const auto i = static_cast<Eigen::Index>(r);
      // A row's delta and lse are off by the same in all terms of a sum over its keys.
      const auto of_row = [&](double p, double ds) {
        return std::pow(p * row.delta_sigma, 2) + std::pow(ds * row.lse_sigma, 2);
      };
      double p_sum = 0, ds_sum = 0, p_distance = 0, ds_distance = 0;
      for (Eigen::Index j = 0; j < pairs.p.cols(); ++j) {
        if (!pairs.sees(i, j)) continue;
        const double ds = pairs.ds(i, j), key = static_cast<double>(head.first + j);
        p_sum += pairs.p(i, j), ds_sum += ds;
        if (dbias_)
          dbias_.add(bias_at(index[r], head.first + j), ds, pairs.ds_error(i, j),
                     pairs.ds_var(i, j) + (one_key ? 0 : of_row(pairs.p(i, j), ds)));
        if (!dalibi_) continue;
        const double distance = std::abs(static_cast<double>(index[r]) + static_cast<double>(head.offset) - key);
        p_distance += pairs.p(i, j) * distance, ds_distance += ds * distance;
        dalibi_.add(slope, -ds * distance, distance * (pairs.ds_error(i, j) + 3 * kUnit * std::abs(ds)),
                    distance * distance * pairs.ds_var(i, j));
      }
      if (one_key) dbias_.vary(bias_at(index[r], 0), of_row(p_sum, ds_sum));
      if (dalibi_) dalibi_.vary(slope, of_row(p_distance, ds_distance));
    }
  }

  const AttentionBackwardArgs& args_;
  const AttentionArgs forward_;
  const Subset subset_;
  const std::int64_t step_;
  const Types types_;
  const bool ragged_q_, ragged_k_;
  const std::int64_t hq_, hk_, d_, dv_;
  double scale_ = 0;
  bool plain_ = false;
  BackwardReference result_;
  Collected dq_, dk_, dvalues_, dbias_, dsinks_, dalibi_;
};

}  // namespace

BackwardReference oracle_backward(const AttentionBackwardArgs& args, const Subset& subset) {
  return Oracle(args, subset).run();
}

}  // namespace rapt::testing
