"""Where the drafters are that `paceline learn` made for a model, and how they are removed.

A small file for each form of a model's weights names the drafters that `auto` takes; it is replaced
by one rename. The folder of a model has what they were made from, and belongs to the learner.

Independent of how drafters are made. Invariant: a file that is missing or damaged means that
nothing was learnt; it ends no answer.
"""

import contextlib
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import ModelError
from paceline.models import ModelFiles, cache_dir
from paceline.storage.files import read_json, size_of, write_json
from paceline.storage.manifest import MANIFEST

HEADER = "learnt.json"
"""Says which model a folder is of."""

_FOLDER, _INSTALLED = "learnt", "installed"


def learnt_dir() -> Path:
    """The folder of what was learnt of all models."""
    return cache_dir() / _FOLDER


def installed_drafters(files: ModelFiles) -> dict[str, Path]:
    """Kind of drafter -> folder, of the drafters that were learnt for a model and installed."""
    # A folder that was forgotten is gone; heads that earlier versions made have no manifest.
    return {kind: path for kind, path in _installed(files).items() if (path / MANIFEST).is_file()}


def install(files: ModelFiles, kind: str, folder: Path) -> None:
    """Let `auto` take the drafter in `folder`, in place of one of its kind. Raises OSError."""
    path = _index(files.fingerprint)
    path.parent.mkdir(parents=True, exist_ok=True)
    folders = {kind: str(folder) for kind, folder in {**_installed(files), kind: folder}.items()}
    write_json(path, {"model": files.name, "drafters": folders})


def _installed(files: ModelFiles) -> dict[str, Path]:
    try:
        drafters = read_json(_index(files.fingerprint))["drafters"]
        return {str(kind): Path(folder) for kind, folder in drafters.items()}
    except (ModelError, AttributeError, KeyError, TypeError):
        return {}


@dataclass(frozen=True, slots=True)
class Stored:
    """What was learnt of one model, or kept of its answers."""

    model: str
    """Its name; empty if the files do not say."""
    paths: tuple[Path, ...]
    """Folders, and files that name drafters in them."""

    @property
    def bytes(self) -> int:
        """Size of all files."""
        return sum(map(size_of, self.paths))

    def remove(self) -> None:
        """Remove all of it. Raises OSError."""
        for path in sorted(self.paths, key=Path.is_dir):  # first the files that name folders
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)


def all_learnt() -> list[Stored]:
    """What was learnt of each model, in the order of their names."""
    paths: dict[str, list[Path]] = {}
    for path, header in _parts():
        model = ""
        with contextlib.suppress(ModelError):
            model = str(read_json(header).get("model", ""))
        paths.setdefault(model, []).append(path)
    return [Stored(model, tuple(paths[model])) for model in sorted(paths)]


def learnt_of(model: str) -> list[Path]:
    """The paths of what was learnt of a model, by its name in any case."""
    named = (learnt for learnt in all_learnt() if learnt.model.casefold() == model.casefold())
    return [path for learnt in named for path in learnt.paths]


def _parts() -> Iterator[tuple[Path, Path]]:
    """Each path of what was learnt, and the file that names its model."""
    for path in sorted(learnt_dir().glob("*")):
        if path.name != _INSTALLED and path.is_dir():
            yield path, path / HEADER
    for path in sorted((learnt_dir() / _INSTALLED).glob("*.json")):
        yield path, path


def _index(fingerprint: str) -> Path:
    return learnt_dir() / _INSTALLED / f"{fingerprint[:24]}.json"
