#include "operations/attention/kind_ring.hpp"

#include <algorithm>
#include <string>

namespace rapt {

using std::int64_t;
using Ring = KeyKind<KvSource::Kind::ring>;

void Ring::check(const AttentionProblem& p) {
  if (p.sk < 1) throw Error("k", "a ring of no rows", "1 or more");
}

// Every key that rows see is still in the ring: with fewer than they ask for the result would be wrong, silently.
void Ring::check_visible(const AttentionProblem& p, const AttentionParams& f) {
  if (p.device != DeviceType::cpu) {  // lengths may be anything, and have to be taken for long ones
    const bool known = p.ragged_q < 0 && p.window_left >= 0 && p.align == AttentionProblem::Align::bottom_right;
    if (known && p.sq > 0 && p.window_left > p.sk - p.sq)
      throw Error("k", "a ring of " + std::to_string(p.sk) + " rows",
                  "window_left + query rows or more, " + std::to_string(p.window_left) + " + " + std::to_string(p.sq));
    return;
  }
  const bool open_left = p.window_left < 0, open_right = f.score.right == kOpen;
  for (int64_t i = 0; i < p.b; ++i) {
    const Sequence q = sequence_of(f, f, i);
    // The first row that sees a key, if all were there; it sees the oldest keys.
    const int64_t offset = row_offset(f.score, q);
    const int64_t token = open_right ? 0 : std::max<int64_t>(0, -f.score.right - offset);
    if (token >= q.len_q) continue;
    KeyRange keys = visible_keys(f.score, token, offset + token, 0, q.len_k);
    // Without a left end the first row that sees keys sees as many as the ring has, like the last.
    if (open_left) keys.first = std::max<int64_t>(keys.last - p.sk, 0);
    if (keys.first >= keys.last || keys.first >= q.oldest) continue;
    throw Error("k",
                "a ring of " + std::to_string(p.sk) + " rows, where key " + std::to_string(keys.first) +
                    " of sequence " + std::to_string(i) + ", which a query row sees, is overwritten",
                open_left ? "one query row a call, or a window, once a sequence is longer than the ring"
                          : std::to_string(q.len_k - keys.first) +
                                " rows or more (window_left + query rows), or fewer query rows a call");
  }
}

}  // namespace rapt
