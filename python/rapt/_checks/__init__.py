"""What `python -m rapt check` does with the kernels of each operation: a file of its name with verdicts(entry)."""
