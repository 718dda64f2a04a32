// delta_rule: the recurrence with its decay taken out of the inner loop. Instead of S the kernel keeps
//
//   Z = S / e,   e[c] = 2^24 times the product of channel c's decays after the window's first token
//
// so that, with kd = k e, qd = scale q e and ku = k / e, a token costs three multiply-adds per element of Z: the
// prediction Z^T kd, the read Z^T qd and the write Z += ku u^T. Two tokens share one load and store of Z:
//
//   read      x_i = Z^T kd_i,  y_i = Z^T qd_i                        i = 0, 1
//   solve     u_i = beta_i (v_i - x_i - sum_j<i (kd_i . ku_j) u_j),  out_i = y_i + sum_j<=i (qd_i . ku_j) u_j
//   write     Z += sum_i ku_i u_i^T                                  while the next two tokens read
//
// A token that would take some e out of [kWindowMin, kWindowMax] opens a new window: Z becomes S decayed, over 2^24,
// and e starts again from there. The decision depends on this token and earlier ones, and so does every sum, so a
// later token changes no bit. Decays of any strength are exact to rounding: e is a running product, and 1 / e is
// computed from the rounded e, to an ulp.
#include "cpu/tile/delta_rule.hpp"

#include "cpu/kernels/delta_rule_table.hpp"
#include "cpu/tile/bump_allocator.hpp"
#include "cpu/tile/decode_mma.hpp"

namespace rapt::cpu::RAPT_ISA {
namespace {

constexpr std::int64_t kBlock = 32;     // tokens prepared at a time; their rows stay in L2
constexpr std::int64_t kAhead = 24576;  // prefetch distance in bytes of a state, which reaches into the next head's
constexpr int kVecsOfBlock = kRegisters == 32 ? 4 : 2;

// One or two tokens that share a pass over Z.
struct TokenGroup {
  std::int64_t token, count;  // of the block
  bool opens_window, has_two_factors;
  float beta[2];
};

struct DeltaRuleScratch {
  float* z;  // blocks of columns, one after another, each [d][columns of the block]
  // [kBlock][d]; qd: [kBlock][reads][d]. z_factor: what Z is multiplied by where a window begins; it includes the
  // decay unless the group has two factors.
  float *kd, *qd, *ku, *decay, *z_factor;
  // [kBlock][1 + 2 reads], as vectors of partial sums and as sums: kd . ku_0 for the second token of a group; then for
  // each query qd . ku_0 (second tokens) and qd . ku of the token itself.
  vec* dots;
  float* products;
  float *v, *out;                  // v: [kBlock][columns], if not read in place; out: [kBlock][reads][columns]
  const float** v_row;             // [kBlock]
  float *e, *next_e, *row;         // [d]
  TokenGroup* group;               // [kBlock]
  std::int64_t d, columns, reads;  // d and columns padded to whole vectors

  DeltaRuleScratch(BumpAllocator& allocator, const DeltaRuleShape& shape)
      : d(round_up(shape.d, kLanes)), columns(round_up(shape.columns, kLanes)), reads(shape.reads) {
    z = allocator.take<float>(shape.d * columns);
    for (float** rows : {&kd, &ku, &decay, &z_factor}) *rows = allocator.take<float>(kBlock * d);
    qd = allocator.take<float>(kBlock * reads * d);
    dots = allocator.take<vec>(kBlock * (1 + 2 * reads));
    products = allocator.take<float>(kBlock * (1 + 2 * reads));
    v_row = allocator.take<const float*>(kBlock);
    v = allocator.take<float>(kBlock * columns);
    out = allocator.take<float>(kBlock * reads * columns);
    for (float** one : {&e, &next_e, &row}) *one = allocator.take<float>(d);
    group = allocator.take<TokenGroup>(kBlock);
  }
};

// Multiplies `z_factor` by the decay and returns true, unless some product would be flushed to 0 although the decay is
// not 0.
bool multiply_by_decay(const DeltaRuleScratch& w, const float* decay, float* z_factor) {
  for (std::int64_t c = 0; c < w.d; c += kLanes) {
    const vec own = load(decay + c);
    if (xsimd::any(vec(0x1p-126f) > load(z_factor + c) * own && own > vec(0.f))) return false;
  }
  for (std::int64_t c = 0; c < w.d; c += kLanes) store(z_factor + c, load(z_factor + c) * load(decay + c));
  return true;
}

// Computes kd, qd, ku and v of tokens [begin, begin + n), forms groups and their products, and returns the number of
// groups.
std::int64_t prepare(const DeltaRuleParams& p, const DeltaRuleItem& item, const DeltaTokens& tokens,
                     const DeltaRuleScratch& w, std::int64_t begin, std::int64_t n) {
  std::int64_t groups = 0;
  for (std::int64_t t = 0; t < n; ++t) {
    float *const kd = w.kd + t * w.d, *const ku = w.ku + t * w.d, *const decay = w.decay + t * w.d;
    tokens.prefetch_ahead_of(begin + t);
    w.v_row[t] = tokens.v(begin + t, item.begin, item.end, w.v + t * w.columns);
    tokens.decay(begin + t, decay);
    float* const z_factor = w.z_factor + t * w.d;
    const bool opens_window = next_e(w.e, decay, w.d, begin + t == 0, w.next_e, z_factor);
    if (opens_window || groups == 0 || w.group[groups - 1].count == 2)
      w.group[groups++] = {t, 0, opens_window, opens_window && !multiply_by_decay(w, decay, z_factor), {}};
    TokenGroup& group = w.group[groups - 1];
    group.beta[group.count++] = tokens.beta(begin + t);
    const bool is_second = group.count == 2;

    const float *const k = tokens.k(begin + t, w.row), *const ku_0 = w.ku + group.token * w.d;
    const vec factor(tokens.factor(k));
    vec* dots = w.dots + t * (1 + 2 * w.reads);
    vec k_dot(0.f);
    for (std::int64_t c = 0; c < w.d; c += kLanes) {
      const vec e = load(w.next_e + c), x = load_any(k + c) * factor, x_e = x * e;
      store(w.e + c, e);
      store(kd + c, x_e);
      store(ku + c, x * inverse_of(e));
      if (is_second) k_dot = fma(x_e, load(ku_0 + c), k_dot);
    }
    *dots++ = k_dot;
    for (std::int64_t r = 0; r < w.reads; ++r) {
      const float* const q = tokens.q(begin + t, r, w.row);
      float* const qd = w.qd + (t * w.reads + r) * w.d;
      const vec scale(p.scale * tokens.factor(q));
      vec first(0.f), own(0.f);
      for (std::int64_t c = 0; c < w.d; c += kLanes) {
        const vec x = load_any(q + c) * (load(w.e + c) * scale);
        store(qd + c, x);
        own = fma(x, load(ku + c), own);
        if (is_second) first = fma(x, load(ku_0 + c), first);
      }
      *dots++ = first, *dots++ = own;
    }
  }
  for (std::int64_t i = 0; i < n * (1 + 2 * w.reads); i += kLanes) {
    vec part[kLanes];
    for (int j = 0; j < kLanes; ++j) part[j] = w.dots[i + j];
    store(w.products + i, sums(part));
  }
  return groups;
}

// A block of kVecs vectors of columns of Z, and the updates by a block of tokens.
template <int kVecs, bool kDelta>
class ColumnBlock {
 public:
  ColumnBlock(const DeltaRuleScratch& w, float* z, std::int64_t d, std::int64_t column)
      : w_(w), z_(z), d_(d), column_(column) {}

  void run(std::int64_t groups) {
    sweep_to<0>(w_.group[0], w_.group[0]);
    for (std::int64_t g = 0; g < groups; ++g) {
      const TokenGroup& now = w_.group[g];
      solve(now);
      if (g + 1 == groups) now.count == 2 ? sweep<2, 0, false>(now, now) : sweep<1, 0, false>(now, now);
      else now.count == 2 ? sweep_to<2>(now, w_.group[g + 1]) : sweep_to<1>(now, w_.group[g + 1]);
    }
  }

 private:
  static constexpr std::int64_t kColumns = kVecs * kLanes;
  using TokenColumns = float[2][kColumns];

  const float* rows(const float* of, const TokenGroup& group, int i) const { return of + (group.token + i) * w_.d; }
  const float* queries(const TokenGroup& group, int i, std::int64_t r) const {
    return w_.qd + ((group.token + i) * w_.reads + r) * w_.d;
  }

  static void multiply(vec (&row)[kVecs], float factor) {
#pragma GCC unroll 4
    for (int v = 0; v < kVecs; ++v) row[v] = row[v] * vec(factor);
  }

  // One pass over Z: adds the writes of kWrites tokens, opens a window if kOpens, and computes predictions and reads
  // of kReads tokens.
  template <int kWrites, int kReads, bool kOpens, bool kPredicts = kDelta>
  [[gnu::noinline]] void sweep(const TokenGroup& writes, const TokenGroup& reads, std::int64_t query = 0) {
    const float *const z_factor = rows(w_.z_factor, reads, 0), *const decay = rows(w_.decay, reads, 0);
    const float *ku[2], *kd[2], *qd[2];
    for (int i = 0; i < 2; ++i)
      ku[i] = rows(w_.ku, writes, i), kd[i] = rows(w_.kd, reads, i), qd[i] = queries(reads, i, query);
    vec u[2][kVecs], x[2][kVecs], y[2][kVecs];
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i)
#pragma GCC unroll 4
      for (int v = 0; v < kVecs; ++v) {
        if (i < kWrites) u[i][v] = load(u_[i] + v * kLanes);
        x[i][v] = y[i][v] = vec(0.f);
      }
    float* z = z_;
    for (std::int64_t c = 0; c < d_; ++c, z += kColumns) {
      vec row[kVecs];
#pragma GCC unroll 4
      for (int v = 0; v < kVecs; ++v) row[v] = load(z + v * kLanes);
#pragma GCC unroll 2
      for (int i = 0; i < kWrites; ++i) {
        const vec weight(ku[i][c]);
#pragma GCC unroll 4
        for (int v = 0; v < kVecs; ++v) row[v] = fma(weight, u[i][v], row[v]);
      }
      if (kOpens) multiply(row, z_factor[c]);
      if (kOpens && reads.has_two_factors) multiply(row, decay[c]);
      if (kWrites > 0 || kOpens)
#pragma GCC unroll 4
        for (int v = 0; v < kVecs; ++v) store(z + v * kLanes, row[v]);
#pragma GCC unroll 2
      for (int i = 0; i < kReads; ++i) {
        const vec key(kd[i][c]), query_of(qd[i][c]);
#pragma GCC unroll 4
        for (int v = 0; v < kVecs; ++v) {
          if (kPredicts) x[i][v] = fma(key, row[v], x[i][v]);
          y[i][v] = fma(query_of, row[v], y[i][v]);
        }
      }
    }
#pragma GCC unroll 2
    for (int i = 0; i < kReads; ++i)
#pragma GCC unroll 4
      for (int v = 0; v < kVecs; ++v) {
        if (kPredicts) store(x_[i] + v * kLanes, x[i][v]);
        store(y_[i] + v * kLanes, y[i][v]);
      }
  }

  template <int kWrites>
  void sweep_to(const TokenGroup& writes, const TokenGroup& reads) {
    if (reads.opens_window)
      reads.count == 2 ? sweep<kWrites, 2, true>(writes, reads) : sweep<kWrites, 1, true>(writes, reads);
    else reads.count == 2 ? sweep<kWrites, 2, false>(writes, reads) : sweep<kWrites, 1, false>(writes, reads);
  }

  // Solves the group's triangle: u, which the tokens write, and their outputs.
  void solve(const TokenGroup& group) {
    const bool two = group.count == 2;
    const float* const products = w_.products + group.token * (1 + 2 * w_.reads);
    const float* const products_1 = products + (1 + 2 * w_.reads);
    for (std::int64_t c = 0; c < kColumns; c += kLanes) {
      const auto written = [&](int i) {
        const vec v = load_any(w_.v_row[group.token + i] + column_ + c);
        return kDelta ? v - load(x_[i] + c) : v;
      };
      const vec u0 = kDelta ? vec(group.beta[0]) * written(0) : written(0);
      store(u_[0] + c, u0);
      if (two) store(u_[1] + c, kDelta ? vec(group.beta[1]) * (written(1) - vec(products_1[0]) * u0) : written(1));
    }
    for (std::int64_t r = 0; r < w_.reads; ++r) {
      if (r > 0) two ? sweep<0, 2, false, false>(group, group, r) : sweep<0, 1, false, false>(group, group, r);
      float *const out = w_.out + (group.token * w_.reads + r) * w_.columns + column_, *const out_1 =
                                                                                           out + w_.reads * w_.columns;
      for (std::int64_t c = 0; c < kColumns; c += kLanes) {
        const vec u0 = load(u_[0] + c);
        store(out + c, fma(vec(products[2 + 2 * r]), u0, load(y_[0] + c)));
        if (!two) continue;
        const vec of_first = fma(vec(products_1[1 + 2 * r]), u0, load(y_[1] + c));
        store(out_1 + c, fma(vec(products_1[2 + 2 * r]), load(u_[1] + c), of_first));
      }
    }
  }

  const DeltaRuleScratch& w_;
  float* const z_;
  const std::int64_t d_, column_;
  alignas(64) TokenColumns u_, x_, y_;
};

// Calls f(integral_constant<int, vectors>, first column) for column blocks that cover so many columns.
template <class F>
void with_column_blocks(std::int64_t columns, F f) {
  std::int64_t c = 0;
  for (; columns - c >= kVecsOfBlock * kLanes; c += kVecsOfBlock * kLanes)
    f(std::integral_constant<int, kVecsOfBlock>(), c);
  if (kVecsOfBlock > 2 && columns - c >= 2 * kLanes) f(std::integral_constant<int, 2>(), c), c += 2 * kLanes;
  if (columns > c) f(std::integral_constant<int, 1>(), c);
}

class DeltaRuleRunner {
 public:
  DeltaRuleRunner(const DeltaRuleParams& p, const DeltaRuleItem& item, std::byte* scratch)
      : p_(p),
        item_(item),
        allocator_(scratch),
        w_(allocator_, {p.d, item.end - item.begin, p.reads}),
        tokens_(p, item.b, item.h) {}

  void run() {
    with_state_type(p_.initial.type, [&](auto element) { load_z<decltype(element)>(initial_slot(p_, item_.b)); });
    const std::int64_t count = tokens_.count(), step = p_.steps > 0 ? 1 : kBlock;
    for (std::int64_t t = 0; t < count; t += step) {
      const std::int64_t n = min(step, count - t), groups = prepare(p_, item_, tokens_, w_, t, n);
      with_column_blocks(w_.columns, [&](auto vectors, std::int64_t column) {
        float* const z = w_.z + column * p_.d;
        if (p_.has_delta) ColumnBlock<decltype(vectors)::value, true>(w_, z, p_.d, column).run(groups);
        else ColumnBlock<decltype(vectors)::value, false>(w_, z, p_.d, column).run(groups);
      });
      for (std::int64_t i = 0; i < n; ++i)
        for (std::int64_t r = 0; r < p_.reads; ++r)
          tokens_.write_out(t + i, r, item_.begin, item_.end, w_.out + (i * p_.reads + r) * w_.columns);
      if (p_.steps > 0) save(slot_of(p_, item_.b, t));
    }
    if (p_.steps == 0) save(slot_of(p_, item_.b, 0));
  }

 private:
  // Calls f(integral_constant<int, vectors>, row of the state, column of the work item, its address in Z) for each row
  // of each column block, row by row: the order of states in memory.
  template <class F>
  void for_each_row(F f) const {
    for (std::int64_t i = 0; i < p_.d; ++i)
      with_column_blocks(
          w_.columns, [&](auto vectors, std::int64_t column) __attribute__((always_inline)) {
            f(vectors, i, column, w_.z + column * p_.d + i * decltype(vectors)::value * kLanes);
          });
  }
  // Calls f(first row, column, its address in Z, stride of rows) for squares of kLanes rows and columns.
  template <class F>
  void for_each_square(F f) const {
    with_column_blocks(w_.columns, [&](auto vectors, std::int64_t column) {
      constexpr std::int64_t kColumns = decltype(vectors)::value * kLanes;
      for (std::int64_t c = 0; c < kColumns; c += kLanes)
        for (std::int64_t i = 0; i < p_.d; i += kLanes)
          f(i, column + c, w_.z + column * p_.d + i * kColumns + c, kColumns);
    });
  }
  std::int64_t columns_at(std::int64_t column) const { return min(kLanes, item_.end - item_.begin - column); }
  // Whether a row of a column block is contiguous in the state.
  bool is_row(const StateRows& s, std::int64_t column, std::int64_t n) const {
    return s.dv_stride == 1 && item_.end - item_.begin - column >= n;
  }

  template <class T>
  void load_z(std::int64_t slot) const {
    fill(w_.e, w_.d, 1);
    const StateRows s = p_.initial;
    constexpr std::int64_t kAheadOfIt = kAhead / static_cast<std::int64_t>(sizeof(T));
    const T* const from = s && slot >= 0 ? state_at<T>(s, slot, item_.h) + item_.begin * s.dv_stride : nullptr;
    const auto load_row = [&](auto vectors, std::int64_t i, std::int64_t column, float* z)
        __attribute__((always_inline)) {
      constexpr std::int64_t kColumns = decltype(vectors)::value * kLanes;
      const T* const at = from ? from + i * s.d_stride + column * s.dv_stride : nullptr;
      if (from && is_row(s, column, kColumns)) {
        for (std::int64_t c = 0; c < kColumns; c += kLanes) {
          __builtin_prefetch(at + kAheadOfIt + c);
          store(z + c, load_any(at + c));
        }
        return;
      }
      for (std::int64_t c = 0; c < kColumns; c += kLanes)
        store(z + c, from ? load_strided(at + c * s.dv_stride, s.dv_stride, columns_at(column + c)) : vec(0.f));
    };
    if (!from || s.dv_stride == 1 || s.d_stride != 1) return for_each_row(load_row);
    for_each_square([&](std::int64_t i, std::int64_t c, float* z, std::int64_t step) {
      const std::int64_t rows = min(kLanes, p_.d - i), columns = columns_at(c);
      vec x[kLanes];
      for (std::int64_t j = 0; j < kLanes; ++j) {
        const T* const at = from + i + min(c + j, c + columns - 1) * s.dv_stride;
        __builtin_prefetch(at + kAheadOfIt);
        x[j] = load_strided(at, 1, rows);
      }
      transpose(x);
      for (std::int64_t j = 0; j < rows; ++j) store(z + j * step, x[j]);
    });
  }
  void save(std::int64_t slot) const {
    if (!p_.final || slot < 0) return;
    with_state_type(p_.final.type, [&](auto element) { save_as<decltype(element)>(slot); });
  }
  template <class T>
  void save_as(std::int64_t slot) const {
    const StateRows s = p_.final;
    T* const to = state_at<T>(s, slot, item_.h) + item_.begin * s.dv_stride;
    const auto save_row = [&](auto vectors, std::int64_t i, std::int64_t column, const float* z)
        __attribute__((always_inline)) {
      constexpr std::int64_t kColumns = decltype(vectors)::value * kLanes;
      T* const at = to + i * s.d_stride + column * s.dv_stride;
      const vec e(w_.e[i]);
      if (is_row(s, column, kColumns)) {
        for (std::int64_t c = 0; c < kColumns; c += kLanes) store_any(at + c, load(z + c) * e);
        return;
      }
      for (std::int64_t c = 0; c < kColumns; c += kLanes)
        store_strided(at + c * s.dv_stride, s.dv_stride, columns_at(column + c), load(z + c) * e);
    };
    if (s.dv_stride == 1 || s.d_stride != 1) return for_each_row(save_row);
    for_each_square([&](std::int64_t i, std::int64_t c, const float* z, std::int64_t step) {
      const std::int64_t rows = min(kLanes, p_.d - i), columns = columns_at(c);
      vec x[kLanes];
      for (std::int64_t j = 0; j < kLanes; ++j) x[j] = load(z + min(j, rows - 1) * step);
      transpose(x);
      const vec e = load(w_.e + i);
      for (std::int64_t j = 0; j < columns; ++j) store_strided(to + i + (c + j) * s.dv_stride, 1, rows, x[j] * e);
    });
  }

  const DeltaRuleParams& p_;
  const DeltaRuleItem& item_;
  BumpAllocator allocator_;
  const DeltaRuleScratch w_;
  const DeltaTokens tokens_;
};

void run(const DeltaRuleParams& p, const DeltaRuleItem& item, std::byte* scratch) noexcept {
  const FlushDenormals flush;
  DeltaRuleRunner(p, item, scratch).run();
}

}  // namespace

const DeltaRuleKernel kDeltaRule = {.facts = {.operation = Operation::delta_rule,
                                              .phase = Phase::all,
                                              .arithmetic = "f32",
                                              .dtypes = kFloatTypes,
                                              .max_head_dim = 256,
                                              .max_value_head_dim = 256},
                                    .columns = kVecsOfBlock * kLanes,
                                    .scratch_bytes = bytes_of<DeltaRuleScratch>,
                                    .run = run};

}  // namespace rapt::cpu::RAPT_ISA
