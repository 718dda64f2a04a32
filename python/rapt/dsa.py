"""The indexer of DeepSeek Sparse Attention (DSA): chooses the keys that a query attends to.

    scores = rapt.dsa.index_scores(q, k, w)         # of every query and key, [b, sq, sk]
    keys = rapt.dsa.select_topk(scores, 2048)       # positions of the largest scores, [b, sq, 2048]
    keys = rapt.dsa.index_topk(q, k, w, 2048)       # the same without the matrix of scores

Source: DeepSeek-V3.2-Exp, 2025. q, k and w are the outputs of its indexer's projections. rapt.torch has the same
functions for PyTorch tensors, with gradients of the scores and under torch.compile.
"""

from rapt._dsa import index_scores, index_topk, select_topk

__all__ = ["index_scores", "index_topk", "select_topk"]
