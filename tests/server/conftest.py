from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.models import resolve
from paceline.runtime.batching import scheduler
from paceline.runtime.model import Model
from support.other_clients import slowed
from support.scheduling import end_scheduler
from support.scripted import ScriptedEngine, scripted_model
from support.server import Running, running


@pytest.fixture(autouse=True, scope="module")
def no_rest() -> Iterator[None]:
    """Servers of a file share an engine: none may idle it during another's forward pass."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scheduler, "_REST_SECONDS", None)
        yield


@pytest.fixture(scope="module")
def module_model(tiny_model: Model, tiny_cache: Path) -> Iterator[Model]:
    """The tiny model for all tests of a file, which must leak no slots."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PACELINE_CACHE", str(tiny_cache))
        free = tiny_model.engine.free_slots
        model = Model(tiny_model.files, tiny_model.engine)
        yield model
        end_scheduler(model)
        assert tiny_model.engine.free_slots == free


@pytest.fixture(scope="module")
def module_server(module_model: Model) -> Iterator[Running]:
    """A server for tests of a file that only send requests."""
    with running(module_model) as instance:
        yield instance


@pytest.fixture
def server(module_server: Running) -> Iterator[Running]:
    """The idle `module_server`; a test that leaves a request in it fails."""
    yield module_server
    module_server.rest()


@pytest.fixture
def own_server(model: Model) -> Iterator[Running]:
    """A server without earlier requests, which a test may shut down."""
    with running(model) as instance:
        yield instance


@pytest.fixture
def slow_model(model: Model) -> Iterator[Model]:
    """A model whose forward passes take 10 ms."""
    with slowed(model, 0.01):
        yield model


@pytest.fixture(scope="module")
def scripted_server(
    tmp_path_factory: pytest.TempPathFactory, tiny_cache: Path
) -> Iterator[Running]:
    """A server whose model follows the rules of a test."""
    with running(scripted_model(tmp_path_factory.mktemp("scripted"), tiny_cache)) as instance:
        yield instance


@pytest.fixture(scope="module")
def thinking_server(thinking_gguf: Path, tiny_cache: Path) -> Iterator[Running]:
    """A server with a model that has Qwen3's tags and responds with `engine.script`."""
    files = resolve(str(thinking_gguf), tiny_cache)
    with running(Model(files, ScriptedEngine(512))) as instance:
        yield instance
