"""Operators of PyTorch's with little around their kernels.

torch.library.custom_op puts several functions in Python around every call, which together take longer than a small attention.
An Operator has none where its kernel is a function of the extension: PyTorch's dispatcher calls that at once, and Python sees
what it does not take."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._compile import _disable_dynamo
from torch.autograd import forward_ad

from rapt import _core, _refusals

_library = torch.library.Library("rapt", "FRAGMENT")  # type: ignore[no-untyped-call]


class Operator:
    """rapt::name, which changes none of its arguments.

    `function` computes it; `fake` computes what its result looks like. The schema is that of the function's annotations unless
    one is given. `devices` are in the dispatcher's words ("CPU", "CUDA"). `by_extension` names the function of the extension
    that computes it where that can be, and returns NotImplemented where it cannot.
    """

    def __init__(
        self,
        name: str,
        function: Callable[..., Any],
        fake: Callable[..., Any],
        devices: tuple[str, ...] = ("CPU",),
        by_extension: str = "",
        schema: str = "",
    ) -> None:
        self.name, self.by_extension = name, by_extension
        schema = schema or torch.library.infer_schema(function, mutates_args=())
        _library.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))  # type: ignore[no-untyped-call]
        self.overload: Any = getattr(torch.ops.rapt, name).default
        torch.library.register_fake(self.overload, fake, lib=_library)
        kernel = _not_compiled(function)
        if by_extension:
            kernel = _core.dispatched(by_extension, kernel)
        for device in devices:
            _library.impl(name, kernel, device)  # type: ignore[no-untyped-call]

    def __call__(self, *inputs: Any) -> Any:
        return self.overload(*inputs)

    def register_autograd(self, backward: Callable[..., Any], setup_context: Callable[..., Any] | None = None) -> None:
        """torch.library.register_autograd, which knows one backward for all devices; on CPUs, calls that have none go to the
        extension. (Where they cannot, its function stays the only one: another around it took 10 us a call.)"""
        autograd = self.autograd_of(backward, setup_context, "CPU")
        if self.by_extension:
            self.set_autograd("CPU", autograd)

    def autograd_of(self, backward: Callable[..., Any], setup_context: Callable[..., Any] | None, device: str) -> Callable[..., Any]:
        """torch.library.register_autograd; what it runs on a device's tensors, for set_autograd()."""
        torch.library.register_autograd(self.overload, backward, setup_context=setup_context, lib=_library)
        kernel = torch.library.get_kernel(self.overload, f"Autograd{device}")
        return lambda keyset, *inputs: kernel.call_boxed(keyset, *inputs)

    def set_autograd(self, device: str, function: Callable[..., Any]) -> None:
        """Calls on a device's tensors are function(keyset, *inputs) from here on, but not those that go to the extension: no
        gradient is to be recorded then, and no mode, transform or trace has a part in them. Tangents are refused, which would
        be lost."""

        def without_tangents(keyset: Any, *inputs: Any) -> Any:
            dual = forward_ad._current_level >= 0
            if dual and any(isinstance(x, torch.Tensor) and _refusals.has_tangent(x) for x in inputs):
                raise NotImplementedError(f"rapt::{self.name}: got a tensor of forward mode; wanted gradients by backward")
            return function(keyset, *inputs)

        kernel = _not_compiled(without_tangents)
        if self.by_extension:
            keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, device))
            keys = keys | torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, f"Autograd{device}"))
            kernel = _core.dispatched_above_autograd(self.by_extension, kernel, keys.raw_repr())
        _library.impl(self.overload, kernel, f"Autograd{device}", with_keyset=True)  # type: ignore[no-untyped-call]


def attention_schemas(tensors: str, options: str) -> tuple[str, str, str]:
    """Of attention, of attention with lse, and of their backward, which register_gradients() takes."""
    given = f"({tensors}, {options}, float dropout_p=0.0, Tensor? seed=None)"
    results = f"Tensor out, Tensor lse, Tensor? seed, {options}, float dropout_p, bool[] wanted"
    backward = f"(Tensor? grad_out, Tensor? grad_lse, {tensors}, {results}) -> Tensor[]"
    return f"{given} -> Tensor", f"{given} -> (Tensor, Tensor)", backward


def _not_compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """torch.compile looks into what is called where it has left its graph: into kernels in Python, too."""
    return _disable_dynamo(function)
