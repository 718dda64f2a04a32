// The vectors of one instruction set, and everything that is built from its leaf alone. README.md beside this file says
// what a leaf defines; the assertions below check it.
#pragma once

#include <type_traits>
#include <utility>

#include "cpu/isa/convert16.hpp"
#include "cpu/isa/convert8.hpp"
#include "cpu/isa/exp2.hpp"
#include "cpu/isa/leaf.hpp"

// Multiplying bf16 takes softmax weights as bf16.
#if defined(RAPT_HAVE_VBMI)
#include "cpu/isa/convert8_vbmi.hpp"
#include "cpu/isa/weights_vbmi.hpp"
#elif defined(RAPT_HAVE_TBL)
#include "cpu/isa/weights_tbl.hpp"
#elif defined(RAPT_HAVE_TILES) || defined(RAPT_HAVE_DOTS)
#include "cpu/isa/weights.hpp"
#endif

namespace rapt::cpu::RAPT_ISA {
namespace leaf_check {

// Of the types that leaves compute with; never defined.
extern vec x;
extern ivec i;
using words = GccVector<std::uint64_t, kLanes / 2>;
extern words w;
extern vec::register_type reg;

// The expression compiles and has this type.
#define RAPT_LEAF_HAS_(result, call, what) static_assert(std::is_same_v<decltype(call), result>, what)

static_assert(std::is_same_v<vec::value_type, float> && std::is_same_v<ivec::value_type, std::int32_t>,
              "vec has float lanes, ivec int32 lanes");
static_assert(vec::size == ivec::size, "vec and ivec have the same number of lanes");
static_assert(kLanes == 4 || kLanes == 8 || kLanes == 16, "transposes and scratch are written for 4, 8 or 16 lanes");
static_assert(kVecs >= 1 && kVecs <= 3, "register tiles are up to 3 vectors wide");
template <int kWidth>
inline constexpr bool kFits = rows_of_tile(kWidth) * kWidth + kWidth + 1 <= kRegisters;
static_assert(kFits<1> && kFits<kVecs> && kFits<(kVecs + 1) / 2>,
              "rows_of_tile: accumulators, x and one broadcast must fit the registers");
static_assert((rows_of_tile(kVecs) & (rows_of_tile(kVecs) - 1)) == 0,
              "rows_of_tile(kVecs): a power of two, since blocks of keys are cut at multiples of it");
static_assert(kFmaFlops == 2 * kLanes, "fma_in_place is one multiply-add of a whole vector");

RAPT_LEAF_HAS_(vec, fma(x, x, x), "fma(vec, vec, vec)");
RAPT_LEAF_HAS_(ivec, cast_to_int(x), "cast_to_int(vec)");
RAPT_LEAF_HAS_(vec, cast_to_float(i), "cast_to_float(ivec)");
RAPT_LEAF_HAS_(ivec, load_u16(std::declval<const std::uint16_t*>()), "load_u16(const std::uint16_t*)");
RAPT_LEAF_HAS_(void, store_u16(std::declval<std::uint16_t*>(), i), "store_u16(std::uint16_t*, ivec)");
RAPT_LEAF_HAS_(vec, load_any(std::declval<const f16*>()), "load_any(const f16*)");
RAPT_LEAF_HAS_(void, store_any(std::declval<f16*>(), x), "store_any(f16*, vec)");
RAPT_LEAF_HAS_(vec, widen_f16(Lanes<std::int16_t>()), "widen_f16(bits of kLanes f16)");
RAPT_LEAF_HAS_(words, multiply_low(w, w), "multiply_low(64-bit words, 64-bit words)");
RAPT_LEAF_HAS_(void, keep_in_register(x), "keep_in_register(vec&)");
RAPT_LEAF_HAS_(void, fma_in_place(reg, reg, reg), "fma_in_place(register&, register, register)");
static_assert(std::is_base_of_v<FloatEnvironment, FlushDenormals>, "FlushDenormals, derived from FloatEnvironment");
#if defined(RAPT_HAVE_INT8_DOTS)
extern ivec::register_type ireg;
RAPT_LEAF_HAS_(void, int8_dots_in_place(ireg, ireg, ireg), "RAPT_HAVE_INT8_DOTS: int8_dots_in_place(register&, ...)");
#endif
#if defined(RAPT_HAVE_COMPRESS)
extern GccVector<std::int32_t, kLanes> lanes;
extern std::int32_t* integers;
RAPT_LEAF_HAS_(std::int64_t, compress(lanes, lanes, integers),
               "RAPT_HAVE_COMPRESS: std::int64_t compress(integers, mask, int32*)");
#endif
#if defined(RAPT_HAVE_RCP14)
RAPT_LEAF_HAS_(vec, rcp14(x), "RAPT_HAVE_RCP14: rcp14(vec)");
#endif
#if defined(RAPT_HAVE_LOAD_PARTS)
extern const void* part;
RAPT_LEAF_HAS_(vec, load_parts(part, part, part, part), "RAPT_HAVE_LOAD_PARTS: load_parts of four const void*");
#endif
#if defined(RAPT_HAVE_SCALEF)
RAPT_LEAF_HAS_(vec, round_off(x), "RAPT_HAVE_SCALEF: round_off(vec)");
RAPT_LEAF_HAS_(vec, scalef(x, x), "RAPT_HAVE_SCALEF: scalef(vec, vec)");
#else
RAPT_LEAF_HAS_(vec, one_plus_product(x, x), "one_plus_product(vec, vec)");
RAPT_LEAF_HAS_(vec, exp2_argument(x), "exp2_argument(vec)");
RAPT_LEAF_HAS_(vec, exp2_result(x, x), "exp2_result(vec, vec)");
#endif
#if defined(RAPT_HAVE_TILES)
static_assert(std::is_class_v<Tiles>, "RAPT_HAVE_TILES: class Tiles");
#endif
#if defined(RAPT_HAVE_DOTS)
static_assert(kDotRows == 1 || (kDotRows == 2 && kLanes == 4), "RAPT_HAVE_DOTS: kDotRows, 1 or, of four lanes, 2");
extern vec operands[kDotRows];
extern const char* const row[kDotRows];
RAPT_LEAF_HAS_(void, load_dots(operands, row, 0), "RAPT_HAVE_DOTS: load_dots(vec (&)[kDotRows], rows, std::int64_t)");
RAPT_LEAF_HAS_(void, add_dots(x, x, x), "RAPT_HAVE_DOTS: add_dots(vec&, vec, vec)");
#if defined(RAPT_HAVE_TBL)  // the one leaf of two rows
RAPT_LEAF_HAS_(void, exchange_halves(x, x), "kDotRows of 2: exchange_halves(vec&, vec&)");
RAPT_LEAF_HAS_(void, merge_pairs(x, x), "kDotRows of 2: merge_pairs(vec&, vec&)");
#endif
#endif

#undef RAPT_LEAF_HAS_

}  // namespace leaf_check
}  // namespace rapt::cpu::RAPT_ISA
