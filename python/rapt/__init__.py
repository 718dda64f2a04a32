"""Attention for CPUs: `rapt.attention` for arrays, `rapt.torch` for PyTorch.

    out = rapt.attention(q, k, v, causal=True)      # NumPy, PyTorch or anything with __dlpack__, [b, h, s, d]
    print(rapt.explain(q, k, v, causal=True))       # which kernel that is, and why not the others

What every argument means to the last corner is in docs/contract.md of the source.
"""

from rapt._attention import attention, explain
from rapt._core import Explanation
from rapt._info import info

__version__: str = info()["version"]
__all__ = ["Explanation", "attention", "explain", "info"]
