"""Drafters that read the target's hidden states, and the engine opened again for their taps."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.engines import EngineSettings, open_engine
from paceline.engines.base import Engine
from paceline.errors import InvalidRequest, ModelError
from paceline.models import ModelFiles
from paceline.options import Options
from paceline.runtime.load import load
from paceline.runtime.model import Model
from paceline.runtime.stream import run_together
from support.dflash import tiny_config, write_checkpoint
from support.plain import PROMPT, PROMPTS, SAMPLED, plain, said


@pytest.fixture(scope="module")
def dflash(tiny_files: ModelFiles, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The spec of a drafter that fits the tiny model, and knows nothing but five letters of it."""
    folder = tmp_path_factory.mktemp("dflash")
    letters = tiny_files.tokenizer().encode("tTWwe")
    write_checkpoint(folder, tiny_config(tiny_files), draft_vocab=sorted(letters))
    return f"dflash:{folder}"


@pytest.fixture(scope="module")
def tapped_engine(tiny_files: ModelFiles) -> Engine:
    settings = EngineSettings(cache_tokens=8 * tiny_files.context_length, taps=(0, 1))
    return open_engine("openvino", tiny_files.path, tiny_files.context_length, settings)


@pytest.fixture
def tapped(tapped_engine: Engine, tiny_files: ModelFiles, cache: Path) -> Iterator[Model]:
    free = tapped_engine.free_slots
    yield Model(tiny_files, tapped_engine)
    assert tapped_engine.free_slots == free


class Opening:
    """Opens engines for a model, and notes with which taps."""

    def __init__(self, files: ModelFiles) -> None:
        self.asked: list[tuple[int, ...]] = []
        self._files = files

    def __call__(self, taps: tuple[int, ...]) -> Engine:
        self.asked.append(taps)
        settings = EngineSettings(cache_tokens=2 * self._files.context_length, taps=taps)
        return open_engine("openvino", self._files.path, self._files.context_length, settings)


@pytest.fixture
def opening(tiny_files: ModelFiles, cache: Path) -> Opening:
    return Opening(tiny_files)


@pytest.fixture
def reopening(opening: Opening, tiny_model: Model) -> Model:
    """A model without taps whose engine can be opened again."""
    return Model(tiny_model.files, tiny_model.engine, open_with=opening)


@pytest.mark.parametrize("policy", ["fixed", "auto"])
@pytest.mark.parametrize("sampling", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_a_drafter_that_reads_hidden_states_changes_no_token(
    tapped: Model, dflash: str, sampling: Options, policy: str
):
    drafted = 0
    for prompt in PROMPTS:
        expected = plain(tapped, prompt, **sampling)
        for spec in (dflash, f"suffix+{dflash},window=16,int8=0"):
            found = plain(tapped, prompt, **sampling, drafter=spec, policy=policy, max_block=5)
            assert (found.token_ids, found.text) == (expected.token_ids, expected.text)
            assert found.exact
            assert found.drafter == spec
            drafted += found.stats.drafted_by.get("dflash", 0)
    assert drafted > 0


def test_taps_change_no_token(tapped: Model, model: Model):
    assert plain(tapped).token_ids == plain(model).token_ids


def test_with_hidden_states_streams_may_be_interleaved_and_run_together(tapped: Model, dflash: str):
    expected = [plain(tapped, prompt).token_ids for prompt in PROMPTS]
    options: Options = {"max_tokens": 60, "drafter": dflash, "policy": "fixed"}
    going = streams = [tapped.stream(prompt, **options) for prompt in PROMPTS]
    while going:
        going = [stream for stream in going if next(stream, None) is not None]
    together = [tapped.stream(prompt, **options) for prompt in PROMPTS]
    run_together(together)
    assert [stream.result.token_ids for stream in streams] == expected
    assert [stream.result.token_ids for stream in together] == expected


def test_a_probe_sees_hidden_states(tapped: Model, dflash: str):
    found = plain(tapped, probe=dflash)
    assert found.token_ids == plain(tapped).token_ids
    assert found.stats.probe is not None
    assert found.stats.probe["dflash"]["drafted"] > 0


def test_drafters_named_when_loading_get_their_taps(tiny_gguf: Path, cache: Path, dflash: str):
    model = load(tiny_gguf, drafters=("suffix", dflash))
    engine = model.engine
    assert engine.taps == (0, 1)
    assert plain(model, drafter=dflash).token_ids == plain(model).token_ids
    assert model.engine is engine
    assert load(tiny_gguf).engine.taps == ()


def test_an_unknown_drafter_is_rejected_when_loading(tiny_gguf: Path, cache: Path):
    with pytest.raises(InvalidRequest, match=r"dflash:FOLDER"):
        load(tiny_gguf, drafters=("dflash",))
    with pytest.raises(ModelError, match=r"config\.json"):
        load(tiny_gguf, drafters=(f"dflash:{cache}",))


def test_the_engine_is_opened_again_once_for_a_drafter_that_needs_more(
    reopening: Model, opening: Opening, dflash: str
):
    before, measured = reopening.engine, reopening.profile
    expected = plain(reopening).token_ids
    assert plain(reopening, drafter="suffix").token_ids == expected
    assert opening.asked == []
    for drafter in (dflash, f"suffix+{dflash}", "suffix", "none"):
        assert plain(reopening, drafter=drafter).token_ids == expected
        assert opening.asked == [(0, 1)]
    assert reopening.engine is not before
    assert reopening.profile is not measured


def test_layers_that_were_tapped_stay_so(
    opening: Opening, tiny_files: ModelFiles, tmp_path: Path, dflash: str
):
    one = tiny_config(tiny_files, target_layer_ids=(1,))
    write_checkpoint(tmp_path, one)
    model = Model(tiny_files, opening((1,)), open_with=opening)
    plain(model, drafter=f"dflash:{tmp_path}", max_tokens=5)
    plain(model, probe=dflash, max_tokens=5)
    plain(model, drafter=f"dflash:{tmp_path}", max_tokens=5)
    assert opening.asked == [(1,), (0, 1)]


def test_while_something_is_open_the_engine_is_not_opened_again(
    reopening: Model, opening: Opening, dflash: str
):
    refused = pytest.raises(InvalidRequest, match=r"needs hidden states .*; name it when loading")
    with reopening.stream(PROMPT, max_tokens=5, drafter="none") as stream:
        next(stream)
        with refused:
            reopening.generate(PROMPT, drafter=dflash)
    chat = reopening.conversation()
    with refused:
        reopening.generate(PROMPT, drafter=dflash)
    with refused:
        chat.say("Hello", drafter=dflash)
    with refused:
        reopening.generate(PROMPT, drafter="none", probe=dflash)
    assert said(chat.say("Hello", max_tokens=5)).completion_tokens == 5, "the chat is as it was"
    assert opening.asked == []
    chat.close()
    chat.close()
    assert plain(reopening, max_tokens=5, drafter=dflash).completion_tokens == 5
    assert opening.asked == [(0, 1)]


def test_an_engine_that_cannot_be_opened_again_is_not(model: Model, dflash: str):
    with pytest.raises(InvalidRequest, match="name it when loading"):
        model.generate(PROMPT, drafter=dflash)


@pytest.mark.parametrize(
    ("prompt", "options"),
    [([5] * 512, {}), ([-1], {}), (PROMPT, {"drafter": "table:nothing"})],
    ids=["too long", "no token", "no drafter"],
)
def test_a_rejected_request_does_not_count_as_open(
    reopening: Model, opening: Opening, dflash: str, prompt: Any, options: Any
):
    with pytest.raises((InvalidRequest, ModelError)):
        reopening.generate(prompt, **options)
    plain(reopening, max_tokens=5, drafter=dflash)
    assert opening.asked == [(0, 1)]


def test_a_drafter_for_another_target_is_rejected_and_frees_its_slots(
    tapped: Model, tmp_path: Path
):
    config = tiny_config(tapped.files, hidden_size=128, num_target_layers=9)
    write_checkpoint(tmp_path, config)
    with pytest.raises(ModelError, match="128, the target's 64"):
        tapped.generate(PROMPT, drafter=f"dflash:{tmp_path}")
    assert plain(tapped, max_tokens=5).completion_tokens == 5


TURNS = ["Hello", "and the next one", "is this the one?"]


@pytest.mark.parametrize("ways", ["dddd", "dndd", "dsdn", "nddd"])
def test_a_chat_drafted_from_hidden_states_has_the_tokens_of_plain_decoding(
    tapped: Model, dflash: str, ways: str
):
    drafters = {"d": dflash, "n": "none", "s": f"suffix+{dflash}"}
    expected, found = tapped.conversation(), tapped.conversation()
    for turn, way in zip([*TURNS, "end"], ways, strict=True):
        plainly = said(expected.say(turn, max_tokens=25, drafter="none"))
        options: Any = {"max_tokens": 25, "drafter": drafters[way], "policy": "fixed"}
        drafted = said(found.say(turn, **options))
        assert drafted.token_ids == plainly.token_ids
        assert (drafted.stats.drafted > 0) == (way != "n")
    expected.close()
    found.close()


def test_a_removed_turn_is_removed_from_the_drafters_state(tapped: Model, dflash: str):
    options: Any = {"max_tokens": 25, "drafter": dflash, "policy": "fixed"}
    chat = tapped.conversation()
    said(chat.say(TURNS[0], **options))
    before = chat.messages
    said(chat.say(TURNS[1], **options))
    chat.messages = before
    again = said(chat.say(TURNS[2], **options))
    chat.close()
    fresh = tapped.conversation(before)
    expected = said(fresh.say(TURNS[2], **options))
    assert again.token_ids == expected.token_ids
    # And the drafter saw the same: the fresh one read what the other had kept.
    assert again.stats.drafted_by == expected.stats.drafted_by
    assert again.stats.accepted_by == expected.stats.accepted_by
    fresh.close()


def test_a_turn_that_was_closed_early_is_kept_up_to_its_last_token(tapped: Model, dflash: str):
    options: Any = {"max_tokens": 25, "drafter": dflash, "policy": "fixed"}
    chat = tapped.conversation()
    with chat.say(TURNS[0], **options) as stream:
        next(stream)
        next(stream)
    messages = chat.messages
    found = said(chat.say(TURNS[1], **options))
    chat.close()
    fresh = tapped.conversation(messages)
    expected = said(fresh.say(TURNS[1], **options))
    assert found.token_ids == expected.token_ids
    assert found.stats.accepted_by == expected.stats.accepted_by
    fresh.close()
