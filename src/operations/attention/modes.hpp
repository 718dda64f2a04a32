// What the shapes of attention's arguments depend on, and the shapes that several arguments have.
#pragma once

#include "operations/shape.hpp"
#include "rapt/kv_source.hpp"

namespace rapt {

// Modes of a call: the kind of its keys, in the order of KvSource::Kind, and whether its queries are ragged.
struct AttentionModes {
  static constexpr unsigned strided = 1, ragged = 2, paged = 4, ring = 8, gathered = 16, ragged_q = 32;
  // Keys that have a position in a sequence, which starts at the first of them.
  static constexpr unsigned sequences = strided | ragged | paged;
  static constexpr unsigned positions = sequences | ring;
  static constexpr unsigned any = positions | gathered;

  static constexpr const char* names[] = {"strided keys", "ragged keys",   "pages",
                                          "a ring",       "gathered keys", "ragged queries"};

  static unsigned of(const KvSource& kv, const TensorView& cu_seqlens_q) {
    if (kv.kind > KvSource::Kind::gathered) throw Error("kv", "an unknown kind", "one of KvSource's factories");
    return 1u << static_cast<unsigned>(kv.kind) | (cu_seqlens_q ? ragged_q : 0);
  }
};

struct AttentionShapes {
  using M = AttentionModes;
  static constexpr Shapes queries = Shapes("b hq sq").when(M::ragged_q, "total_q hq");
  static constexpr Shapes keys = Shapes("b hk sk")
                                     .when(M::ragged, "total_k hk")
                                     .when(M::paged, "pages hk page_size")
                                     .when(M::gathered, "b_or_one hk k_rows");
  // Of pairs of a query and a key. Indices of ragged sequences are local, with room for the longest one.
  static constexpr Shapes pairs = Shapes("b? hq? sq? sk|1")
                                      .when(M::ragged | M::ragged_q, "b? hq? sq?> sk|1>")
                                      .when(M::ragged, "b? hq? sq? sk|1>")
                                      .when(M::ragged_q, "b? hq? sq?> sk|1");
};

}  // namespace rapt
