"""What tests of the delta rule for PyTorch share: tensors, and gradients of a loss."""

import torch
from torch.nn import functional


def draw(b=2, t=9, hq=2, hk=2, hv=4, d=8, dv=12, decay="channel", dtype=torch.float32, state=True, seed=0):
    torch.manual_seed(seed)
    h = max(hk, hv)
    g = {"none": None, "constant": (h,), "head": (b, t, h), "channel": (b, t, h, d)}[decay]
    tensors = {
        "q": torch.randn(b, t, hq, d),
        "k": functional.normalize(torch.randn(b, t, hk, d), dim=-1),
        "v": torch.randn(b, t, hv, dv),
        "g": None if g is None else -torch.rand(g),
        "beta": torch.rand(b, t, h),
    }
    tensors = {name: x.to(dtype) for name, x in tensors.items() if x is not None}
    return tensors | ({"initial_state": torch.randn(b, h, d, dv)} if state else {})


def losses(function, tensors, **options):
    """Results and gradients of all tensors, of a loss that depends on both results."""
    leaves = {name: x.detach().clone().requires_grad_() for name, x in tensors.items()}
    out, state = function(**leaves, **options)
    torch.manual_seed(7)
    loss = (out * torch.randn(out.shape).to(out.dtype)).double().sum() + (state * torch.randn(state.shape)).double().sum()
    return out, state, dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values()))))
