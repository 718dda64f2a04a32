// index_scores on a GPU: the scores, then select_topk's kernels on them. Scores that are not wanted are in the
// workspace, of a portion of the queries at a time.
#include <algorithm>

#include "cuda/entry.hpp"
#include "cuda/kernels/index_scores.hpp"
#include "cuda/kernels/select_topk.hpp"

namespace rapt::cuda {
namespace {

using std::int64_t;

constexpr int64_t kPortionBytes = int64_t{256} << 20;

// A portion of the queries: whole sequences, or tokens of one.
struct Portion {
  int64_t sequences, tokens;
};
Portion portion_of(int64_t b, int64_t sq, int64_t sk) {
  const int64_t rows = std::max<int64_t>(kPortionBytes / 4 / std::max<int64_t>(sk, 1), 1);
  if (rows < sq) return {1, rows};
  return {std::min(b, rows / std::max<int64_t>(sq, 1)), sq};
}

std::size_t selection_bytes(int64_t rows, int64_t sk, int64_t n) {
  SelectTopkParams params{};
  params.b = params.h = 1, params.s = rows, params.sk = sk, params.n = n;
  return select_topk_workspace(params);
}

class IndexScoresEntry : public DeviceEntry {
 public:
  explicit IndexScoresEntry(const GpuSupport& support)
      : DeviceEntry(entry_name(kIndexScoresFacts, "cuda"), "cuda", kIndexScoresFacts, support) {}

  std::size_t max_workspace_bytes(const Problem& problem, const Context::Impl&) const override {
    const auto& p = std::get<IndexScoresProblem>(problem);
    if (p.topk == 0) return 0;
    // Of fewer keys, a portion has more queries.
    const int64_t rows = p.b * p.sq, longest = std::max(kPortionBytes / 4, p.sk);
    const int64_t scores = p.scores ? 0 : p.sk > 0 && rows > longest / p.sk ? longest : rows * p.sk;
    return whole_lines(4 * scores) + selection_bytes(rows, p.sk, p.topk);
  }

 protected:
  using DeviceEntry::DeviceEntry;

 private:
  std::size_t workspace_bytes(const Problem& problem) const override {
    const auto& p = std::get<IndexScoresProblem>(problem);
    if (p.topk == 0) return 0;
    if (p.scores) return selection_bytes(p.b * p.sq, p.sk, p.topk);
    const Portion portion = portion_of(p.b, p.sq, p.sk);
    const int64_t rows = portion.sequences * portion.tokens;
    return whole_lines(4 * rows * p.sk) + selection_bytes(rows, p.sk, p.topk);
  }
  int64_t work_items(const Problem& problem) const override {
    const auto& p = std::get<IndexScoresProblem>(problem);
    return p.b * p.sq;
  }
  virtual cudaError_t launch_scores(const IndexScoresParams& params, const IndexQueries& queries,
                                    cudaStream_t stream) const {
    return launch_index_scores(params, queries, stream);
  }
  cudaError_t launch(const Params& params, std::byte* workspace, cudaStream_t stream) const override {
    IndexScoresParams p = std::get<IndexScoresParams>(params);
    if (p.scores) {
      const IndexQueries all{0, p.b, 0, p.sq};
      const cudaError_t status = launch_scores(p, all, stream);
      return status != cudaSuccess || !p.indices ? status : select(p, all, workspace, stream);
    }
    const Portion portion = portion_of(p.b, p.sq, p.sk);
    auto* const scores = reinterpret_cast<float*>(workspace);
    std::byte* const rest = workspace + whole_lines(4 * portion.sequences * portion.tokens * p.sk);
    p.scores_stride = {portion.tokens * p.sk, 0, p.sk, 1};
    for (int64_t b = 0; b < p.b; b += portion.sequences)
      for (int64_t token = 0; token < p.sq; token += portion.tokens) {
        const IndexQueries queries{b, std::min(b + portion.sequences, p.b), token,
                                   std::min(token + portion.tokens, p.sq)};
        p.scores = scores - b * p.scores_stride.b - token * p.scores_stride.s;  // of query 0
        cudaError_t status = launch_scores(p, queries, stream);
        if (status == cudaSuccess) status = select(p, queries, rest, stream);
        if (status != cudaSuccess) return status;
      }
    return cudaSuccess;
  }
  static cudaError_t select(const IndexScoresParams& p, const IndexQueries& queries, std::byte* workspace,
                            cudaStream_t stream) {
    const auto first = [&](const Strides& s) { return queries.b_begin * s.b + queries.token_begin * s.s; };
    return launch_select_topk({p.scores + first(p.scores_stride), p.indices + first(p.indices_stride), p.scores_stride,
                               p.indices_stride, queries.sequences(), 1, queries.tokens(), p.sk, p.topk},
                              workspace, stream);
  }
};

#ifdef RAPT_HAVE_SM90A
class IndexScoresTilesEntry final : public IndexScoresEntry {
 public:
  explicit IndexScoresTilesEntry(const GpuSupport& support)
      : IndexScoresEntry(entry_name(kIndexScoresTilesFacts, "cuda.sm90a"), "sm90a", kIndexScoresTilesFacts, support) {}

  std::string_view refuse(const Problem& problem, const Context::Impl&) const override {
    const auto& p = std::get<IndexScoresProblem>(problem);
    if (p.h > kIndexTilesMaxHeads) return "takes up to 128 heads";
    if (std::max({p.b, p.sq, p.sk}) > kIndexTilesMaxSize) return "takes up to 2^30 sequences, queries and keys";
    return p.d % 16 != 0 ? "takes heads of multiples of 16 columns" : "";
  }

 private:
  cudaError_t launch_scores(const IndexScoresParams& params, const IndexQueries& queries,
                            cudaStream_t stream) const override {
    return launch_index_scores_tiles(params, queries, stream);
  }
};
#endif

}  // namespace

void add_index_scores(const GpuSupport& support, Entries& entries) {
#ifdef RAPT_HAVE_SM90A
  entries.push_back(std::make_unique<IndexScoresTilesEntry>(support));
#endif
  entries.push_back(std::make_unique<IndexScoresEntry>(support));
}

}  // namespace rapt::cuda
