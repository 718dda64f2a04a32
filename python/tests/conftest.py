def pytest_addoption(parser):
    parser.addoption("--all-models", action="store_true", help="test_model_sweep.py: every type of model, not a dozen")
