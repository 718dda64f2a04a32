// What a ScoreSpec asks for beside its modifiers: which keys rows see, and the scale.
#include <algorithm>
#include <cmath>
#include <limits>
#include <string>

#include "core/text.hpp"
#include "operations/attention/check.hpp"
#include "operations/attention/modifiers.hpp"

namespace rapt {
namespace {

using std::int64_t;
using P = AttentionProblem;

void fill_positions(const ScoreSpec& score, P& p, ScoreParams& params) {
  p.causal = score.causal;
  if (score.window) p.window_left = score.window->left, p.window_right = score.window->right;
  set_align(score.align, "score.align", p.align, p.align_offset);
  const auto side = [](int64_t width) { return width < 0 ? kOpen : std::min(width, kOpen); };
  params.left = side(p.window_left);
  params.right = p.causal ? 0 : side(p.window_right);
  params.offset = p.align_offset;
  params.bottom_right = p.align == P::Align::bottom_right;
}

// Refuses a call without align where a sequence has more or fewer rows than keys. check() does so where all sequences
// have one length. Lengths on a device are not read, so such a call needs align.
void check_align(const P& p, const AttentionParams& params) {
  if (!has_lengths(p) || !needs_align(p)) return;
  if (p.device != DeviceType::cpu)
    throw Error("score.align", "none, with lengths on a device",
                "top_left, bottom_right or an offset for causal, window and alibi");
  for (int64_t i = 0; i < p.b; ++i)
    if (const Sequence q = sequence_of(params, params, i); q.len_q != q.len_k)
      refuse_align("score.align", q.len_q, q.len_k, " in sequence " + std::to_string(i));
}

void fill_scale(const ScoreSpec& score, P& p, ScoreParams& params) {
  p.has_scale = score.scale.has_value();
  p.scale = score.scale.value_or(0.f);
  const float scale = score.scale.value_or(p.d > 0 ? 1.f / std::sqrt(static_cast<float>(p.d)) : 0.f);
  constexpr double kMaxScale = std::numeric_limits<float>::max();
  params.scale_log2 = static_cast<float>(std::clamp(scale * kLog2e, -kMaxScale, kMaxScale));
}

}  // namespace

void fill_score(const ScoreSpec& score, P& p, AttentionParams& params) {
  params.score.modifier_rows = params.score.modifier_keys = kNoLimit;
  Modifiers::for_each([&]<class M>(M) { M::fill(score, p, params.score); });
  fill_positions(score, p, params.score);
  check_kind(p);  // before lengths are asked for, which keys without positions have none of
  check_align(p, params);
  fill_scale(score, p, params.score);
}

}  // namespace rapt
