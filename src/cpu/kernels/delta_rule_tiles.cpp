// delta_rule of bf16 as matrix products on the matrix unit. As in delta_rule.cpp the kernel keeps Z = S / e, with kd =
// k e, qd = scale q e and ku = k / e, but it processes blocks of tokens, each within one window. For the tokens i of a
// block, from Z before it,
//
//   u_i   = beta_i (v_i - Z^T kd_i - sum_j<i (kd_i . ku_j) u_j)
//   out_i = Z^T qd_i + sum_j<=i (qd_i . ku_j) u_j
//   Z    += sum_i ku_i u_i^T
//
//   for each block, up to kBlock tokens
//     for each 16 tokens, in their order
//       products = [kd; qd] ku^T               with all tokens up to these     A: kd, qd      B: ku^T
//       xy = [kd; qd] Z                                                        A: kd, qd      B: Z as bf16
//       xy += products u                       of the tokens before these      A: products    B: u
//       u and out of these: the triangle that is left, in fp32 vectors
//     Z += ku^T u                              fp32 sums                       A: ku^T        B: u
//
// Operands are rounded to bf16. Z, all sums, and products within the same 16 tokens are fp32. A token reads nothing of
// later tokens: blocks end where windows do, which earlier tokens decide, and rows of a product are independent. For
// the same reason the vector kernel always takes the first kVectorTokens tokens: a short sequence, which is not worth
// a block, gets the bits of a long one. Strong decays end windows after a few tokens: after a block of fewer than 16
// tokens the vector kernel takes the next 64, and twice as many, up to 1024, after each further such block.
//
// A pair along the depth of a product is elements i and i + 16 of 32, so that two vectors merge without a shuffle.
#include "cpu/kernels/delta_rule_table.hpp"
#include "cpu/kernels/vector_kernels.hpp"
#include "cpu/tile/bf16_mma.hpp"
#include "cpu/tile/bump_allocator.hpp"
#include "cpu/tile/delta_rule.hpp"

namespace rapt::cpu::RAPT_ISA {
namespace {

constexpr std::int64_t kBlock = 64, kTokensOfTile = kTileRows;
constexpr std::int64_t kBlockTiles = kBlock / kTokensOfTile, kBlockDepth = kBlock / kTileDepth;
constexpr std::int64_t kVectorTokens = 16, kMaxVectorRun = 1024;
constexpr std::int64_t kChunkFloats = kChunk * kChunk;

const DeltaRuleKernel& vector_kernel() {
  return *vector_kernels().delta_rule.prefill;
}

struct DeltaRuleTilesScratch {
  std::int64_t d, columns;  // padded to whole chunks
  std::int64_t reads;
  std::int64_t row_chunks;  // chunks for 16 tokens: tiles of kd, then of each query's qd, two tiles a chunk

  float* state;   // [d][columns]: the state, exchanged with the vector kernel
  float* z;       // [columns / 32][d / 32] chunks
  char* z_tiles;  // [columns / 32][d / 32][2] tiles, columns in the lanes
  // Of a block.
  char* left;         // [kBlockTiles][row_chunks][2][16][d]: kd and qd
  float* ku;          // [kBlock][d]
  char *ku_t, *ku_a;  // tiles of ku^T: B, [kBlockTiles][d / 32]; A, [d / 16][kBlockDepth]
  char* u_tiles;      // [kBlockDepth][columns / 16] tiles
  float* beta;        // [kBlock]
  // Of 16 tokens.
  float* products;  // [row_chunks][kBlockDepth] chunks
  char* weights;    // [row_chunks][2][kBlockDepth] tiles: products with tokens before these
  float* xy;        // [row_chunks][columns / 32] chunks
  float *v, *out;   // v: [16][columns], if not read in place; out: [16][reads][columns]
  float* u[2];      // [16][columns] of even and of odd tiles
  float *e, *next_e, *decay, *z_factor, *first_decay, *first_z_factor, *row, *scaled;  // [d]
  float *zero, *discarded;                                                             // [columns]; a chunk
  std::int32_t *of_row, *of_tile, *of_pair, *of_u;                                     // offsets of steps
  std::byte* vectors;                                                                  // scratch of the vector kernel

  DeltaRuleTilesScratch(BumpAllocator& allocator, const DeltaRuleShape& shape)
      : d(round_up(shape.d, kChunk)),
        columns(round_up(shape.columns, kChunk)),
        reads(shape.reads),
        row_chunks((shape.reads + 2) / 2) {
    for (float** whole : {&state, &z}) *whole = allocator.take<float>(d * columns);
    z_tiles = allocator.take<char>(d * columns * 2);
    left = allocator.take<char>(kBlockTiles * row_chunks * kChunk * d * 2);
    ku = allocator.take<float>(kBlock * d);
    for (char** tiles : {&ku_t, &ku_a}) *tiles = allocator.take<char>(kBlock * d * 2);
    u_tiles = allocator.take<char>(kBlock * columns * 2);
    beta = allocator.take<float>(kBlock);
    products = allocator.take<float>(row_chunks * kBlockDepth * kChunkFloats);
    weights = allocator.take<char>(row_chunks * 2 * kBlockDepth * kTileBytes);
    xy = allocator.take<float>(row_chunks * kChunk * columns);
    v = allocator.take<float>(kTokensOfTile * columns);
    out = allocator.take<float>(kTokensOfTile * reads * columns);
    for (float*& rows : u) rows = allocator.take<float>(kTokensOfTile * columns);
    for (float** one : {&e, &next_e, &decay, &z_factor, &first_decay, &first_z_factor, &row, &scaled})
      *one = allocator.take<float>(d);
    zero = allocator.take<float>(columns), discarded = allocator.take<float>(kChunkFloats);
    const std::int64_t steps = max(d / kTileDepth, kBlockDepth);
    for (std::int32_t** offsets : {&of_row, &of_tile, &of_pair, &of_u}) *offsets = allocator.take<std::int32_t>(steps);
    vectors = allocator.take<std::byte>(static_cast<std::int64_t>(vector_kernel().scratch_bytes(shape)));
  }

  void fill_offsets() const {
    for (std::int64_t i = 0; i < max(d / kTileDepth, kBlockDepth); ++i) {
      of_row[i] = static_cast<std::int32_t>(i * 2 * kTileDepth);
      of_tile[i] = static_cast<std::int32_t>(i * kTileBytes);
      of_pair[i] = static_cast<std::int32_t>(i * 2 * kTileBytes);
      of_u[i] = static_cast<std::int32_t>(i * columns / kTileRows * kTileBytes);
    }
  }
  // A token's row of `left`: part 0 is kd, 1 + r is qd of query r.
  char* left_row(std::int64_t token, std::int64_t part) const {
    const std::int64_t tile = token / kTokensOfTile * row_chunks * 2 + part;
    return left + (tile * kTokensOfTile + token % kTokensOfTile) * d * 2;
  }
  // The offset of a part's tile in chunks [row_chunks][...]; `stride` is in floats from one chunk of rows to the next.
  static std::int64_t row_of(std::int64_t part, std::int64_t stride) {
    return part / 2 * stride + part % 2 * kTileRows * kChunk;
  }
};

// Stores a row of n floats as pairs of bf16.
void store_pairs(const float* row, std::int64_t n, char* to) {
  for (std::int64_t c = 0; c < n; c += kChunk)
    for (std::int64_t i = 0; i < kTileRows; i += kLanes)
      store(reinterpret_cast<float*>(to) + c / 2 + i,
            round_to_bf16_pairs(load(row + c + i), load(row + c + kTileRows + i)));
}
// Transposes 16 rows of 16 pairs; at(i, c) gives pairs of row i.
template <class At>
[[gnu::always_inline]] inline void transpose_pairs(At at, char* tile) {
  for (std::int64_t r = 0; r < kTileRows; r += kLanes)
    for (std::int64_t c = 0; c < kTileRows; c += kLanes) {
      vec x[kLanes];
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) x[i] = at(r + i, c);
      transpose(x);
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) store(reinterpret_cast<float*>(tile) + (c + i) * kTileRows + r, x[i]);
    }
}

class DeltaRuleTilesRunner {
 public:
  DeltaRuleTilesRunner(const DeltaRuleParams& p, const DeltaRuleItem& item, std::byte* scratch)
      : p_(p),
        item_(item),
        allocator_(scratch),
        w_(allocator_, {p.d, item.end - item.begin, p.reads}),
        tokens_(p, item.b, item.h) {}

  void run() {
    w_.fill_offsets();
    fill(w_.scaled, w_.d, 0);
    fill(w_.ku, kBlock * w_.d, 0);
    fill(w_.zero, w_.columns, 0);
    for (float* const rows : w_.u) fill(rows, kTokensOfTile * w_.columns, 0);
    run_vectors(0, kVectorTokens, initial());
    const std::int64_t count = tokens_.count();
    std::int64_t vector_run = kBlock;
    for (std::int64_t t = kVectorTokens; t < count;) {
      const std::int64_t n = run_block(t);
      t += n;
      if (n >= kTokensOfTile) vector_run = kBlock;
      else if (t < count) {
        const std::int64_t m = min(vector_run, count - t);
        state_from_z();
        run_vectors(t, m, scratch_state());
        t += m, vector_run = min(2 * vector_run, kMaxVectorRun);
      }
    }
    if (p_.final) end();
  }

 private:
  StateRows scratch_state() const { return {w_.state - item_.begin, DType::f32, 0, 0, w_.columns, 1}; }

  StateRows initial() const {
    const std::int64_t slot = initial_slot(p_, item_.b);
    StateRows state = slot < 0 ? StateRows() : p_.initial;
    if (state)
      with_state_type(state.type, [&](auto element) { state.data = state_at<decltype(element)>(state, slot, 0); });
    state.slot_stride = 0;
    return state;
  }
  // Runs n tokens by the vector kernel, from the state `from`, and computes Z from the state that they leave.
  void run_vectors(std::int64_t first, std::int64_t n, const StateRows& from) {
    DeltaRuleParams p = p_;
    for (TokenRows* const rows : {&p.q, &p.k, &p.v, &p.g, &p.beta, &p.out})
      if (*rows) rows->data = HeadRows(*rows, 0, first, 0).first;
    p.t = n, p.initial = from, p.final = scratch_state(), p.slots = p.accepted = {};
    vector_kernel().run(p, item_, w_.vectors);
    const std::int64_t columns = item_.end - item_.begin;
    for (std::int64_t c = 0; c < w_.columns; c += kChunk)
      for (std::int64_t i = 0; i < w_.d; ++i)
        for (std::int64_t j = c; j < c + kChunk; j += kLanes)
          store(z_row(c, i) + j - c,
                i < p_.d && j < columns ? load(w_.state + i * w_.columns + j) * vec(1 / kWindowStart) : vec(0.f));
    fill(w_.e, w_.d, kWindowStart);
  }
  void state_from_z() const {
    for (std::int64_t c = 0; c < w_.columns; c += kChunk)
      for (std::int64_t i = 0; i < p_.d; ++i)
        for (std::int64_t j = c; j < c + kChunk; j += kLanes)
          store(w_.state + i * w_.columns + j, load(z_row(c, i) + j - c) * vec(w_.e[i]));
  }
  void end() const {
    state_from_z();
    DeltaRuleParams p = p_;
    p.t = 0, p.initial = scratch_state(), p.accepted = {};
    vector_kernel().run(p, item_, w_.vectors);
  }
  // Processes the tokens from `first` on that share a window, at most kBlock, and returns how many.
  std::int64_t run_block(std::int64_t first) {
    const std::int64_t n = prepare(first);
    transpose_ku(n);
    make_z_tiles();
    for (std::int64_t t = 0; t < n; t += kTokensOfTile) {
      multiply_rows(t / kTokensOfTile);
      finish(first + t, t / kTokensOfTile, min(n - t, kTokensOfTile));
    }
    add_to_z((n + kTileDepth - 1) / kTileDepth);
    return n;
  }
  float* z_row(std::int64_t column, std::int64_t i) const { return w_.z + (column / kChunk * w_.d + i) * kChunk; }

  // Computes kd, qd, ku and beta of a block, and returns its number of tokens.
  std::int64_t prepare(std::int64_t first) {
    const std::int64_t d = round_up(p_.d, kLanes);
    std::int64_t n = 0;
    for (; n < kBlock && first + n < tokens_.count(); ++n) {
      float* const decay = n == 0 ? w_.first_decay : w_.decay;
      float* const z_factor = n == 0 ? w_.first_z_factor : w_.z_factor;
      tokens_.prefetch_ahead_of(first + n);
      tokens_.decay(first + n, decay);
      const bool opens_window = next_e(w_.e, decay, d, false, w_.next_e, z_factor);
      if (n == 0) opens_window_ = opens_window;
      else if (opens_window) break;
      const float* const k = tokens_.k(first + n, w_.row);
      const vec factor(tokens_.factor(k));
      float* const ku = w_.ku + n * w_.d;
      for (std::int64_t c = 0; c < d; c += kLanes) {
        const vec e = load(w_.next_e + c), x = load_any(k + c) * factor;
        store(w_.e + c, e);
        store(w_.scaled + c, x * e), store(ku + c, x * inverse_of(e));
      }
      store_pairs(w_.scaled, w_.d, w_.left_row(n, 0));
      for (std::int64_t r = 0; r < p_.reads; ++r) {
        const float* const q = tokens_.q(first + n, r, w_.row);
        const vec scale(p_.scale * tokens_.factor(q));
        for (std::int64_t c = 0; c < d; c += kLanes) store(w_.scaled + c, load_any(q + c) * (load(w_.e + c) * scale));
        store_pairs(w_.scaled, w_.d, w_.left_row(n, 1 + r));
      }
      w_.beta[n] = tokens_.beta(first + n);
    }
    fill(w_.ku + n * w_.d, (round_up(n, kTileDepth) - n) * w_.d, 0);  // clears padding: old numbers could be NaN
    return n;
  }
  void transpose_ku(std::int64_t n) const {
    for (std::int64_t t = 0; t < n; t += kTokensOfTile)
      for (std::int64_t c = 0; c < w_.d; c += kTileDepth)
        transpose_pairs(
            [&](std::int64_t token, std::int64_t pair) __attribute__((always_inline)) {
              const float* const at = w_.ku + (t + token) * w_.d + c + pair;
              return round_to_bf16_pairs(load(at), load(at + kTileRows));
            },
            w_.ku_t + (t / kTokensOfTile * w_.d + c) / kTileDepth * kTileBytes);
    for (std::int64_t t = 0; t < n; t += kTileDepth)
      for (std::int64_t c = 0; c < w_.d; c += kTileRows)
        transpose_pairs(
            [&](std::int64_t token, std::int64_t channel) __attribute__((always_inline)) {
              const float* const at = w_.ku + (t + token) * w_.d + c + channel;
              return round_to_bf16_pairs(load(at), load(at + kTokensOfTile * w_.d));
            },
            w_.ku_a + (c / kTileRows * kBlockDepth + t / kTileDepth) * kTileBytes);
  }
  // Rounds Z to tiles of bf16 for the block's products, after rescaling Z if the block begins a window.
  void make_z_tiles() const {
    for (std::int64_t column = 0; column < w_.columns; column += kChunk)
      for (std::int64_t c = 0; c < w_.d; c += kChunk) {
        float* const tile = reinterpret_cast<float*>(w_.z_tiles) + (column * w_.d + c * kChunk) / 2;
        for (std::int64_t i = 0; i < kTileRows; ++i)
          for (std::int64_t j = 0; j < kChunk; j += kLanes) {
            vec x[2];
            for (int half = 0; half < 2; ++half) {
              const std::int64_t channel = c + half * kTileRows + i;
              float* const z = z_row(column, channel) + j;
              x[half] = load(z);
              if (!opens_window_ || channel >= p_.d) continue;
              x[half] = x[half] * vec(w_.first_z_factor[channel]) * vec(w_.first_decay[channel]);
              store(z, x[half]);
            }
            store(tile + j / kTileRows * (kTileBytes / 4) + i * kTileRows + j % kTileRows,
                  round_to_bf16_pairs(x[0], x[1]));
          }
      }
  }

  template <bool kGoesOn = false>
  void multiply(const TileOperand& a, const TileOperand& b, std::int64_t steps, float* start, float* c) {
    multiply_chunk<false, kGoesOn>(tiles_, a, b, steps, start, c, pending_, [] {});
  }
  // Computes products and xy of 16 tokens.
  void multiply_rows(std::int64_t tile) {
    const std::int64_t depth = w_.d / kTileDepth, before = (tile + 1) / 2, row_bytes = w_.d * 2;
    const auto rows = [&](std::int64_t r) -> TileOperand {
      return {w_.left_row(tile * kTokensOfTile, 2 * r), w_.of_row, row_bytes, kTokensOfTile * row_bytes};
    };
    for (std::int64_t r = 0; r < w_.row_chunks; ++r)
      for (std::int64_t i = 0; i <= tile / 2; ++i)
        multiply(rows(r), {w_.ku_t + i * 2 * depth * kTileBytes, w_.of_tile, 64, depth * kTileBytes}, depth, nullptr,
                 w_.products + (r * kBlockDepth + i) * kChunkFloats);
    store_pending(tiles_, pending_, w_.discarded);
    for (std::int64_t r = 0; r < w_.row_chunks; ++r) {
      char* const weights = w_.weights + r * 2 * kBlockDepth * kTileBytes;
      for (std::int64_t part = 0; part < 2; ++part)
        for (std::int64_t i = 0; i < before; ++i) make_weights(r, part, i, 2 * i + 1 < tile);
      for (std::int64_t c = 0; c < w_.columns; c += kChunk) {
        multiply(rows(r), {w_.z_tiles + c * row_bytes, w_.of_pair, 64, kTileBytes}, depth, nullptr, xy_at(r, c));
        multiply<true>({weights, w_.of_tile, 64, kBlockDepth * kTileBytes},
                       {w_.u_tiles + c / kTileRows * kTileBytes, w_.of_u, 64, kTileBytes}, before, nullptr,
                       xy_at(r, c));
      }
    }
    store_pending(tiles_, pending_, w_.discarded);
  }
  float* xy_at(std::int64_t row_chunk, std::int64_t column) const {
    return w_.xy + (row_chunk * w_.columns + column) * kChunk;
  }
  // Rounds a tile of the products with tokens [32 i, 32 i + 32) to bf16; only the first 16 of them unless `both`.
  void make_weights(std::int64_t row_chunk, std::int64_t part, std::int64_t i, bool both) const {
    const float* const from = w_.products + (row_chunk * kBlockDepth + i) * kChunkFloats + part * kTileRows * kChunk;
    auto* const to = reinterpret_cast<float*>(w_.weights + ((row_chunk * 2 + part) * kBlockDepth + i) * kTileBytes);
    for (std::int64_t row = 0; row < kTileRows; ++row)
      for (std::int64_t j = 0; j < kTileRows; j += kLanes) {
        const float* const at = from + row * kChunk + j;
        store(to + row * kTileRows + j, round_to_bf16_pairs(load(at), both ? load(at + kTileRows) : vec(0.f)));
      }
  }

  // Solves the triangle within a tile: u and out of its n tokens, the first of which is `token`.
  void finish(std::int64_t token, std::int64_t tile, std::int64_t n) {
    const std::int64_t first = tile * kTokensOfTile, odd = tile % 2;
    const float* v_row[kTokensOfTile];
    alignas(64) float beta[kTokensOfTile] = {};
    for (std::int64_t i = 0; i < kTokensOfTile; ++i)
      v_row[i] = i < n ? tokens_.v(token + i, item_.begin, item_.end, w_.v + i * w_.columns) : w_.zero;
    for (std::int64_t i = 0; i < n; ++i) beta[i] = w_.beta[first + i];
    // The products with tokens of the same tile; those of kd are multiplied by -beta.
    const auto own = [&](std::int64_t part) {
      return w_.products + DeltaRuleTilesScratch::row_of(part, kBlockDepth * kChunkFloats) + tile / 2 * kChunkFloats +
             odd * kTileRows;
    };
    alignas(64) float weights[kTokensOfTile][kTokensOfTile];
    for (std::int64_t i = 0; i < kTokensOfTile; ++i)
      for (std::int64_t j = 0; j < kTokensOfTile; j += kLanes)
        store(weights[i] + j, load(own(0) + i * kChunk + j) * vec(-beta[i]));
    for (std::int64_t c = 0; c < round_up(item_.end - item_.begin, kLanes); c += kLanes) {  // up to the end of v's rows
      const std::int64_t column = c / kChunk * kChunkFloats + c % kChunk;
      vec u[kTokensOfTile];
#pragma GCC unroll 16
      for (int i = 0; i < kTokensOfTile; ++i) {
        const vec v = load_any(v_row[i] + c);
        u[i] = p_.has_delta ? vec(beta[i]) * (v - load(w_.xy + column + i * kChunk)) : v;
      }
      if (p_.has_delta)
#pragma GCC unroll 16
        for (int j = 0; j < kTokensOfTile; ++j)
#pragma GCC unroll 16
          for (int i = j + 1; i < kTokensOfTile; ++i) u[i] = fma(vec(weights[i][j]), u[j], u[i]);
      for (std::int64_t r = 0; r < p_.reads; ++r) {
        const float *const product = own(1 + r), *const y = w_.xy +
                                                            DeltaRuleTilesScratch::row_of(1 + r, w_.columns * kChunk) +
                                                            column;
        float* const out = w_.out + r * w_.columns + c;
#pragma GCC unroll 16
        for (int i = 0; i < kTokensOfTile; ++i) {
          vec sum = load(y + i * kChunk);
#pragma GCC unroll 16
          for (int j = 0; j <= i; ++j) sum = fma(vec(product[i * kChunk + j]), u[j], sum);
          store(out + i * p_.reads * w_.columns, sum);
        }
      }
#pragma GCC unroll 16
      for (int i = 0; i < kTokensOfTile; ++i) store(w_.u[odd] + i * w_.columns + c, u[i]);
    }
    for (std::int64_t i = n; i < kTokensOfTile; ++i) fill(w_.u[odd] + i * w_.columns, w_.columns, 0);
    char* const u_tiles = w_.u_tiles + tile / 2 * w_.columns / kTileRows * kTileBytes;
    for (std::int64_t i = 0; i < kTokensOfTile; ++i)
      for (std::int64_t c = 0; c < w_.columns; c += kLanes) {
        const vec low = load(w_.u[0] + i * w_.columns + c), high = odd ? load(w_.u[1] + i * w_.columns + c) : vec(0.f);
        store(reinterpret_cast<float*>(u_tiles) + (c / kTileRows * kTileRows + i) * kTileRows + c % kTileRows,
              round_to_bf16_pairs(low, high));
      }
    for (std::int64_t i = 0; i < n; ++i)
      for (std::int64_t r = 0; r < p_.reads; ++r)
        tokens_.write_out(token + i, r, item_.begin, item_.end, w_.out + (i * p_.reads + r) * w_.columns);
  }

  void add_to_z(std::int64_t steps) {
    for (std::int64_t column = 0; column < w_.columns; column += kChunk)
      for (std::int64_t c = 0; c < w_.d; c += kChunk)
        multiply({w_.ku_a + c / kTileRows * kBlockDepth * kTileBytes, w_.of_tile, 64, kBlockDepth * kTileBytes},
                 {w_.u_tiles + column / kTileRows * kTileBytes, w_.of_u, 64, kTileBytes}, steps, z_row(column, c),
                 z_row(column, c));
    store_pending(tiles_, pending_, w_.discarded);
  }

  const DeltaRuleParams& p_;
  const DeltaRuleItem& item_;
  BumpAllocator allocator_;
  const DeltaRuleTilesScratch w_;
  const DeltaTokens tokens_;
  bool opens_window_ = false;  // whether the block begins a window
  Tiles tiles_;
  Pending pending_ = {w_.discarded};
};

void run(const DeltaRuleParams& p, const DeltaRuleItem& item, std::byte* scratch) noexcept {
  const FlushDenormals flush;
  if (tokens_of(p, item.b).count > kVectorTokens) DeltaRuleTilesRunner(p, item, scratch).run();
  else vector_kernel().run(p, item, scratch);
}

}  // namespace

const DeltaRuleKernel kDeltaRule = {.facts = {.operation = Operation::delta_rule,
                                              .phase = Phase::all,
                                              .arithmetic = "bf16",
                                              .dtypes = set_of(DType::bf16),
                                              .max_head_dim = 256,
                                              .max_value_head_dim = 256},
                                    .columns = 2 * kChunk,
                                    .keeps_steps = false,
                                    .scratch_bytes = bytes_of<DeltaRuleTilesScratch>,
                                    .run = run};

}  // namespace rapt::cpu::RAPT_ISA
