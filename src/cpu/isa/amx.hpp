// AMX: eight tiles of 16 rows x 64 bytes, with the vectors of AVX-512 with VBMI, VBMI2 and BF16. With
// -DRAPT_AMX_MODEL=<isa> a software model of the tiles, with the vectors of that ISA, so that the kernels' logic can be
// tested on any machine.
#pragma once

#include "cpu/isa/types.hpp"

#define RAPT_HAVE_TILES

#if defined(RAPT_AMX_MODEL)
#define RAPT_VECTORS RAPT_AMX_MODEL
#include RAPT_LEAF_(RAPT_AMX_MODEL)
#include "cpu/isa/amx_model.hpp"
#else
#define RAPT_VECTORS avx512
#include "cpu/isa/amx_tiles.hpp"
#include "cpu/isa/avx512.hpp"
#endif

#if defined(__AVX512VBMI__)  // the model's vectors may lack it
#define RAPT_HAVE_VBMI
#endif
