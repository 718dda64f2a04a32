// C (+)= A B of matrices of bf16 components, a chunk of 32 x 32 at a time, with other work interleaved: on the matrix
// unit (bf16_mma_tiles.hpp), or by products of pairs in vectors (bf16_mma_dots.hpp). Both define
// - Tiles: the state that a thread holds while it multiplies.
// - kBlockKeys: how many keys a block of scores has.
// - kLeavesPending: whether a chunk's sums are stored while the next one is multiplied.
// - multiply_chunk: c = start + sum over `steps` of A B for one chunk (start null: 0). It may call `interleaved`,
// which shares no data with it, up to 4 * steps times, and it may leave the chunk pending. kStreamA: A is read once
// and should not displace other data in L1. Layout is that of start and c; it stays the same up to the next
// store_pending.
// - store_pending: stores the pending chunk.
#pragma once

#include "cpu/tile/bf16_mma_operands.hpp"

#if defined(RAPT_HAVE_TILES)
#include "cpu/tile/bf16_mma_tiles.hpp"
#elif defined(RAPT_HAVE_DOTS)
#include "cpu/tile/bf16_mma_dots.hpp"
#endif
