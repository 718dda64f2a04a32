// append_kv: new rows of k and v -> rows of the cache, copied, rounded or quantised.
#include "cpu/kernels/append_kv_row.hpp"
#include "cpu/kernels/append_kv_table.hpp"
#include "cpu/tile/bump_allocator.hpp"

namespace rapt::cpu::RAPT_ISA {
namespace {

struct AppendKvScratch {
  float* row;
  std::uint8_t* codes;

  AppendKvScratch(BumpAllocator& allocator, std::int64_t size) {
    row = allocator.take<float>(round_up(size, kLanes));
    codes = allocator.take<std::uint8_t>(size);
  }
};

void run(const AppendKvParams& p, std::int64_t begin, std::int64_t end, std::byte* scratch) noexcept {
  const FloatEnvironment environment;
  BumpAllocator allocator(scratch);
  std::int64_t size = 0;
  for (int side = 0; side < p.sides; ++side) size = max(size, p.side[side].size);
  const AppendKvScratch w(allocator, size);
  for (std::int64_t r = begin, i = sequence_with(p, begin); r < end; ++i) {
    const NewRows rows = new_rows(p, i);
    const std::int64_t before = p.from_begin ? rows.first : i * p.n, last = min(end, before + rows.count);
    for (; r < last; ++r) {
      const std::int64_t t = r - before, j = p.len_before[i] + t;
      if (t < first_kept(p, rows.count)) continue;
      for (int side = 0; side < p.sides; ++side) {
        const AppendKvSide& s = p.side[side];
        for (std::int64_t h = 0; h < p.hk; ++h) {
          const std::int64_t from = i * s.from_stride.b + h * s.from_stride.h + (rows.first + t) * s.from_stride.s;
          write_row(s, places_of_key(p, s, i, h, j, from), w.row, w.codes);
        }
      }
    }
  }
}

}  // namespace

const AppendKvKernel kAppendKv = {
    .facts = {.operation = Operation::append_kv, .phase = Phase::all, .arithmetic = "f64", .dtypes = kCacheTypes},
    .scratch_bytes = bytes_of<AppendKvScratch>,
    .run = run};

}  // namespace rapt::cpu::RAPT_ISA
