"""Attention for CPUs: `rapt.attention` for arrays, `rapt.torch` for PyTorch, `rapt.mla` for latent attention in PyTorch.

    out = rapt.attention(q, k, v, causal=True)      # NumPy, PyTorch or anything with __dlpack__, [b, h, s, d]
    print(rapt.explain(q, k, v, causal=True))       # which kernel that is, and why not the others
    rapt.attention_backward(dout, q, k, v, out, lse, causal=True)   # its gradients
    rapt.delta_rule(q, k, v, g, beta)               # linear attention with a state: Gated DeltaNet, Kimi Delta Attention
    rapt.delta_rule_backward(q, k, v, g, beta, dout=dout)           # its gradients
    rapt.dsa.index_topk(q, k, w, 2048)              # which keys a query should attend to: DeepSeek Sparse Attention's indexer
    rapt.append_kv(k_new, v_new, k, v, lengths)     # into a strided, paged or ring cache, quantised if it is

What every argument means to the last corner is in docs/contract.md of the source.
"""

from rapt import _core, _public, dsa
from rapt._core import Explanation
from rapt._public import *

__version__: str = _core.version()
__all__ = ["Explanation", "dsa"]
__all__ += _public.__all__
