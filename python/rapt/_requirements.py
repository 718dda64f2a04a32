"""The packages that parts of rapt need, and clear errors where they are missing or too old."""

from __future__ import annotations

import re
from importlib import import_module

MINIMUM = {"torch": (2, 13), "transformers": (5, 23)}
"""The oldest version of each package that pyproject.toml's extras accept. Extras have the packages' names."""

_ENFORCED = ("transformers",)  # the functions that rapt replaces differ in older versions


def require(user: str, package: str, extra: str | None = None) -> None:
    """Raises ImportError, which names the extra to install, unless `user`, a module, can import what it needs of `package`.
    `extra`: the one with all that it needs. Default: that of the package."""
    oldest = ".".join(map(str, MINIMUM[package]))
    wanted = f"{user} needs {package} {oldest} or newer"
    how = f"pip install 'rapt-attention[{extra or package}]'"
    try:
        installed = str(import_module(package).__version__)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        raise ImportError(f"{wanted}, which is not installed: {how}", name=package) from None
    release = re.match(r"(\d+)\.(\d+)", installed)
    if package in _ENFORCED and release is not None and (int(release[1]), int(release[2])) < MINIMUM[package]:
        raise ImportError(f"{wanted}; installed is {installed}: {how}", name=package)
