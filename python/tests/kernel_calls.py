"""Counts the calls that rapt.torch and rapt.transformers make of rapt's kernels."""

from contextlib import contextmanager
from unittest import mock

import rapt
from rapt import _core


class Calls:
    """How many came from the extension's own decision, eager or as an operator's kernel, how many by way of Python, and their
    masks."""

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
                self.eager += function in EXTENSION
                self.by_python += function not in EXTENSION
                self.masks.append(kwargs.get("mask") if function is ATTENTION else args[3])
            return result

        return count


ATTENTION = rapt.attention
NAMES = ("sdpa", "eager_sdpa", "eager_attention", "dispatched_sdpa", "dispatched_sdpa_with_lse")
EXTENSION = [getattr(_core, name) for name in NAMES[1:]]


@contextmanager
def kernel_calls():
    calls = Calls()
    with mock.patch.multiple(_core, **{name: calls.counted(getattr(_core, name)) for name in NAMES}):
        with mock.patch.object(rapt, "attention", calls.counted(ATTENTION)):
            yield calls


@contextmanager
def by_python():
    """Nothing is decided by the extension in here."""
    names = (*NAMES[1:], "eager_sdpa_gradients", "dispatched_sdpa_gradients")
    refused = dict.fromkeys(names, lambda *_: NotImplemented)
    with mock.patch.multiple(_core, **refused):
        yield


class BackwardCalls:
    def __init__(self):
        self.names = []

    @property
    def count(self):
        return len(self.names)


@contextmanager
def backward_calls():
    """Counts the calls of rapt's own backward."""
    calls = BackwardCalls()

    def counted(name):
        function = getattr(_core, name)

        def count(*args):
            result = function(*args)
            if result is not NotImplemented:
                calls.names.append(name)
            return result

        return count

    names = ("attention_backward", "eager_sdpa_gradients", "dispatched_sdpa_gradients")
    with mock.patch.multiple(_core, **{name: counted(name) for name in names}):
        yield calls
