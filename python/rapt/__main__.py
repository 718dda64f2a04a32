"""The command `python -m rapt`.

    python -m rapt check      compares every kernel of this machine with float64, in less than a minute; exit code 1 where a result is wrong
    python -m rapt --version
"""

import sys

import rapt
from rapt import _check


def main() -> int:
    arguments = sys.argv[1:]
    if arguments == ["check"]:
        return _check.run()
    if arguments == ["--version"]:
        print(rapt.__version__)
        return 0
    wanted = arguments in (["--help"], ["-h"])
    print(__doc__, file=sys.stdout if wanted else sys.stderr)
    return 0 if wanted else 2


if __name__ == "__main__":
    sys.exit(main())
