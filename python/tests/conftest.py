import sys
import warnings

import pytest


def pytest_addoption(parser):
    parser.addoption("--all-models", action="store_true", help="test_model_sweep.py: every type of model, not a dozen")


@pytest.fixture(autouse=True)
def nothing_compiled():
    """Or all compilations of a function, in whichever tests ran before in this process, count as its recompilations."""
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is not None:
        dynamo.reset()


@pytest.fixture
def seeded():
    import torch

    torch.manual_seed(0)


@pytest.fixture
def without_fallbacks():
    """A call that rapt leaves to PyTorch is an error, unless it is wanted."""
    import rapt.torch

    rapt._refusals.warned.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error", rapt.torch.FallbackWarning)
        yield
