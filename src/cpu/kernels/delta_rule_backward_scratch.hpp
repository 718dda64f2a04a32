// Part of delta_rule_backward.cpp: a work item's scratch.
#pragma once

#include "cpu/kernels/delta_rule_backward_table.hpp"
#include "cpu/tile/bump_allocator.hpp"
#include "cpu/tile/matmul.hpp"

namespace rapt::cpu::RAPT_ISA {
namespace {

constexpr std::int64_t kBlock = kDeltaBackwardTokens;

struct DeltaRuleBackwardScratch {
  std::int64_t d, dv, per_token;  // d and dv padded to whole vectors; rows of `left` and `right` per token
  // Of all tokens: v minus the prediction, [tokens][dv], if the rule predicts. Of all blocks: Z^T, [dv][d], at the
  // block's start, and e of the token before it, [d].
  Matrix missed, starts, e_before;
  Matrix z, y, y_t;       // [d][dv]; y_t [dv][d]
  Matrix part_z, part_e;  // of a block's parts: Z^T, [kBlock - 1][dv][d], but of the first; e before them, [kBlock][d]
  float *e, *rise;        // [d]: e of the last token; of grows()
  float* reads;           // [d]: of finish()
  float *factor, *rest_of_factor;  // [d]: of find_factors()
  // Of a part's tokens; z_factor: of next_e(), where a token begins a window; last_ku: ku of the last piece's window;
  // dku is what comes from Y after the part, own_dku what comes from the part's own tokens; across: of sum_across().
  Matrix kd, ku, last_ku, e_of, decay, z_factor, dku, own_dku, across;  // [kBlock][d]
  Matrix u, du;                                                         // [kBlock][dv]
  Matrix left, right, dleft;                                            // [kBlock][per_token][d], dv, d
  Matrix ku_t, u_t;                                                     // [d][kBlock], [dv][kBlock]
  Matrix left_ku, right_u;                                              // [kBlock][per_token][kBlock]
  float *beta, *k_factor, *q_factor;                                    // [kBlock]; [kBlock][reads]
  float* own_read;                                                      // [kBlock][reads]: dout . u of the same token
  float *row, *gradient, *bias;                                         // [max(d, dv)]; [max(d, dv)]; [d]
  double* exact_factor;                                                 // [d]: of find_factors()
  vec* dbeta;                                                           // [kBlock], as vectors of partial sums
  std::int64_t* pieces;  // [kBlock + 1]: first token of each piece, then n
  std::int64_t* parts;   // [kBlock + 1]: first token of each part, then the block's end

  DeltaRuleBackwardScratch(BumpAllocator& allocator, const DeltaRuleBackwardShape& shape, bool predicts)
      : d(round_up(shape.d, kLanes)), dv(round_up(shape.dv, kLanes)), per_token(shape.reads + predicts) {
    const std::int64_t blocks = (shape.tokens + kBlock - 1) / kBlock, longer = d > dv ? d : dv;
    const auto take = [&](std::int64_t rows, std::int64_t columns) -> Matrix {
      const std::int64_t stride = matrix_stride(columns);
      return {allocator.take<float>(rows * stride), stride};
    };
    for (Matrix* state : {&z, &y}) *state = take(d, dv);
    y_t = take(dv, d);
    for (Matrix* rows : {&kd, &ku, &last_ku, &e_of, &decay, &z_factor, &dku, &own_dku, &across})
      *rows = take(kBlock, d);
    for (Matrix* rows : {&u, &du}) *rows = take(kBlock, dv);
    for (Matrix* rows : {&left, &dleft}) *rows = take(kBlock * per_token, d);
    right = take(kBlock * per_token, dv);
    ku_t = take(d, kBlock), u_t = take(dv, kBlock);
    for (Matrix* rows : {&left_ku, &right_u}) *rows = take(kBlock * per_token, kBlock);
    for (float** one : {&e, &rise, &reads, &factor, &rest_of_factor, &bias}) *one = allocator.take<float>(d);
    for (float** one : {&row, &gradient}) *one = allocator.take<float>(longer);
    for (float** one : {&beta, &k_factor}) *one = allocator.take<float>(kBlock);
    for (float** one : {&q_factor, &own_read}) *one = allocator.take<float>(kBlock * shape.reads);
    dbeta = allocator.take<vec>(kBlock);
    exact_factor = allocator.take<double>(d);
    for (std::int64_t** one : {&pieces, &parts}) *one = allocator.take<std::int64_t>(kBlock + 1);
    e_before = take(blocks, d);
    missed = take(predicts ? shape.tokens : 0, dv);
    starts = take(blocks * dv, d);
    part_z = take((kBlock - 1) * dv, d), part_e = take(kBlock, d);
  }
};

}  // namespace
}  // namespace rapt::cpu::RAPT_ISA
