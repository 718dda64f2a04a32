"""The `rapt` command, which is also `python -m rapt`: the C++ program, inside the extension module."""

import os
import signal
import sys
from pathlib import Path

from rapt import _core


def main() -> int:
    # Python's handlers would wait for the command to return. What the parent process ignores stays ignored.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    return _core.command([os.fsencode(argument) for argument in sys.argv], bytes(Path(_core.__file__).parent / "data"))


if __name__ == "__main__":
    sys.exit(main())
