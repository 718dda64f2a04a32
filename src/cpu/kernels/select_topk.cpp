// select_topk: rows of scores -> positions of the n largest of each.
#include "cpu/kernels/select_topk_table.hpp"
#include "cpu/tile/topk.hpp"

namespace rapt::cpu::RAPT_ISA {
namespace {

void run(const SelectTopkParams& p, std::int64_t begin, std::int64_t end, std::byte* scratch) noexcept {
  const FloatEnvironment environment;
  BumpAllocator allocator(scratch);
  Topk topk(allocator, p.n, p.sk);
  const std::int64_t inner = p.scores_stride.d;
  for (std::int64_t row = begin; row < end; ++row) {
    const auto at = [&](const Strides& s) { return row / (p.h * p.s) * s.b + row / p.s % p.h * s.h + row % p.s * s.s; };
    const float* const scores = p.scores + at(p.scores_stride);
    topk.start();
    for (std::int64_t j = 0; j < p.sk; j += kLanes) {
      const std::int64_t n = min(kLanes, p.sk - j);
      topk.add(load_strided(scores + j * inner, inner, n), j, 0, n);
    }
    topk.store_indices(p.indices + at(p.indices_stride), p.indices_stride.d);
  }
}

}  // namespace

const SelectTopkKernel kSelectTopk = {.facts = {.operation = Operation::select_topk,
                                                .phase = Phase::all,
                                                .arithmetic = "f32",
                                                .dtypes = set_of(DType::f32)},
                                      .scratch_bytes = bytes_of<Topk>,
                                      .run = run};

}  // namespace rapt::cpu::RAPT_ISA
