"""Short names of models that people use: where each is on the Hugging Face hub.

The data is in `known.json`, which says where it is from. `registry.py` has the models that come
from the package index.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

from paceline.errors import ModelError
from paceline.models.hub_names import HubName
from paceline.storage.files import read_json
from paceline.storage.validation import Positive, validated

_DATA = Path(__file__).with_name("known.json")


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A model with a short name."""

    title: str
    repository: str
    """owner/name."""
    file: str
    """Path of its GGUF file in the repository."""
    bytes: Positive
    """Size of the file."""
    license: str
    ran: Literal["file", "shape"] | None = None
    """What the makers of paceline have run: the file, random layers in its shape, or nothing."""
    engines: tuple[str, ...] = ()
    """Engines in which that ran."""
    revision: str | None = None
    """Commit; None: the main branch."""

    @property
    def hub_name(self) -> HubName:
        """The name that the short name stands for."""
        return HubName(self.repository, file=self.file, revision=self.revision)


@dataclass(frozen=True, slots=True)
class _Data:
    models: dict[str, KnownModel]


@cache
def known_models() -> Mapping[str, KnownModel]:
    """All models with a short name, by name."""
    return validated(_Data, read_json(_DATA), str(_DATA), error=ModelError).models


def known(name: str) -> HubName | None:
    """What a short name stands for: `name`, or `name:TAG` for another file of its repository."""
    short, _, tag = name.partition(":")
    found = known_models().get(short)
    if found is None or ":" in tag:
        return None
    return HubName(found.repository, tag=tag) if tag else found.hub_name
