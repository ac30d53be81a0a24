"""Core ML failures as one-line errors: the failed action, the reason, and a fix.

coremltools raises Core ML's message unchanged, which is an NSError of several lines. This file does
not import coremltools.
"""

import platform
import re
from pathlib import Path
from typing import NamedTuple

from paceline.errors import ModelError
from paceline.system.processes import run_child

MIN_MACOS = 15
"""The first macOS whose Core ML supports states, which packages use."""

_DESCRIPTION = re.compile(r"\bNSLocalizedDescription = (?:\"((?:[^\"\\]|\\.)*)\"|([^;]*));")
_MAX_CHARACTERS = 300
"""Maximum length of a reason."""

_OTHER_ENGINE = "or use the original model with --engine auto"
_ADVICE = {
    "compile": f"convert the model again with `paceline convert`, {_OTHER_ENGINE}",
    "load": (
        "close other models, choose other devices with --compute-units, convert the model again "
        f"with a smaller --megabytes, {_OTHER_ENGINE}"
    ),
    "make a state for": (
        "close other models, load this one with fewer simultaneous contexts (--cache-tokens), "
        f"{_OTHER_ENGINE}"
    ),
    "run": f"try again, choose other devices with --compute-units, {_OTHER_ENGINE}",
}
"""Failed action on a package -> possible fixes."""


class Mac(NamedTuple):
    version: str
    """The version of macOS, such as `26.1`."""
    build: str
    """The build of macOS, such as `25B78`; each build compiles packages again."""

    def check(self) -> None:
        if int(self.version.partition(".")[0] or 0) < MIN_MACOS:
            raise ModelError(
                f"paceline's Core ML models need macOS {MIN_MACOS} or newer, not "
                f"{self.version or 'an unknown version'}; update macOS, {_OTHER_ENGINE}"
            )


def this_mac() -> Mac:
    version = platform.mac_ver()[0]
    ended = run_child(["/usr/bin/sw_vers", "-buildVersion"])
    return Mac(version, version if ended.code else ended.reason)


def failure(verb: str, package: Path, mac: Mac, reason: str) -> ModelError:
    """Return the error for a package that Core ML could not `verb`, a key of `_ADVICE`."""
    return ModelError(
        f"Core ML on macOS {mac.version} cannot {verb} {package}: {reason.rstrip('.')}; "
        f"{_ADVICE[verb]}"
    )


def reason_of(error: Exception) -> str:
    """Return Core ML's reason in one line: an NSError's description, or else the text."""
    text = str(error) or type(error).__name__
    match = _DESCRIPTION.search(text)
    line = " ".join((match[1] or match[2] if match else text).split())
    return line if len(line) <= _MAX_CHARACTERS else f"{line[:_MAX_CHARACTERS]}..."
