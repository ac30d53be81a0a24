"""DFlash with a model in MLX: streams, conversations and the server."""

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from paceline.runtime.batching.scheduler import Scheduler
from paceline.runtime.model import Model
from paceline.runtime.stream import run_together
from support import mlx
from support.dflash import config_for, write_checkpoint
from support.scheduling import Submitted

pytestmark = pytest.mark.mlx


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """Loaded without taps."""
    folder = tmp_path_factory.mktemp("mlx")
    return mlx.model(mlx.checkpoint(folder / "qwen3", "qwen3"), folder / "cache")


@pytest.fixture(scope="module")
def drafter(model: Model, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("drafter")
    engine: Any = model.engine
    write_checkpoint(folder, config_for(engine, target_layer_ids=(0, 1)))
    return folder


TEXTS = ["abcabcabcabc", "the rain in the", "x y x y x"]


OPTIONS: dict[str, Any] = {"raw": True, "max_tokens": 16}


@pytest.fixture
def plain(model: Model) -> list[list[int]]:
    return [model.generate(text, drafter="none", **OPTIONS).token_ids for text in TEXTS]


@pytest.mark.usefixtures("cache")
def test_a_model_answers_with_it(model: Model, drafter: Path, plain: list[list[int]]):
    drafted = 0
    for spec in (f"dflash:{drafter}", f"suffix+dflash:{drafter},bits=4,window=9"):
        for policy in ("fixed", "auto"):
            for text, expected in zip(TEXTS, plain, strict=True):
                result = model.generate(text, drafter=spec, policy=policy, max_block=5, **OPTIONS)
                assert result.token_ids == expected
                assert result.exact
                drafted += result.stats.drafted_by.get("dflash", 0)
    assert drafted > 0
    assert set(model.engine.taps) == {0, 1}


@pytest.mark.usefixtures("cache")
def test_streams_may_be_interleaved_and_run_together(
    model: Model, drafter: Path, plain: list[list[int]]
):
    options = {"drafter": f"dflash:{drafter}", "policy": "fixed", **OPTIONS}
    model.generate("a", **options)  # taps from here on
    going = streams = [model.stream(text, **options) for text in TEXTS]
    while going:
        going = [stream for stream in going if next(stream, None) is not None]
    together = [model.stream(text, **options) for text in TEXTS]
    run_together(together)
    assert [stream.result.token_ids for stream in streams] == plain
    assert [stream.result.token_ids for stream in together] == plain
    assert sum(stream.result.stats.drafted for stream in together) > 0


@pytest.mark.usefixtures("cache")
def test_a_server_answers_several_at_once(model: Model, drafter: Path, plain: list[list[int]]):
    options = {"drafter": f"suffix+dflash:{drafter}", **OPTIONS}
    model.generate("a", **options)
    with closing(Scheduler(model)) as scheduler:
        scheduler.start()
        asked = [
            Submitted(scheduler, text, policy=policy, **options)
            for policy in ("fixed", "auto")
            for text in TEXTS * 2
        ]
        assert [request.result().token_ids for request in asked] == plain * 4


@pytest.mark.usefixtures("cache")
def test_a_conversation_may_go_on_in_another_thread(model: Model, drafter: Path):
    import threading

    options: dict[str, Any] = {"max_tokens": 8, "policy": "fixed"}
    told: dict[str, list[str]] = {}
    for spec in ("none", f"dflash:{drafter}"):
        model.generate("a", drafter=spec, raw=True, max_tokens=2)
        chat = model.conversation()
        told[spec] = []
        for text in TEXTS:
            stream = chat.say(text, drafter=spec, **options)
            worker = threading.Thread(target=lambda stream=stream: list(stream))
            worker.start()
            worker.join()
            told[spec].append(stream.result.text)
        chat.close()
    one, other = told.values()
    assert one == other
