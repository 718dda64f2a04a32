import sys

import pytest


def pytest_addoption(parser):
    parser.addoption("--all-models", action="store_true", help="test_model_sweep.py: every type of model, not a dozen")


@pytest.fixture(autouse=True)
def nothing_compiled():
    """Or all compilations of a function, in whichever tests ran before in this process, count as its recompilations."""
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is not None:
        dynamo.reset()
