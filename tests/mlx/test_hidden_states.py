"""Draft heads of a loaded model, and reopening the engine for their hidden states."""

from contextlib import closing
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from paceline.engines import EngineSettings, open_engine
from paceline.engines.base import Engine
from paceline.errors import InvalidRequest, ModelError
from paceline.models import ModelFiles
from paceline.runtime.load import load
from paceline.runtime.model import Model
from paceline.runtime.result import Result
from support import mlx
from support.dflash import config_for, write_checkpoint
from support.plain import said
from support.scheduling import Submitted

pytestmark = [pytest.mark.mlx, pytest.mark.usefixtures("cache")]

PROMPT = "abcabcabcabc"
TURNS = ["the rain in the", "x y x y x", "abcabcabc"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return mlx.checkpoint(tmp_path_factory.mktemp("mlx") / "qwen3", "qwen3")


@pytest.fixture(scope="module")
def loaded(checkpoint: Path) -> Model:
    return mlx.model(checkpoint, checkpoint.parent / "cache")


@pytest.fixture(scope="module")
def dflash(loaded: Model, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("dflash")
    write_checkpoint(folder, config_for(loaded.engine, taps=(0, 1)))
    return f"dflash:{folder}"


def plain(model: Model, prompt: Any = PROMPT, **options: Any) -> Result:
    return model.generate(prompt, **{"raw": True, "max_tokens": 12, "drafter": "none", **options})


class Opening:
    def __init__(self, files: ModelFiles) -> None:
        self.asked: list[tuple[int, ...]] = []
        self._files = files

    def __call__(self, taps: tuple[int, ...]) -> Engine:
        self.asked.append(taps)
        settings = EngineSettings(cache_tokens=2048, taps=taps)
        return open_engine("mlx", self._files.path, self._files.context_length, settings)


@pytest.fixture
def opening(loaded: Model) -> Opening:
    return Opening(loaded.files)


@pytest.fixture
def reopening(opening: Opening, loaded: Model) -> Model:
    return Model(loaded.files, loaded.engine, open_with=opening)


@pytest.fixture(scope="module")
def tapped(loaded: Model, dflash: str) -> Model:
    return Model(loaded.files, Opening(loaded.files)((0, 1)))


def test_taps_and_probes_change_no_token(tapped: Model, loaded: Model, dflash: str):
    result = plain(tapped, probe=dflash)
    assert result.token_ids == plain(loaded).token_ids
    assert result.stats.probe is not None
    assert result.stats.probe["dflash"]["drafted"] > 0


def test_drafters_named_when_loading_get_their_taps(checkpoint: Path, dflash: str):
    model = load(checkpoint, engine="mlx", cache_tokens=1024, drafters=("suffix", dflash))
    engine = model.engine
    assert engine.taps == (0, 1)
    assert plain(model, drafter=dflash).token_ids == plain(model).token_ids
    assert model.engine is engine


def test_a_missing_head_is_rejected_when_loading(checkpoint: Path, tmp_path: Path):
    with pytest.raises(InvalidRequest, match=r"dflash:NAME"):
        load(checkpoint, engine="mlx", drafters=("dflash",))
    with pytest.raises(ModelError, match=r"config\.json"):
        load(checkpoint, engine="mlx", drafters=(f"dflash:{tmp_path}",))


def test_a_head_for_another_engine_is_a_one_line_error(tiny_gguf: Path, dflash: str):
    with pytest.raises(ModelError, match="expected a GGUF file") as error:
        load(tiny_gguf, drafters=(dflash,))
    assert "\n" not in str(error.value)


def test_the_engine_reopens_once_for_a_drafter_that_needs_more_taps(
    reopening: Model, opening: Opening, dflash: str
):
    before, measured = reopening.engine, reopening.costs
    expected = plain(reopening).token_ids
    assert plain(reopening, drafter="suffix").token_ids == expected
    assert opening.asked == []
    for drafter in (dflash, f"suffix+{dflash}", "suffix", "none"):
        assert plain(reopening, drafter=drafter).token_ids == expected
        assert opening.asked == [(0, 1)]
    assert reopening.engine is not before
    assert reopening.costs is not measured


def test_taps_are_kept_once_added(opening: Opening, loaded: Model, tmp_path: Path, dflash: str):
    write_checkpoint(tmp_path, config_for(loaded.engine, taps=(1,)))
    model = Model(loaded.files, opening((1,)), open_with=opening)
    plain(model, drafter=f"dflash:{tmp_path}", max_tokens=5)
    plain(model, probe=dflash, max_tokens=5)
    plain(model, drafter=f"dflash:{tmp_path}", max_tokens=5)
    assert opening.asked == [(1,), (0, 1)]


def test_the_engine_is_not_reopened_during_a_response(
    reopening: Model, opening: Opening, dflash: str
):
    refused = pytest.raises(InvalidRequest, match=r"needs hidden states .*; name it when loading")
    chat = reopening.conversation()
    with reopening.stream(PROMPT, max_tokens=60, drafter="none", ignore_eos=True) as stream:
        next(stream)
        with refused:
            reopening.generate(PROMPT, drafter=dflash)
        with refused:
            chat.send("Hello", drafter=dflash)
        with refused:
            reopening.generate(PROMPT, drafter="none", probe=dflash)
        assert said(chat.send("Hello", max_tokens=5)).completion_tokens == 5, (
            "the chat is as it was"
        )
    assert opening.asked == []
    assert plain(reopening, max_tokens=5, drafter=dflash).completion_tokens == 5
    assert opening.asked == [(0, 1)]


def test_a_rejected_request_does_not_count_as_open(reopening: Model, opening: Opening, dflash: str):
    with pytest.raises(InvalidRequest):
        reopening.generate([-1])
    with pytest.raises(ModelError):
        reopening.generate(PROMPT, drafter="table:nothing")
    plain(reopening, max_tokens=5, drafter=dflash)
    assert opening.asked == [(0, 1)]


def test_a_drafter_for_another_target_is_rejected_and_frees_its_slots(
    tapped: Model, tmp_path: Path
):
    config = config_for(tapped.engine, hidden_size=128, num_target_layers=9, taps=(0, 1))
    write_checkpoint(tmp_path, config)
    with pytest.raises(ModelError, match="128, the target's 64"):
        tapped.generate(PROMPT, drafter=f"dflash:{tmp_path}")
    assert plain(tapped, max_tokens=5).completion_tokens == 5


def test_a_chat_with_hidden_state_drafts_matches_plain_decoding(tapped: Model, dflash: str):
    drafters = [dflash, "none", f"suffix+{dflash}", dflash]
    expected, found = tapped.conversation(), tapped.conversation()
    for turn, drafter in zip([*TURNS, "end"], drafters, strict=True):
        plainly = said(expected.send(turn, max_tokens=12, drafter="none"))
        stream = found.send(turn, max_tokens=12, drafter=drafter, policy="fixed")
        worker = Thread(target=said, args=[stream])  # each thread has MLX streams of its own
        worker.start()
        worker.join()
        assert stream.result.token_ids == plainly.token_ids
        assert (stream.result.stats.drafted > 0) == (drafter != "none")
    expected.close()
    found.close()


def test_concurrent_requests_match_plain_decoding(tapped: Model, dflash: str):
    expected = [plain(tapped, turn).token_ids for turn in TURNS]
    options: Any = {"raw": True, "max_tokens": 12, "drafter": f"suffix+{dflash},bits=4,window=9"}
    with closing(tapped.open_scheduler()) as scheduler:
        scheduler.start()
        sent = [
            Submitted(tapped, turn, policy=policy, **options)
            for policy in ("fixed", "auto")
            for turn in TURNS * 2
        ]
        assert [request.result().token_ids for request in sent] == expected * 4


def test_a_chats_draft_kv_is_rewound_with_the_chat(tapped: Model, dflash: str):
    options: Any = {"max_tokens": 12, "drafter": dflash, "policy": "fixed"}
    chat = tapped.conversation()
    said(chat.send(TURNS[0], **options))
    messages = chat.messages
    with chat.send(TURNS[1], **options) as stream:
        next(stream)
        next(stream)
    chat.messages = messages
    said(chat.send(TURNS[2], **options))
    newest = tapped.scheduler.prefix_cache._entries[-1]
    (cache,) = newest.memory.values()
    assert cache.positions == [*range(len(cache))], "each position once"
    chat.close()
