import logging
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest


@pytest.fixture
def artifact(tiny_core_ml: Path, tmp_path: Path) -> Path:
    """An artifact that a test may change: two packages of layers, two of the head."""
    return Path(shutil.copytree(tiny_core_ml, tmp_path / "artifact"))


@pytest.fixture(scope="session")
def quiet_coremltools() -> Iterator[None]:
    """coremltools says much about versions and progress, none of which is about these tests."""
    logging.getLogger("coremltools").setLevel(logging.CRITICAL)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.fixture(scope="session")
def layer_family(quiet_coremltools: None, tmp_path_factory: pytest.TempPathFactory) -> Any:
    from rehearsal_layer import family

    return family(tmp_path_factory.mktemp("layer") / "checkpoint")


@pytest.fixture(scope="session")
def layer_model(layer_family: Any) -> Any:
    """A layer as coremltools converts it. Treat it as read-only."""
    from rehearsal_layer import converted

    return converted(layer_family)


@pytest.fixture(scope="session")
def layer_package(layer_model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("layer") / "layer.mlpackage"
    layer_model.save(str(path))
    return path


@pytest.fixture(scope="session")
def save_program(
    quiet_coremltools: None, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Path]:
    """`support.mil.save_program`, each in a folder of its own."""
    from support import mil

    def save(build: Callable[..., Any], inputs: Mapping[str, np.ndarray], **settings: Any) -> Path:
        path = tmp_path_factory.mktemp("program") / "model.mlpackage"
        return mil.save_program(path, build, inputs, **settings)

    return save
