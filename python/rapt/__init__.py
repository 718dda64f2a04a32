"""Attention kernels for CPUs and NVIDIA GPUs, for NumPy, PyTorch and other arrays.

    out = rapt.attention(q, k, v, causal=True)      # NumPy, PyTorch or anything with __dlpack__, [b, h, s, d]
    print(rapt.explain(q, k, v, causal=True))       # which kernel runs, and why not the others
    rapt.attention_backward(dout, q, k, v, out, lse, causal=True)   # gradients
    rapt.delta_rule(q, k, v, g, beta)               # linear attention: Gated DeltaNet, Kimi Delta Attention
    rapt.delta_rule_backward(q, k, v, g, beta, dout=dout)           # gradients
    rapt.dsa.index_topk(q, k, w, 2048)              # the keys that DeepSeek Sparse Attention chooses
    rapt.append_kv(k_new, v_new, k, v, lengths)     # appends to a KV cache: strided, paged, ring or quantised

`rapt.torch` has PyTorch's scaled_dot_product_attention, `rapt.transformers` Hugging Face's models, `rapt.mla`
multi-head latent attention, `rapt.distributed` sequences over several processes, `rapt.flash_attn` flash-attn's
functions, and `rapt.vllm` a plug-in for vLLM.
docs/contract.md in the source specifies every argument.
"""

from rapt import _core, _public, dsa
from rapt._core import Explanation
from rapt._public import *

__version__: str = _core.version()
__all__ = ["Explanation", "dsa"]
__all__ += _public.__all__
