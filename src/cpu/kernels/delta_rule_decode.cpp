// delta_rule_decode: one token of a sequence, bound by reading and writing the state. Both the prediction and the
// read-outs are of the state before the write, so that it is read once, and written from L1 or L2. With a the decay:
//
//   S = a S,  x = S^T k,  y = scale S^T q,  u = beta (v - x),  out = y + scale (q . k) u,  S = S + k u^T
//
// Sums are taken in delta_rule's order, and its powers of 2 round nothing: the first token of a longer sequence has the
// same bits. A state may lie with its values or with its keys innermost.
#include "cpu/kernels/kernels.hpp"
#include "cpu/tile/carver.hpp"
#include "cpu/tile/decode_mma.hpp"
#include "cpu/tile/delta_rule.hpp"

namespace rapt::cpu::RAPT_ISA {
namespace {

constexpr int kStrip = kRegisters == 32 ? 8 : 4;  // vectors of columns at a time, where values lie innermost
constexpr std::int64_t kAhead = 4096;             // floats that are fetched ahead, on into the next head's state

struct Scratch {
  float *decay, *k, *row;   // [d]: of the token
  float* q;                 // [reads][d], scaled
  float* qk;                // [reads]: q . k
  float *v, *u, *out;       // [columns], out [reads][columns]; u is x first
  std::int64_t d, columns;  // padded

  Scratch(Carver& carver, const DeltaRuleShape& shape)
      : d(round_up(shape.d, kLanes)), columns(round_up(shape.columns, kStrip * kLanes)) {
    for (float** one : {&decay, &k, &row}) *one = carver.take<float>(d);
    q = carver.take<float>(shape.reads * d);
    qk = carver.take<float>(shape.reads);
    for (float** one : {&v, &u}) *one = carver.take<float>(columns);
    out = carver.take<float>(shape.reads * columns);
  }
};

class Item {
 public:
  Item(const DeltaRuleParams& p, const DeltaRuleItem& item, std::byte* scratch)
      : p_(p),
        item_(item),
        n_(item.end - item.begin),
        carver_(scratch),
        w_(carver_, {p.d, n_, p.reads}),
        tokens_(p, item.b, item.h) {
    const std::int64_t from = initial_slot(p, item.b), to = slot_of(p, item.b, 0);
    if (p.initial && from >= 0) from_ = p.initial.at(from, item.h) + item.begin * p.initial.dv_stride;
    if (p.final && to >= 0) to_ = p.final.at(to, item.h) + item.begin * p.final.dv_stride;
  }

  void run() {
    if (tokens_.count() == 0) return copy();
    prepare();
    for (std::int64_t c = 0; c < w_.columns; c += kLanes) store(w_.u + c, vec(0.f));
    for (std::int64_t c = 0; c < p_.reads * w_.columns; c += kLanes) store(w_.out + c, vec(0.f));
    if (from_ && p_.initial.d_stride == 1 && p_.initial.dv_stride != 1) {
      for (std::int64_t c = 0; c < n_; c += kLanes) {
        read_columns(c), join(c, kLanes);
        if (to_) write_columns(c);
      }
    } else {
      for (std::int64_t c = 0; from_ && c < n_; c += kStrip * kLanes) read_strip(c);
      join(0, n_);
      if (to_) write_rows();
    }
    for (std::int64_t r = 0; r < p_.reads; ++r)
      tokens_.write_out(0, r, item_.begin, item_.end, w_.out + r * w_.columns);
  }

 private:
  // The state of a sequence without a token.
  void copy() const {
    for (std::int64_t i = 0; to_ && to_ != from_ && i < p_.d; ++i)
      for (std::int64_t c = 0; c < n_; ++c)
        to_[i * p_.final.d_stride + c * p_.final.dv_stride] =
            from_ ? from_[i * p_.initial.d_stride + c * p_.initial.dv_stride] : 0;
  }

  void prepare() {
    tokens_.decay(0, w_.decay);
    beta_ = tokens_.beta(0);
    v_ = tokens_.v(0, item_.begin, item_.end, w_.v);
    const float* const k = tokens_.k(0, w_.row);
    const vec factor(tokens_.factor(k));
    for (std::int64_t c = 0; c < w_.d; c += kLanes) store(w_.k + c, load_any(k + c) * factor);
    for (std::int64_t r = 0; r < p_.reads; ++r) {
      const float* const q = tokens_.q(0, r, w_.row);
      const vec scale(p_.scale * tokens_.factor(q));
      vec dot(0.f);
      for (std::int64_t c = 0; c < w_.d; c += kLanes) {
        const vec x = load_any(q + c) * scale;
        store(w_.q + r * w_.d + c, x);
        dot = fma(x, load(w_.k + c), dot);
      }
      w_.qk[r] = sum_of(dot);
    }
  }

  // What is written to columns [begin, begin + n), and their outputs.
  void join(std::int64_t begin, std::int64_t n) {
    for (std::int64_t c = begin; c < begin + n; c += kLanes) {
      const vec v = load_strided(v_ + c, 1, min(kLanes, n_ - c));
      const vec u = p_.has_delta ? vec(beta_) * (v - load(w_.u + c)) : v;
      store(w_.u + c, u);
      for (std::int64_t r = 0; r < p_.reads; ++r) {
        float* const out = w_.out + r * w_.columns + c;
        store(out, fma(vec(w_.qk[r]), u, load(out)));
      }
    }
  }

  // Row i of the state, from column c on, filled up with zeros.
  [[gnu::always_inline]] vec state(std::int64_t i, std::int64_t c, bool whole) const {
    const StateRows& s = p_.initial;
    const float* const at = from_ + i * s.d_stride + c * s.dv_stride;
    if (whole) {
      __builtin_prefetch(at + kAhead);
      return load_any(at);
    }
    return c < n_ ? load_strided(at, s.dv_stride, min(kLanes, n_ - c)) : vec(0.f);
  }
  void read_strip(std::int64_t begin) {
    const bool whole = p_.initial.dv_stride == 1 && begin + kStrip * kLanes <= n_;
    for (std::int64_t r = 0; r < p_.reads; ++r) {
      const float* const q = w_.q + r * w_.d;
      vec x[kStrip], y[kStrip];
      for (int j = 0; j < kStrip; ++j) x[j] = y[j] = vec(0.f);
      const auto read = [&](bool in_place) __attribute__((always_inline)) {
        for (std::int64_t i = 0; i < p_.d; ++i) {
          const vec decay(w_.decay[i]), key(w_.k[i]), query(q[i]);
#pragma GCC unroll 8
          for (int j = 0; j < kStrip; ++j) {
            const vec row = state(i, begin + j * kLanes, in_place) * decay;
            x[j] = fma(key, row, x[j]), y[j] = fma(query, row, y[j]);
          }
        }
      };
      whole ? read(true) : read(false);
      for (int j = 0; j < kStrip; ++j) {
        store(w_.u + begin + j * kLanes, x[j]);
        store(w_.out + r * w_.columns + begin + j * kLanes, y[j]);
      }
    }
  }
  void write_rows() const {
    const StateRows& s = p_.final;
    const bool whole = s.dv_stride == 1 && n_ % kLanes == 0 && (!from_ || p_.initial.dv_stride == 1);
    for (std::int64_t i = 0; i < p_.d; ++i) {
      const vec decay(w_.decay[i]), key(w_.k[i]);
      float* const at = to_ + i * s.d_stride;
      for (std::int64_t c = 0; c < n_; c += kLanes) {
        const vec row = from_ ? state(i, c, whole) * decay : vec(0.f);
        const vec written = fma(key, load(w_.u + c), row);
        if (whole) store_any(at + c, written);
        else store_strided(at + c * s.dv_stride, s.dv_stride, min(kLanes, n_ - c), written);
      }
    }
  }

  // Elements [i, i + kLanes) of a column of the state, which lie together.
  [[gnu::always_inline]] vec part(const float* column, std::int64_t i) const {
    return i + kLanes <= p_.d ? load_any(column + i) : load_strided(column + i, 1, p_.d - i);
  }
  const float* column(std::int64_t c) const {
    return from_ + min(c, n_ - 1) * p_.initial.dv_stride;
  }
  void read_columns(std::int64_t begin) {
    for (std::int64_t r = 0; r < p_.reads; ++r) {
      const float* const q = w_.q + r * w_.d;
      vec x(0.f), y(0.f);
      for (std::int64_t i = 0; i < p_.d; i += kLanes) {
        vec rows[kLanes];
        for (int j = 0; j < kLanes; ++j) {
          const float* const at = column(begin + j);
          if (r == 0) __builtin_prefetch(at + i + kAhead);
          rows[j] = part(at, i) * load(w_.decay + i);
        }
        transpose(rows);
        for (int j = 0; j < kLanes; ++j) {  // k and q are 0 past d
          x = fma(vec(w_.k[i + j]), rows[j], x), y = fma(vec(q[i + j]), rows[j], y);
        }
      }
      store(w_.u + begin, x), store(w_.out + r * w_.columns + begin, y);
    }
  }
  void write_columns(std::int64_t begin) const {
    const StateRows& s = p_.final;
    for (std::int64_t i = 0; i < p_.d; i += kLanes) {
      const vec decay = load(w_.decay + i), key = load(w_.k + i);
      for (std::int64_t c = begin; c < min(begin + kLanes, n_); ++c) {
        const vec written = fma(key, vec(w_.u[c]), part(column(c), i) * decay);
        float* const at = to_ + i * s.d_stride + c * s.dv_stride;
        if (s.d_stride == 1 && i + kLanes <= p_.d) store_any(at, written);
        else store_strided(at, s.d_stride, min(kLanes, p_.d - i), written);
      }
    }
  }

  const DeltaRuleParams& p_;
  const DeltaRuleItem& item_;
  const std::int64_t n_;
  Carver carver_;
  const Scratch w_;
  const DeltaTokens tokens_;
  const float* from_ = nullptr;  // states from the item's first column on; null: 0, or not wanted
  float* to_ = nullptr;
  const float* v_ = nullptr;
  float beta_ = 1;
};

void run(const DeltaRuleParams& p, const DeltaRuleItem& item, std::byte* scratch) noexcept {
  const FlushDenormals flush;
  Item(p, item, scratch).run();
}

std::size_t scratch_bytes(const DeltaRuleShape& shape) noexcept {
  Carver carver(nullptr);
  Scratch(carver, shape);
  return carver.used();
}

}  // namespace

const DeltaRuleKernel kDeltaRuleDecode = {.facts = {.operation = Operation::delta_rule,
                                                    .phase = Phase::decode,
                                                    .arithmetic = "f32",
                                                    .dtypes = kFloatTypes,
                                                    .max_head_size = 256,
                                                    .max_value_head_size = 256},
                                          .columns = kStrip * kLanes,
                                          .max_tokens = 1,
                                          .scratch_bytes = scratch_bytes,
                                          .run = run};

}  // namespace rapt::cpu::RAPT_ISA
