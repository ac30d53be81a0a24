import gc
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from hypothesis import settings

from paceline.engines import EngineSettings, open_engine
from paceline.models import DEFAULT_MODEL, ModelFiles, cache_dir, open_folder, resolve
from paceline.models.manifest import GGUF_WEIGHTS, write_manifest
from paceline.runtime.model import Model
from support.bench import write_suite
from support.coreml import converted_once, tiny_artifact
from support.coremltools import convert_fast
from support.drafters import write_toy_table
from support.packages import MARKED, may_be_marked
from support.pairs import outside_pairs
from support.scheduling import end_scheduler
from support.thinking import TEMPLATES, write_thinking
from support.tiny import write_tiny
from support.waiting import until

# Two cores shared with others: how long an example takes says nothing about the code.
settings.register_profile("paceline", deadline=None)
settings.load_profile("paceline")

# What a test's answers are drafted from may not depend on the tests before it.
os.environ.pop("PACELINE_KEEP", None)

# A background job of a shell ignores SIGINT, and so do the processes that it starts: a test that
# sends Ctrl-C to a command would wait for an end that never comes.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def ctrl_c() -> None:
    """Make Ctrl-C a KeyboardInterrupt in every test, as commands may change its handler."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config: pytest.Config) -> None:
    """A crash of a worker ends the run: with another in its place, xdist 3.8 waits for ever."""
    if getattr(config.option, "maxworkerrestart", "") is None:
        config.option.maxworkerrestart = "0"


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Skip files without a requested test: importing them takes ten seconds."""
    is_asked_for = config.option.markexpr != MARKED or not collection_path.match("test_*.py")
    return None if is_asked_for or may_be_marked(collection_path) else True


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if not may_be_marked(item.path):
            names = {mark.name for mark in item.iter_markers()}
            assert names.isdisjoint(MARKED.split()), f"{item.path} must name its markers {names}"
    outside = outside_pairs(items)
    if "soak" not in config.option.markexpr:
        outside += [item for item in items if item.get_closest_marker("soak")]
    if outside:
        config.hook.pytest_deselected(items=outside)
        dropped = {*outside}
        items[:] = [item for item in items if item not in dropped]


def pytest_collection_finish() -> None:
    """Speed up conversions to Core ML, which take most of the time of its tests."""
    if "coremltools" in sys.modules:
        convert_fast()
    # Closing a model collects garbage: a third of a second with all that is imported by now.
    gc.freeze()


@pytest.fixture(scope="session")
def toy_table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A table for a vocabulary of six tokens."""
    texts = [[0, 1, 2, 3, 4, 5] * 4, [0, 1, 2, 5, 5] * 3, [3, 3, 1, 2, 3]]
    return write_toy_table(tmp_path_factory.mktemp("table"), texts, 6)


@pytest.fixture(scope="session")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


@pytest.fixture(scope="session")
def thinking_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with Qwen3's reasoning tags and switch."""
    path = tmp_path_factory.mktemp("thinking") / "thinking.gguf"
    return write_thinking(path, TEMPLATES["qwen3"])


@pytest.fixture(scope="session")
def tiny_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="session")
def tiny_files(tiny_gguf: Path, tiny_cache: Path) -> ModelFiles:
    return resolve(str(tiny_gguf), tiny_cache)


@pytest.fixture(scope="session")
def tiny_stored(tmp_path_factory: pytest.TempPathFactory, tiny_files: ModelFiles) -> ModelFiles:
    """A prepared model with its weights in the folder, like the default model."""
    folder = tmp_path_factory.mktemp("stored") / "tiny"
    shutil.copytree(tiny_files.folder, folder)
    shutil.copy(tiny_files.path, folder / GGUF_WEIGHTS)
    write_manifest(folder, "tiny", {"kind": "wheel", "from": "tiny==1"}, tiny_files.facts)
    return open_folder(folder, "tiny")


@pytest.fixture(scope="session")
def core_ml(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Core ML artifacts, made by a function with options: each once in a run. All are read-only."""
    for module in ("coremltools", "torch", "transformers"):
        pytest.importorskip(module)
    run = tmp_path_factory.getbasetemp()
    run = run.parent if "PYTEST_XDIST_WORKER" in os.environ else run
    return partial(converted_once, run / "core-ml")


@pytest.fixture(scope="session")
def tiny_core_ml(core_ml: Callable[..., Path]) -> Path:
    """A Core ML model with two packages of layers and two of the head; treat it as read-only.

    Its source is next to it, in `checkpoint`.
    """
    return core_ml(tiny_artifact, taps=(0, 2))


@pytest.fixture(scope="session")
def tiny_model(tiny_files: ModelFiles) -> Model:
    # Threads of a busy machine wait for each other in every product.
    settings = EngineSettings(cache_tokens=8 * tiny_files.context_length, threads=1)
    return Model(
        tiny_files, open_engine("llamacpp", tiny_files.path, tiny_files.context_length, settings)
    )


@pytest.fixture
def cache(tiny_cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache folder of the tests, with the tiny model installed."""
    monkeypatch.setenv("PACELINE_CACHE", str(tiny_cache))
    return tiny_cache


@pytest.fixture
def model(tiny_model: Model, cache: Path) -> Iterator[Model]:
    """The tiny model without learned state; a test that leaks slots fails."""
    free = tiny_model.engine.free_slots
    model = Model(tiny_model.files, tiny_model.engine)
    yield model
    end_scheduler(model)
    if tiny_model.engine.free_slots != free:
        gc.collect()  # tracebacks may hold the test's other models
    until(lambda: tiny_model.engine.free_slots == free)


@pytest.fixture(scope="session")
def real_model() -> Model:
    """The default model, from the user's own cache: it is downloaded at most once."""
    files = resolve(DEFAULT_MODEL, cache_dir())
    settings = EngineSettings(cache_tokens=4096)
    return Model(files, open_engine("llamacpp", files.path, files.context_length, settings))


@pytest.fixture
def suite_file(tmp_path: Path) -> Path:
    return write_suite(tmp_path / "suite.jsonl")
