"""Engines, drafters and commands of other packages, which name them as entry points.

A package has them in its metadata: in the group `paceline.engines` an engine's name and a function
`(path, context_length, settings) -> Engine`, imported before a model is fetched: it may raise
MissingExtra then; in `paceline.drafters` `ENGINE.KIND` and a `HeadKind` (`drafters/heads.py`); in
`paceline.commands` a command's name and a Typer app, or a function that `command` of
`cli/options.py` decorates. `bench.NAME` adds the command NAME to the group `bench`. A name of
paceline's own is not looked for here.

Reads `entry_points.txt` itself: importlib.metadata does the same, and importing it would take a
quarter of the time of `paceline --help`.
"""

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from paceline.errors import PacelineError

ENGINES = "paceline.engines"
DRAFTERS = "paceline.drafters"
COMMANDS = "paceline.commands"


class PluginError(PacelineError):
    """An engine, a drafter or a command of another package that cannot be imported."""


def names(group: str) -> list[str]:
    """Names in a group of entry points, sorted."""
    return sorted(_entry_points(group, tuple(sys.path)))


def load(group: str, name: str) -> Any:
    """Import the object that an entry point names.

    Raises:
        KeyError: there is no such entry point.
        PacelineError: what importing it raises; a PluginError for any other error.
    """
    target = _entry_points(group, tuple(sys.path))[name]
    module, _, attribute = target.partition(":")
    try:
        value = import_module(module)
        return getattr(value, attribute) if attribute else value
    except PacelineError:
        raise
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise PluginError(
            f"{name!r} of {group} is {target}, which cannot be imported ({reason}); install the "
            "package that adds it again, or uninstall it"
        ) from error


@cache
def _entry_points(group: str, path: Sequence[str]) -> Mapping[str, str]:
    """Name -> `module:attribute`; of one name, the first on `path`."""
    targets: dict[str, str] = {}
    for folder in path:
        for text in _metadata(folder or "."):
            for name, target in _section(text, group):
                targets.setdefault(name, target)
    return targets


def _metadata(folder: str) -> Iterator[str]:
    """Return the entry points of the distributions in a folder of sys.path."""
    try:
        entries = sorted(os.listdir(folder))  # noqa: PTH208  (a Path for each takes milliseconds)
    except OSError:  # a zip file, or no longer there
        return
    for entry in entries:
        if entry.endswith((".dist-info", ".egg-info")):
            try:
                yield Path(folder, entry, "entry_points.txt").read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError):  # most distributions have none
                continue


def _section(text: str, group: str) -> Iterator[tuple[str, str]]:
    """Names and values of one section of a file in the form of `entry_points.txt`."""
    section = ""
    for line in map(str.strip, text.splitlines()):
        if line.startswith("["):
            section = line.strip("[]").strip()
        elif section == group and "=" in line and not line.startswith(("#", ";")):
            name, _, target = line.partition("=")
            yield name.strip(), target.partition("[")[0].strip()
