"""Failures of Core ML as errors of one line: what failed, the reason, what to do.

coremltools passes on what Core ML reports, which is several lines of an NSError. Independent of
coremltools.
"""

import platform
import re
from pathlib import Path
from typing import NamedTuple

from paceline.errors import ModelError
from paceline.system.processes import run_child

MIN_MACOS = 15
"""Packages are for its Core ML, the first one with states."""

_DESCRIPTION = re.compile(r"\bNSLocalizedDescription = (?:\"((?:[^\"\\]|\\.)*)\"|([^;]*));")
_MAX_CHARACTERS = 300
"""Characters of a reason."""

_OTHER_ENGINE = "or use the model that it was made from with --engine auto"
_ADVICE = {
    "compile": f"convert the model again with `paceline convert`, {_OTHER_ENGINE}",
    "load": (
        "close other models, choose other devices with --compute-units, or convert the model again "
        f"with a smaller --megabytes, {_OTHER_ENGINE}"
    ),
    "make a state for": (
        "close other models, or load this one with fewer contexts at once (--cache-tokens), "
        f"{_OTHER_ENGINE}"
    ),
    "run": f"ask again, choose other devices with --compute-units, {_OTHER_ENGINE}",
}
"""What Core ML failed to do with a package -> what the user can do."""


class Mac(NamedTuple):
    version: str
    """As `26.1`."""
    build: str
    """As `25B78`: another one compiles anew."""

    def check(self) -> None:
        if int(self.version.partition(".")[0] or 0) < MIN_MACOS:
            raise ModelError(
                f"this is macOS {self.version or 'of an unknown version'}; Core ML models of "
                f"paceline need macOS {MIN_MACOS} or newer: update it, {_OTHER_ENGINE}"
            )


def this_mac() -> Mac:
    version = platform.mac_ver()[0]
    ended = run_child(["/usr/bin/sw_vers", "-buildVersion"])
    return Mac(version, version if ended.code else ended.reason)


def failure(verb: str, package: Path, mac: Mac, reason: str) -> ModelError:
    """The error for a package that Core ML could not `verb`, a key of `_ADVICE`."""
    return ModelError(
        f"Core ML of macOS {mac.version} cannot {verb} {package}: {reason.rstrip('.')}; "
        f"{_ADVICE[verb]}"
    )


def reason_of(error: Exception) -> str:
    """Core ML's reason in one line: the description of an NSError, or the text."""
    text = str(error) or type(error).__name__
    match = _DESCRIPTION.search(text)
    line = " ".join((match[1] or match[2] if match else text).split())
    return line if len(line) <= _MAX_CHARACTERS else f"{line[:_MAX_CHARACTERS]}..."
