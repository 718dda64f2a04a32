"""The command `python -m rapt`.

    python -m rapt check      compares every kernel of this machine with float64, in less than a minute; exit code 1 if
                              a result is wrong
    python -m rapt --version  prints rapt's version
"""

import signal
import sys

import rapt
from rapt import _check

COMMANDS = ("check", "--version", "--help", "-h")


def main() -> int:
    command, *more = sys.argv[1:] or [""]
    if command not in COMMANDS or more:
        wrong = f"{more[0]}: {command} takes no arguments" if command in COMMANDS else f"{command}: unknown command"
        print(f"python -m rapt: {wrong}; wanted check, --version or --help" if command else __doc__, file=sys.stderr)
        return 2
    if command == "check":
        return _check.run()
    print(rapt.__version__ if command == "--version" else __doc__)
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `python -m rapt -h | head -1` ends without a traceback
    sys.exit(main())
