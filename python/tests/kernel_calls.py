"""Counts the calls that rapt.torch and rapt.transformers make of rapt's kernels."""

from contextlib import contextmanager
from unittest import mock

import rapt
from rapt import _core


class Calls:
    """How many came from the extension's own decision, how many by way of Python, and their masks."""

    def __init__(self):
        self.eager = self.by_python = 0
        self.masks = []

    @property
    def call_count(self):
        return self.eager + self.by_python

    def counted(self, function):
        def count(*args, **kwargs):
            result = function(*args, **kwargs)
            if result is not NotImplemented:
                self.eager += function in EAGER
                self.by_python += function not in EAGER
                self.masks.append(kwargs.get("mask") if function is ATTENTION else args[3])
            return result

        return count


ATTENTION = rapt.attention
EAGER = (_core.eager_sdpa, _core.eager_attention)


@contextmanager
def kernel_calls():
    calls = Calls()
    functions = [(_core, "sdpa"), (_core, "eager_sdpa"), (_core, "eager_attention"), (rapt, "attention")]
    with mock.patch.multiple(_core, **{name: calls.counted(getattr(of, name)) for of, name in functions[:3]}):
        with mock.patch.object(rapt, "attention", calls.counted(ATTENTION)):
            yield calls


@contextmanager
def by_python():
    """Nothing is decided by the extension in here."""
    refused = dict.fromkeys(("eager_sdpa", "eager_sdpa_gradients", "eager_attention"), lambda *_: NotImplemented)
    with mock.patch.multiple(_core, **refused):
        yield


class BackwardCalls:
    count = 0


@contextmanager
def backward_calls():
    """Counts the calls of rapt's own backward."""
    calls = BackwardCalls()

    def counted(function):
        def count(*args):
            result = function(*args)
            calls.count += result is not NotImplemented
            return result

        return count

    names = ("attention_backward", "eager_sdpa_gradients")
    with mock.patch.multiple(_core, **{name: counted(getattr(_core, name)) for name in names}):
        yield calls
