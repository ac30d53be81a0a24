from collections.abc import Callable

import pytest

from paceline.engines import EngineSettings, open_engine
from paceline.engines.base import Engine
from paceline.models import ModelFiles
from support.coreml import tiny_artifact
from support.toy import ToyEngine

# What an engine here must be like: a context of at least 160 slots, a cache that holds ten
# sequences of 64 and that a few full contexts fill. A factory may call pytest.skip.
ENGINES: dict[str, Callable[[pytest.FixtureRequest], Engine]] = {
    "toy": lambda _: ToyEngine(),
    "toy-padded": lambda _: ToyEngine(min_rows=2),
    "openvino": lambda request: _openvino(request.getfixturevalue("tiny_files")),
    "coreml": lambda request: _coreml(request.getfixturevalue("tmp_path_factory")),
}


def _openvino(files: ModelFiles) -> Engine:
    settings = EngineSettings(cache_tokens=3 * files.context_length)
    return open_engine("openvino", files.graph, files.context_length, settings)


def _coreml(folders: pytest.TempPathFactory) -> Engine:
    """Rehearsed here; on a Mac, Core ML itself."""
    for module in ("coremltools", "torch", "transformers"):
        pytest.importorskip(module)
    from paceline.engines.coreml.engine import CoreMlEngine

    folder = tiny_artifact(folders.mktemp("coreml"))
    return CoreMlEngine(folder, EngineSettings(cache_tokens=12 * 192))


@pytest.fixture(scope="session", params=ENGINES)
def engine(request: pytest.FixtureRequest) -> Engine:
    return ENGINES[request.param](request)
