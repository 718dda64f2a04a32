"""The command `python -m rapt`.

    python -m rapt check           compares every kernel of this machine with float64, in about a minute, whatever RAPT_ISA
                                   and RAPT_KERNEL say; exit code 1 if a result is wrong. bf16 and 8-bit floats need ml_dtypes
    python -m rapt info            prints what this machine and build can do, and the name of every kernel
    python -m rapt info PROBLEM    prints which kernel a call would run, and why: "attention b=1 hq=8 sq=512 d=64 causal"
    python -m rapt --version       prints rapt's version

Also: python -m rapt.bench --help, python -m rapt.transformers --help.
"""

import os
import signal
import sys

import rapt
from rapt import _check

COMMANDS = {"check": 0, "info": 1, "--version": 0, "--help": 0, "-h": 0}
"""How many arguments each takes at most."""


def describe() -> str:
    """rapt.info() as lines of text."""
    info = rapt.info()
    lines = [("rapt", info["version"]), ("cpu", info["cpu"]), ("threads", str(info["threads"])), ("isas", ", ".join(info["isas"]))]
    lines += [("set", f"{name}={value}") for name, value in sorted(os.environ.items()) if name.startswith("RAPT_")]
    lines += [("backend", f"{backend['name']}: {backend['missing'] or backend['library'] or 'usable'}") for backend in info["backends"]]
    lines += [("entry", f"{entry['name']}: {entry['unusable'] or entry['opt_in'] or 'usable'}") for entry in info["entries"]]
    return "\n".join(f"{label:9}{text}" for label, text in lines)


def main() -> int:
    command, *more = sys.argv[1:] or [""]
    if {"-h", "--help"} & set(more):
        command, more = "--help", []
    if command not in COMMANDS or len(more) > COMMANDS[command]:
        wrong = f"{command}: unknown command"
        if command in COMMANDS:
            wrong = f"{more[-1]}: {command} takes {'one argument' if COMMANDS[command] else 'no arguments'}"
        print(f"python -m rapt: {wrong}; wanted check, info, --version or --help" if command else __doc__, file=sys.stderr)
        return 2
    if command == "check":
        return _check.run()
    if command == "info":
        try:
            print(rapt.explain_problem(*more) if more else describe())
        except ValueError as error:
            print(f"python -m rapt: {error}", file=sys.stderr)
            return 2
    else:
        print(rapt.__version__ if command == "--version" else __doc__)
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `python -m rapt -h | head -1` ends without a traceback
    sys.exit(main())
