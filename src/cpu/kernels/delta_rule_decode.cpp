// delta_rule_decode: one token of a sequence, bound by reading and writing the state. The prediction and the reads
// both use the state before the write, so the state is read from memory once, and again from L1 or L2 for the write.
// With a the decay:
//
//   S = a S,  x = S^T k,  y = scale S^T q,  u = beta (v - x),  out = y + scale (q . k) u,  S = S + k u^T
//
// Sums have delta_rule's order, and the powers of 2 there round nothing, so the first token of a longer sequence has
// the same bits. The innermost dimension of a state may be its values or its keys.
#include "cpu/kernels/delta_rule_table.hpp"
#include "cpu/tile/bump_allocator.hpp"
#include "cpu/tile/decode_mma.hpp"
#include "cpu/tile/delta_rule.hpp"

namespace rapt::cpu::RAPT_ISA {
namespace {

constexpr int kColumnVecs = 2;  // vectors of columns at a time, where keys are innermost
constexpr std::int64_t kColumns = kColumnVecs * kLanes;

struct DeltaRuleDecodeScratch {
  float *decay, *k, *row;   // [d]
  float* q;                 // [reads][d], scaled
  float* qk;                // [reads]: q . k
  float *v, *u, *out;       // [columns], out [reads][columns]; u holds x first
  std::int64_t d, columns;  // padded

  DeltaRuleDecodeScratch(BumpAllocator& allocator, const DeltaRuleShape& shape)
      : d(round_up(shape.d, kLanes)), columns(round_up(shape.columns, kColumns)) {
    for (float** one : {&decay, &k, &row}) *one = allocator.take<float>(d);
    q = allocator.take<float>(shape.reads * d);
    qk = allocator.take<float>(shape.reads);
    for (float** one : {&v, &u}) *one = allocator.take<float>(columns);
    out = allocator.take<float>(shape.reads * columns);
  }
};

// Runs one work item. From and To are the types of the initial and the final state.
template <class From, class To>
class DeltaRuleDecodeRunner {
 public:
  DeltaRuleDecodeRunner(const DeltaRuleParams& p, const DeltaRuleItem& item, std::byte* scratch)
      : p_(p),
        item_(item),
        n_(item.end - item.begin),
        allocator_(scratch),
        w_(allocator_, {p.d, n_, p.reads}),
        tokens_(p, item.b, item.h) {
    const std::int64_t from = initial_slot(p, item.b), to = slot_of(p, item.b, 0);
    if (p.initial && from >= 0) from_ = state_at<From>(p.initial, from, item.h) + item.begin * p.initial.dv_stride;
    if (p.final && to >= 0) to_ = state_at<To>(p.final, to, item.h) + item.begin * p.final.dv_stride;
    next_ = next();
  }

  void run() {
    if (tokens_.count() == 0) return copy();
    prepare();
    const StateRows &from = p_.initial, &to = p_.final;
    if (from_ && from.d_stride == 1 && from.dv_stride != 1) {
      const bool reads_whole = p_.d % kLanes == 0, writes_whole = reads_whole && to.d_stride == 1;
      for (std::int64_t c = 0; c < n_; c += kColumns) {
        reads_whole ? read_columns<true>(c) : read_columns<false>(c);
        finish_columns(c, min(kColumns, n_ - c));
        if (to_) writes_whole ? write_columns<true>(c) : write_columns<false>(c);
      }
    } else {
      const bool reads_whole = n_ % kLanes == 0 && (!from_ || from.dv_stride == 1),
                 writes_whole = reads_whole && to.dv_stride == 1;
      reads_whole ? read_rows<true>() : read_rows<false>();
      finish_columns(0, n_);
      if (to_) writes_whole ? write_rows<true>() : write_rows<false>();
    }
    for (std::int64_t r = 0; r < p_.reads; ++r)
      tokens_.write_out(0, r, item_.begin, item_.end, w_.out + r * w_.columns);
  }

 private:
  // Copies the state of a sequence without tokens.
  void copy() const {
    const StateRows& s = p_.final;
    const bool in_place = static_cast<const void*>(from_) == to_;
    for (std::int64_t i = 0; to_ && !in_place && i < p_.d; ++i)
      for (std::int64_t c = 0; c < n_; c += kLanes) {
        const vec row = from_ ? state<false>(this->row(i), c) : vec(0.f);
        store_strided(to_ + i * s.d_stride + c * s.dv_stride, s.dv_stride, min(kLanes, n_ - c), row);
      }
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

  // Computes u, which is written to columns [begin, begin + n), and their outputs.
  void finish_columns(std::int64_t begin, std::int64_t n) {
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

  // The initial state of the work item after this one, or null if it does not exist in memory.
  const From* next() const {
    if (item_.end < p_.dv) return from_ ? from_ + n_ * p_.initial.dv_stride : nullptr;
    const bool is_last = item_.h + 1 == p_.h;
    const std::int64_t b = item_.b + (is_last ? 1 : 0), slot = p_.initial && b < p_.b ? initial_slot(p_, b) : -1;
    return slot < 0 ? nullptr : state_at<From>(p_.initial, slot, is_last ? 0 : item_.h + 1);
  }

  // Columns [c, c + kLanes) of a row of the state, padded with zeros.
  template <bool kWhole>
  [[gnu::always_inline]] vec state(const From* row, std::int64_t c) const {
    if (kWhole) return load_any(row + c);
    return load_strided(row + c * p_.initial.dv_stride, p_.initial.dv_stride, min(kLanes, n_ - c));
  }
  const From* row(std::int64_t i) const { return from_ ? from_ + i * p_.initial.d_stride : nullptr; }

  template <bool kWhole>
  [[gnu::noinline]] void read_rows() const {
    const std::int64_t n = n_;
    for (std::int64_t r = 0; r < p_.reads; ++r) {
      float *const x = w_.u, *const y = w_.out + r * w_.columns;
      for (std::int64_t c = 0; c < w_.columns; c += kLanes) store(x + c, vec(0.f)), store(y + c, vec(0.f));
      for (std::int64_t i = 0; from_ && i < p_.d; ++i) {
        const From* const from = row(i);
        const vec decay(w_.decay[i]), key(w_.k[i]), query(w_.q[r * w_.d + i]);
#pragma GCC unroll 4
        for (std::int64_t c = 0; c < n; c += kLanes) {
          const vec decayed = state<kWhole>(from, c) * decay;
          store(x + c, fma(key, decayed, load(x + c))), store(y + c, fma(query, decayed, load(y + c)));
        }
      }
    }
  }
  template <bool kWhole>
  [[gnu::noinline]] void write_rows() const {
    const StateRows& s = p_.final;
    const std::int64_t n = n_;
    const float* const u = w_.u;
    for (std::int64_t i = 0; i < p_.d; ++i) {
      if (kWhole) fetch_while_writing_row(i);
      const From* const from = row(i);
      To* const to = to_ + i * s.d_stride;
      const vec decay(w_.decay[i]), key(w_.k[i]);
#pragma GCC unroll 4
      for (std::int64_t c = 0; c < n; c += kLanes) {
        const vec written = fma(key, load(u + c), from_ ? state<kWhole>(from, c) * decay : vec(0.f));
        if (kWhole) store_any(to + c, written);
        else store_strided(to + c * s.dv_stride, s.dv_stride, min(kLanes, n - c), written);
      }
    }
  }
  // Prefetches, while row i is written, a row's share of the first quarter of the next state, as much as memory can
  // deliver meanwhile. Hardware prefetches the rest as it is read, since rows are adjacent.
  [[gnu::always_inline]] void fetch_while_writing_row(std::int64_t i) const {
    if (next_) fetch(next_ + i / 4 * p_.initial.d_stride + i % 4 * (n_ / 4), n_ / 4);
  }
  // Inline, for GCC drops calls that do nothing but prefetch.
  [[gnu::always_inline]] static void fetch(const From* from, std::int64_t n) {
    const auto* const bytes = reinterpret_cast<const std::byte*>(from);
    for (std::int64_t i = 0; i < n * static_cast<std::int64_t>(sizeof(From)); i += 64) __builtin_prefetch(bytes + i);
  }

  // Elements [i, i + kLanes) of a column of the state, which are contiguous.
  template <bool kWhole>
  [[gnu::always_inline]] vec column_elements(const From* column, std::int64_t i) const {
    return kWhole ? load_any(column + i) : load_strided(column + i, 1, min(kLanes, p_.d - i));
  }
  // Prefetches, while column c is written, the same column of the next column block, or of the next state. Hardware
  // does not detect several columns read at a time as streams.
  [[gnu::always_inline]] void fetch_while_writing_column(std::int64_t c) const {
    c += kColumns;
    const From* const state = c < n_ ? from_ : next_;
    if (state) fetch(state + (c < n_ ? c : c - n_) * p_.initial.dv_stride, p_.d);
  }
  template <bool kWhole>
  [[gnu::noinline]] void read_columns(std::int64_t begin) const {
    const From* column[kColumns];  // past the end, the last column again
    for (std::int64_t c = 0; c < kColumns; ++c) column[c] = from_ + min(begin + c, n_ - 1) * p_.initial.dv_stride;
    for (std::int64_t r = 0; r < p_.reads; ++r) {
      const float* const q = w_.q + r * w_.d;
      vec x[kColumnVecs], y[kColumnVecs];
      for (int v = 0; v < kColumnVecs; ++v) x[v] = y[v] = vec(0.f);
      for (std::int64_t i = 0; i < p_.d; i += kLanes) {
        const vec decay = load(w_.decay + i);
#pragma GCC unroll 2
        for (int v = 0; v < kColumnVecs; ++v) {
          vec rows[kLanes];
#pragma GCC unroll 16
          for (int j = 0; j < kLanes; ++j) rows[j] = column_elements<kWhole>(column[v * kLanes + j], i) * decay;
          transpose(rows);
#pragma GCC unroll 16
          for (int j = 0; j < kLanes; ++j) {  // k and q are 0 past d
            x[v] = fma(vec(w_.k[i + j]), rows[j], x[v]), y[v] = fma(vec(q[i + j]), rows[j], y[v]);
          }
        }
      }
      for (int v = 0; v < kColumnVecs; ++v)
        store(w_.u + begin + v * kLanes, x[v]), store(w_.out + r * w_.columns + begin + v * kLanes, y[v]);
    }
  }
  template <bool kWhole>
  [[gnu::noinline]] void write_columns(std::int64_t begin) const {
    const StateRows& s = p_.final;
    const std::int64_t d = p_.d;
    for (std::int64_t c = begin; c < min(begin + kColumns, n_); ++c) {
      if (kWhole) fetch_while_writing_column(c);
      const From* const from = from_ + c * p_.initial.dv_stride;
      To* const to = to_ + c * s.dv_stride;
      const vec u(w_.u[c]);
#pragma GCC unroll 4
      for (std::int64_t i = 0; i < d; i += kLanes) {
        const vec written = fma(load(w_.k + i), u, column_elements<kWhole>(from, i) * load(w_.decay + i));
        if (kWhole) store_any(to + i, written);
        else store_strided(to + i * s.d_stride, s.d_stride, min(kLanes, d - i), written);
      }
    }
  }

  const DeltaRuleParams& p_;
  const DeltaRuleItem& item_;
  const std::int64_t n_;
  BumpAllocator allocator_;
  const DeltaRuleDecodeScratch w_;
  const DeltaTokens tokens_;
  const From* from_ = nullptr;  // states from the work item's first column on; null: zeros, or not stored
  const From* next_ = nullptr;
  To* to_ = nullptr;
  const float* v_ = nullptr;
  float beta_ = 1;
};

void run(const DeltaRuleParams& p, const DeltaRuleItem& item, std::byte* scratch) noexcept {
  const FlushDenormals flush;
  with_state_type(p.initial.type, [&](auto from) {
    with_state_type(p.final.type,
                    [&](auto to) { DeltaRuleDecodeRunner<decltype(from), decltype(to)>(p, item, scratch).run(); });
  });
}

}  // namespace

const DeltaRuleKernel kDeltaRuleDecode = {.facts = {.operation = Operation::delta_rule,
                                                    .phase = Phase::decode,
                                                    .arithmetic = "f32",
                                                    .dtypes = kFloatTypes,
                                                    .max_head_dim = 256,
                                                    .max_value_head_dim = 256},
                                          .columns = 32,
                                          .max_tokens = 1,
                                          .keeps_steps = false,
                                          .scratch_bytes = bytes_of<DeltaRuleDecodeScratch>,
                                          .run = run};

}  // namespace rapt::cpu::RAPT_ISA
