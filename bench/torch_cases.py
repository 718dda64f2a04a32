"""The problems of compare_torch.py: their tensors, and how each side computes them."""

import itertools
import math

import torch
import torch.nn.functional as F

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
GROUP = 4  # query heads to a key head in decode


class Case:
    """One problem with its tensors, and how each side computes it."""

    def __init__(self, rapt, dtype, heads, s, d, causal, batch, layout="bhsd"):
        generator = torch.Generator().manual_seed(s * 1000 + d)
        shape = (batch, heads, s, d) if layout == "bhsd" else (batch, s, heads, d)
        tensors = [torch.randn(shape, generator=generator).to(DTYPES[dtype]) for _ in range(3)]
        self.q, self.k, self.v = tensors if layout == "bhsd" else [t.transpose(1, 2) for t in tensors]
        self.out = torch.empty_like(self.q)
        self.causal = causal
        self.rapt = rapt
        self.args = rapt.attention_args(self.q, self.k, self.v, self.out, causal)
        pairs = s * (s + 1) // 2 if causal else s * s
        self.flops = 4 * pairs * d * heads * batch

    def run_rapt(self):
        self.rapt.attention(self.args)
        return self.out

    def run_torch(self):
        return F.scaled_dot_product_attention(self.q, self.k, self.v, is_causal=self.causal)

    def exact(self):
        """The output in float64, by the plain three steps, head by head."""
        exact = torch.empty(self.q.shape, dtype=torch.float64)
        s, d = self.q.shape[2:]
        hidden = torch.ones(s, s, dtype=torch.bool).triu_(1) if self.causal else None
        for head in itertools.product(*map(range, self.q.shape[:2])):
            scores = self.q[head].double() @ self.k[head].double().T / math.sqrt(d)
            if hidden is not None:
                scores.masked_fill_(hidden, -math.inf)
            exact[head] = torch.softmax(scores, -1) @ self.v[head].double()
        return exact


class DecodeCase:
    """One token over s keys. Entries of the batch have the same keys, each its own copy."""

    def __init__(self, rapt, dtype, heads, s, d, batch):
        generator = torch.Generator().manual_seed(s * 1000 + d)
        self.q = torch.randn((batch, heads, 1, d), generator=generator, dtype=DTYPES[dtype])
        self.k, self.v = [torch.randn((1, heads // GROUP, s, d), generator=generator,
                                      dtype=DTYPES[dtype]).repeat(batch, 1, 1, 1) for _ in range(2)]
        self.folded_q = self.q.view(batch, heads // GROUP, GROUP, d)
        self.out = torch.empty_like(self.q)
        self.rapt = rapt
        self.args = rapt.attention_args(self.q, self.k, self.v, self.out)
        self.bytes = 2 * self.k.nbytes

    def run_rapt(self):
        self.rapt.attention(self.args)
        return self.out

    def run_gqa(self):
        return F.scaled_dot_product_attention(self.q, self.k, self.v, enable_gqa=True)

    def run_folded(self):
        return F.scaled_dot_product_attention(self.folded_q, self.k, self.v)

    def errors(self, out):
        """errors_of() the first and last key head of the first and last entry of the batch."""
        heads = [(n, h) for n in {0, self.k.shape[0] - 1} for h in {0, self.k.shape[1] - 1}]
        exact = [torch.softmax(self.folded_q[at].double() @ self.k[at].double().T / math.sqrt(self.k.shape[-1]), -1)
                 @ self.v[at].double() for at in heads]
        return errors_of(torch.stack([out.view(self.folded_q.shape)[at] for at in heads]), torch.stack(exact))


def errors_of(out, exact):
    """(|out - exact| / |exact| in the Frobenius norm, largest |out - exact|)."""
    difference = out.double() - exact
    return float(difference.norm() / exact.norm()), float(difference.abs().max())
