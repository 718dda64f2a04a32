// AMX: eight tiles of 16 rows x 64 bytes beside the vectors of AVX-512 with VBMI, VBMI2 and BF16. With
// -DRAPT_AMX_MODEL=<isa> a software model of the tiles beside the vectors of that ISA, so that the kernels' logic can
// be tested on any machine.
#pragma once

#define RAPT_HAVE_TILES

#if defined(RAPT_AMX_MODEL)
#include RAPT_LEAF_(RAPT_AMX_MODEL)
#include "cpu/isa/amx_model.hpp"
#else
#include "cpu/isa/amx_tiles.hpp"
#include "cpu/isa/avx512.hpp"
#endif

#if defined(__AVX512VBMI__)
#include "cpu/isa/weights_avx512.hpp"
#else
#include "cpu/isa/weights.hpp"
#endif
