"""The indexer of DeepSeek Sparse Attention: which keys a query should attend to.

    scores = rapt.dsa.index_scores(q, k, w)         # of every query and key, [b, sq, sk]
    keys = rapt.dsa.select_topk(scores, 2048)       # those of the largest scores, [b, sq, 2048]
    keys = rapt.dsa.index_topk(q, k, w, 2048)       # the same without the matrix of scores

From DeepSeek-V3.2-Exp (2025); q, k and w are what its indexer makes of a token. rapt.torch has the same functions for PyTorch's
tensors, with gradients of the scores, and under torch.compile.
"""

from rapt._dsa import index_scores, index_topk, select_topk

__all__ = ["index_scores", "index_topk", "select_topk"]
