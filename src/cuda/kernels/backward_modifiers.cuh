// Modifiers of scores in attention_backward's tiles. The first warpgroup prepares them: masks and dropout become a bit
// for each pair of an own row or key and one of the other side, biases and ALiBi a number that is added to its score.
// The math warpgroups read them beside the tile. (If these loaded them, each would wait for memory, with no registers
// to load ahead.)
#pragma once

#include "cuda/hopper/ptx.cuh"
#include "cuda/kernels/backward_block.cuh"

namespace rapt::cuda {

// Where they lie in a tile's place. Bits: 64 for each own row or key.
template <class C>
constexpr int kHiddenAt = C::kModifiersAt;
template <class C>
constexpr int kDroppedAt = kHiddenAt<C> + C::kBitsBytes;
template <class C>
constexpr int kShiftsAt = kDroppedAt<C> + C::kBitsBytes;

// What the first warpgroup prepares, in halves of a tile. A lane has a token and eight neighbouring keys at a time, an
// octet, which share a draw of dropout: four of them in each half. The lanes of a warp have neighbouring tokens. A warp
// has no other to hide behind, so addresses are few, and what is loaded is loaded ahead: masks of the next half to
// registers, biases of the next half or tile to shared memory, where each lane has a place of its own.
template <class C>
class ModifierLoads {
 public:
  // `staged`: C::kStagedBytes of shared memory.
  __device__ ModifierLoads(const BackwardBlock<C>& block, std::uint32_t staged)
      : block_(block),
        s_(block.p.score),
        staged_(staged + threadIdx.x * 16),
        tokens_(static_cast<int>(min(block.head.len_q, block.p.score.modifier_rows))),
        keys_(static_cast<int>(min(block.head.len_k, block.p.score.modifier_keys))) {
    load_masks({tile_, 0});
    if constexpr (C::kScores) {
      for (int number = 0; number < staged_halves(); ++number) stage_bias({tile_, number});
    }
  }

  // Of own rows or keys and the next tile of the block, to its place in the ring.
  __device__ void prepare(std::uint32_t place) {
    const Tile next = next_of(tile_);
#pragma unroll 1
    for (int number = 0; number < 2; ++number) {
      const Half half{tile_, number}, after{number == 0 ? tile_ : next, 1 - number};
      if (s_.mask) {
        store_bits(place + kHiddenAt<C>, number, hidden());
        load_masks(after);
      }
      if (s_.dropout.given) store_bits(place + kDroppedAt<C>, number, dropped(half));
      if constexpr (C::kScores) {
        if (s_.bias || s_.alibi) store_shifts(place + kShiftsAt<C>, half);
        stage_bias(staged_halves() == 1 ? after : Half{next, number});
      }
    }
    tile_ = next;
  }

 private:
  static constexpr int kOctets = 4;  // of a half, of one lane

  struct Tile {
    int h, number;  // a query head, and which of its tiles
  };
  struct Half {
    Tile tile;
    int number;
  };
  __device__ Tile next_of(const Tile& tile) const {
    return tile.number + 1 < block_.tiles ? Tile{tile.h, tile.number + 1} : Tile{tile.h + 1, 0};
  }

  // The lane's token and octet i: their numbers in the tile. With keys as own a half has 32 tokens by 128 keys, with
  // rows 64 tokens by 64 keys.
  __device__ static int lane() {
    return static_cast<int>(threadIdx.x) % 32;
  }
  __device__ static int warp() {
    return static_cast<int>(threadIdx.x) / 32;
  }
  __device__ static int row_of(int half, int i) {
    return (C::kOfKeys ? half : 2 * half + i / 2) * 32 + lane();
  }
  __device__ static int octet_of(int i) {
    return (C::kOfKeys ? i : i % 2) * 4 + warp();
  }
  __device__ int first_token(const Tile& tile) const {
    return C::kOfKeys ? block_.other + tile.number * kBackwardTile : block_.own;
  }
  __device__ int first_key(const Tile& tile) const {
    return C::kOfKeys ? block_.own : block_.other + tile.number * kBackwardTile;
  }
  __device__ bool exists(const Tile& tile) const {
    return block_.tiles > 0 && tile.h < block_.q_head + block_.q_heads;
  }
  // Whether all tokens and keys of the tile exist.
  __device__ bool is_whole(const Tile& tile) const {
    return first_token(tile) + (C::kOfKeys ? kBackwardTile : C::kOwn) <= tokens_ &&
           first_key(tile) + (C::kOfKeys ? C::kOwn : kBackwardTile) <= keys_;
  }
  // How many keys of octet i exist: 0 if its token does not.
  __device__ int count(const Half& half, int i) const {
    if (first_token(half.tile) + row_of(half.number, i) >= tokens_) return 0;
    return min(max(keys_ - first_key(half.tile) - 8 * octet_of(i), 0), 8);
  }
  // Where a tensor has octet 0, and how far from there it has octet i.
  __device__ std::int64_t index(const Strides& s, const Half& half) const {
    return modifier_index(s, {block_.head.b, half.tile.h, first_token(half.tile) + row_of(half.number, 0),
                              first_key(half.tile) + 8 * octet_of(0)});
  }
  __device__ static std::int64_t to_octet(const Strides& s, int i) {
    return C::kOfKeys ? i * 32 * s.d : i / 2 * 32 * s.s + i % 2 * 32 * s.d;
  }

  __device__ void load_masks(const Half& half) {
    if (!s_.mask || !exists(half.tile)) return;
    const std::uint8_t* const from = s_.mask + index(s_.mask_stride, half);
    const bool at_once = block_.params.mask_vector && is_whole(half.tile);
#pragma unroll
    for (int i = 0; i < kOctets; ++i) {
      const std::uint8_t* const octet = from + to_octet(s_.mask_stride, i);
      if (at_once) masks_[i] = __ldg(reinterpret_cast<const uint2*>(octet));
      else masks_[i] = load_each(octet, count(half, i));
    }
  }
  // Of an octet of which `exist` keys exist. The others are 0: masked.
  __device__ uint2 load_each(const std::uint8_t* octet, int exist) const {
    std::uint64_t bytes = 0;
#pragma unroll 1
    for (int k = 0; k < exist; ++k) bytes |= std::uint64_t{octet[k * s_.mask_stride.d]} << 8 * k;
    return make_uint2(static_cast<std::uint32_t>(bytes), static_cast<std::uint32_t>(bytes >> 32));
  }
  // Bit 8 i + k: key k of octet i is masked.
  __device__ std::uint32_t hidden() const {
    std::uint32_t seen = 0;
#pragma unroll
    for (int i = 0; i < kOctets; ++i) seen |= (nonzero_bytes(masks_[i].x) | nonzero_bytes(masks_[i].y) << 4) << 8 * i;
    return ~seen;
  }
  // Bit i: byte i is not 0.
  __device__ static std::uint32_t nonzero_bytes(std::uint32_t x) {
    const std::uint32_t high = (((x & 0x7f7f7f7f) + 0x7f7f7f7f) | x) & 0x80808080;
    return (high >> 7) * (1 << 24 | 1 << 17 | 1 << 10 | 1 << 3) >> 24 & 15;
  }
  // Bit 8 i + k: the weight of key k of octet i is dropped.
  __device__ std::uint32_t dropped(const Half& half) const {
    const DropoutParams& d = s_.dropout;
    const auto head = dropout_head(d, block_.head.b, half.tile.h);
    const auto draw = static_cast<std::uint32_t>(first_key(half.tile)) / static_cast<std::uint32_t>(kKeysPerDraw);
    std::uint32_t bits = 0;
#pragma unroll
    for (int i = 0; i < kOctets; ++i) {
      const auto token = static_cast<std::uint32_t>(first_token(half.tile) + row_of(half.number, i));
      const PhiloxWords random = philox({{draw + octet_of(i), token, head, d.offset}}, d.key[0], d.key[1]);
#pragma unroll
      for (int k = 0; k < 8; ++k)
        bits |= ((random.word[k / 2] >> k % 2 * 16 & 0xffff) < d.threshold ? 1u : 0u) << (8 * i + k);
    }
    return bits;
  }
  // `bits`: bit 8 i + k is of key k of octet i.
  __device__ static void store_bits(std::uint32_t words, int half, std::uint32_t bits) {
    if constexpr (C::kOfKeys) {
      // Bit and lane change places: a lane gets the 32 tokens of a key.
#pragma unroll
      for (int step = 16; step > 0; step /= 2) {
        const std::uint32_t low = step == 16  ? 0xffffu
                                  : step == 8 ? 0xff00ffu
                                  : step == 4 ? 0x0f0f0f0fu
                                  : step == 2 ? 0x33333333u
                                              : 0x55555555u;
        const std::uint32_t there = __shfl_xor_sync(~0u, bits, step);
        bits = lane() & step ? (bits & ~low) | (there >> step & low) : (bits & low) | (there & low) << step;
      }
      store4(words + (octet_of(lane() / 8) * 8 + lane() % 8) * 8 + half * 4, bits);
    } else {
#pragma unroll
      for (int i = 0; i < kOctets; ++i)
        store1(words + row_of(half, i) * 8 + octet_of(i), static_cast<std::uint8_t>(bits >> 8 * i));
    }
  }

  __device__ int bias_size() const {
    return s_.bias_type == DType::f32 ? 4 : 2;
  }
  __device__ int staged_halves() const {
    return s_.bias_type == DType::f32 ? 1 : 2;
  }
  // Where key k of octet i is: each 16 bytes of a lane's lie beside those of its neighbours.
  __device__ std::uint32_t staged(const Half& half, int i, int k) const {
    const int bytes = ((staged_halves() - 1) * half.number * kOctets + i) * 8 * bias_size() + k * bias_size();
    return staged_ + bytes / 16 * (128 * 16) + bytes % 16;
  }
  // Copies a half's bias, as one group of copies.
  __device__ void stage_bias(const Half& half) const {
    if (!s_.bias || !exists(half.tile)) return copy_commit();
    const int size = bias_size();
    const auto* const from = static_cast<const std::byte*>(s_.bias) + index(s_.bias_stride, half) * size;
    const bool at_once = block_.params.bias_vector && is_whole(half.tile);
#pragma unroll
    for (int i = 0; i < kOctets; ++i) {
      const std::byte* const octet = from + to_octet(s_.bias_stride, i) * size;
      if (at_once) {
        copy16(staged(half, i, 0), octet);
        if (size == 4) copy16(staged(half, i, 4), octet + 16);
        continue;
      }
      const int exist = count(half, i);
#pragma unroll 1
      for (int k = 0; k < exist; ++k) {
        const std::byte* const key = octet + k * s_.bias_stride.d * size;
        if (size == 4) store4(staged(half, i, k), *reinterpret_cast<const std::uint32_t*>(key));
        else store2(staged(half, i, k), *reinterpret_cast<const std::uint16_t*>(key));
      }
    }
    copy_commit();
  }
  // What modifiers add to scores, in the log2 domain.
  __device__ void store_shifts(std::uint32_t place, const Half& half) const {
    if (staged_halves() == 1) copy_wait<0>();
    else copy_wait<1>();
    const float slope = s_.alibi ? alibi_slope_log2(s_, block_.head.b, half.tile.h, NumberAt()) : 0;
#pragma unroll
    for (int i = 0; i < kOctets; ++i) {
      const int row = row_of(half.number, i), octet = octet_of(i);
      float shifts[8] = {};
      if (s_.bias) {
        if (s_.bias_type == DType::f32) {
          put_four(shifts, load16(staged(half, i, 0))), put_four(shifts + 4, load16(staged(half, i, 4)));
        } else {
          const float4 eight = load16(staged(half, i, 0));
          put_pair(shifts, eight.x), put_pair(shifts + 2, eight.y);
          put_pair(shifts + 4, eight.z), put_pair(shifts + 6, eight.w);
        }
#pragma unroll
        for (float& shift : shifts) shift = scaled_bias(shift);
      }
      if (s_.alibi) {
        const std::int64_t nearest = nearest_key(first_token(half.tile) + row + block_.head.offset, block_.head.len_k);
        const auto distance = static_cast<float>(static_cast<int>(nearest) - first_key(half.tile) - 8 * octet);
#pragma unroll
        for (int k = 0; k < 8; ++k) shifts[k] -= slope * fabsf(distance - static_cast<float>(k));
      }
#pragma unroll
      for (int k = 0; k < 8; ++k) {
        const int own = C::kOfKeys ? octet * 8 + k : row, other = C::kOfKeys ? row : octet * 8 + k;
        store4(place + own * C::kShiftsPitch + other * 4, __float_as_uint(shifts[k]));
      }
    }
  }
  __device__ static void put_four(float* to, const float4& x) {
    to[0] = x.x, to[1] = x.y, to[2] = x.z, to[3] = x.w;
  }
  __device__ void put_pair(float* to, float pair) const {
    const float2 two = two_of(s_.bias_type, __float_as_uint(pair));
    to[0] = two.x, to[1] = two.y;
  }
  const BackwardBlock<C>& block_;
  const ScoreParams& s_;
  const std::uint32_t staged_;  // of this lane
  const int tokens_, keys_;     // those that modifiers have
  Tile tile_{block_.q_head, 0};
  uint2 masks_[kOctets] = {};  // of the next half
};

// Bits of a tile as a math lane needs them: of its pair i of own row and other row, in the order of fragments.
class PairBits {
 public:
  // `words`: those of the lane's first own row; `in_eight`: the first of its two others among eight.
  __device__ PairBits(std::uint32_t words, std::uint32_t in_eight) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float2 two = load8(words + h * 64);
      words_[h][0] = __float_as_uint(two.x) >> in_eight, words_[h][1] = __float_as_uint(two.y) >> in_eight;
    }
  }
  __device__ bool operator[](int i) const {
    return words_[i / 2 % 2][i / 16] >> (i / 4 % 4 * 8 + i % 2) & 1;
  }

 private:
  std::uint32_t words_[2][2];
};

// tanh(x / y) to a relative 2^-18, which scores of 16-bit numbers do not show.
__device__ inline float tanh_approx(float x, float y) {
  constexpr float kSmall = 0.125f;  // where the other formula would lose more
  const float ratio = __fdividef(x, y), square = ratio * ratio;
  const float small = ratio * fmaf(square, fmaf(square, 2.f / 15, -1.f / 3), 1);
  return fabsf(ratio) < kSmall ? small : 1 - __fdividef(2, 1 + exp2_approx(ratio * (2 * kLog2e)));
}

}  // namespace rapt::cuda
