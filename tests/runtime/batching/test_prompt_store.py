"""Prompt KV on disk: the same tokens after a restart, and errors of files and of the disk."""

import errno
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.decoding.types import Block
from paceline.engines.base import EngineSettings, KVSequence
from paceline.engines.llamacpp.engine import LlamaCppEngine
from paceline.models import ModelFiles
from paceline.runtime.batching.prompt_store import PromptStore
from paceline.runtime.load import load
from paceline.runtime.model import Model
from paceline.server.settings import Settings
from support.families import write_gguf_of
from support.process import python
from support.server import Running, running

PROMPT = " ".join(f"{word} {number % 7}" for number, word in enumerate(["the", "rain", "a"] * 31))
LIMIT = 1 << 30
TOKENS = np.arange(300) % 200
SETTINGS = Settings(prompt_cache=LIMIT / 1e9)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path))
    return tmp_path / "prompts"


@pytest.fixture(scope="module")
def alone(tiny_files: ModelFiles, tiny_cache: Path) -> Model:
    """The tiny model in the library that runs one sequence per forward pass."""
    return loaded(tiny_files, tiny_cache, 1)


@pytest.fixture(scope="module")
def four(tiny_files: ModelFiles, tiny_cache: Path) -> Model:
    """The tiny model in the library with four sequences per forward pass."""
    return loaded(tiny_files, tiny_cache, 4)


def loaded(files: ModelFiles, cache: Path, parallel: int) -> Model:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PACELINE_CACHE", str(cache))
        return load(files.path, cache_tokens=2048, parallel=parallel)


@pytest.fixture
def model(request: pytest.FixtureRequest, cache: Path) -> Iterator[Model]:
    name: str = getattr(request, "param", "alone")
    model: Model = request.getfixturevalue(name)
    yield model.without_history()
    assert model.engine.free_slots == 2048, "slots were lost"


BOTH = pytest.mark.parametrize("model", ["alone", "four"], indirect=True)


def ask(server: Running, prompt: str = PROMPT, **more: object) -> tuple[str, int]:
    """Return the response, and the number of cached prompt tokens."""
    body = {"prompt": prompt, "max_tokens": 12, "temperature": 0, **more}
    response = server.post("/v1/completions", body).json()
    usage = response["usage"]["prompt_tokens_details"]
    return response["choices"][0]["text"], usage["cached_tokens"]


def files(cache: Path) -> list[Path]:
    return sorted(cache.glob("*/*.kv"))


@BOTH
def test_a_stored_prompt_gives_the_same_tokens_after_a_restart(
    cache: Path, model: Model, tiny_files: ModelFiles
):
    with running(model) as server:
        plain = [ask(server, PROMPT + end)[0] for end in ("", " and one", " 5 or two")]
    with running(model.without_history(), SETTINGS) as server:
        assert ask(server) == (plain[0], 0)
    (path,) = files(cache)
    assert path.parent.stat().st_mode & 0o077 == 0, "others can read prompts"
    again = f"""
from paceline.runtime.load import load
import sys
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
from support.families import write_gguf_of
from support.server import running
from paceline.server.settings import Settings
from runtime.batching.test_prompt_store import PROMPT, SETTINGS, ask
model = load({str(tiny_files.path)!r}, cache_tokens=2048, parallel={model.engine._parallel})
with running(model, SETTINGS) as server:
    for end in ("", " and one", " 5 or two"):
        text, cached = ask(server, PROMPT + end, speculation={{"drafter": "ngram:min=1"}})
        print(repr((text, cached)))
"""
    lines = python("-c", again).stdout.splitlines()
    told = [eval(line) for line in lines if line.startswith("(")]
    assert [text for text, _ in told] == plain
    assert all(cached > 250 for _, cached in told)


def test_salted_and_uncached_requests_are_not_stored(cache: Path, model: Model):
    with running(model, SETTINGS) as server:
        ask(server, cache_salt="a")
        ask(server, cache_prompt=False)
    assert files(cache) == []


def test_a_salted_request_does_not_use_stored_prompts(cache: Path, model: Model):
    with running(model, SETTINGS) as server:
        ask(server)
    with running(model.without_history(), SETTINGS) as server:
        assert ask(server, cache_salt="a")[1] == 0


Kept = tuple[PromptStore, Model]


@pytest.fixture
def kept(cache: Path, model: Model) -> Kept:
    """The file of a 300-token prompt, and a store opened after it was written."""
    store = PromptStore(cache, model.engine, "model", LIMIT)
    keep(store, model, TOKENS)
    store.close()
    return PromptStore(cache, model.engine, "model", LIMIT), model


def keep(store: PromptStore, model: Model, tokens: np.ndarray) -> None:
    sequence = prefilled(model, tokens)
    store.save(sequence, tokens)
    sequence.close()


def prefilled(model: Model, tokens: np.ndarray) -> KVSequence:
    sequence = model.engine.open()
    model.engine.step([(sequence, Block(tokens.tolist(), 0, prefill=True))])
    sequence.commit(len(tokens))
    return sequence


def restored(store: PromptStore, model: Model, tokens: np.ndarray) -> int:
    free = model.engine.free_slots
    sequence = model.engine.open()
    added = store.extend(sequence, tokens)
    assert added == sequence.length == sequence.shareable_length
    sequence.close()
    assert model.engine.free_slots == free, "slots were lost"
    return added


@BOTH
def test_rows_after_a_stored_state_are_bit_identical_to_a_prefill(kept: Kept):
    store, model = kept
    for length in (300, 211):
        tokens = np.append(TOKENS[:length], [9, 8, 7])
        whole, sequence = prefilled(model, tokens[:length]), model.engine.open()
        assert store.extend(sequence, tokens) == length
        mine, theirs = (
            model.engine.step([(item, Block([4, 5, 6], 3))]).logits[0].copy()
            for item in (sequence, whole)
        )
        assert np.array_equal(mine, theirs)
        sequence.close()
        whole.close()


@BOTH
def test_only_the_shared_part_is_read_and_never_the_last_token(kept: Kept):
    store, model = kept
    other = TOKENS.copy()
    other[200] += 1
    assert restored(store, model, other) == 200
    assert restored(store, model, TOKENS) == 299
    assert restored(store, model, TOKENS[1:]) == 0
    assert restored(store, model, TOKENS[:100]) == 0, "too few to be worth it"


def foreign(path: Path) -> None:
    with np.load(path) as arrays:
        content = dict(arrays)
    with path.open("wb") as file:
        np.savez(file, **{**content, "identity": np.array("another")})


def unreadable(path: Path) -> None:
    """Right by its checksum, and no state of this library."""
    with np.load(path) as arrays:
        content = dict(arrays)
    with path.open("wb") as file:
        np.savez(file, **{**content, "state": content["state"][:-64]})


def damaged(change: Callable[[bytes], bytes]) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(change(path.read_bytes()))


@pytest.mark.parametrize(
    "damage",
    [
        damaged(lambda content: content[: len(content) // 2]),
        damaged(lambda content: content[:5000] + bytes([content[5000] ^ 1]) + content[5001:]),
        damaged(lambda _: b""),
        foreign,
        unreadable,
    ],
    ids=["half-written", "flipped", "empty", "foreign", "unreadable"],
)
def test_an_unusable_prompt_file_is_ignored_with_a_warning_and_deleted(
    damage: Callable[[Path], object], cache: Path, kept: Kept, caplog: pytest.LogCaptureFixture
):
    (path,) = files(cache)
    damage(path)
    with caplog.at_level(logging.WARNING):
        assert restored(PromptStore(cache, kept[1].engine, "model", LIMIT), kept[1], TOKENS) == 0
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert not path.exists()


def test_each_model_and_library_has_separate_prompt_files(cache: Path, kept: Kept, four: Model):
    _, model = kept
    assert restored(PromptStore(cache, model.engine, "other", LIMIT), model, TOKENS) == 0
    assert restored(PromptStore(cache, four.engine, "model", LIMIT), four, TOKENS) == 0


def test_a_full_cache_stores_nothing(kept: Kept):
    store, model = kept
    others = [prefilled(model, np.arange(300)) for _ in range(6)]
    assert restored(store, model, TOKENS) == 0
    for other in others:
        other.close()


def test_the_least_recently_used_files_are_deleted_first(cache: Path, model: Model):
    for number in range(3):
        store = PromptStore(cache, model.engine, "model", LIMIT)
        keep(store, model, np.arange(number, number + 140))
        store.close()
    one = files(cache)[0].stat().st_size
    for number, path in enumerate(sorted(files(cache), key=lambda item: item.stat().st_mtime_ns)):
        os.utime(path, (number, number))
    used = PromptStore(cache, model.engine, "model", LIMIT)
    assert restored(used, model, np.arange(140)) == 139  # now the newest
    small = PromptStore(cache, model.engine, "model", int(2.5 * one))
    assert len(files(cache)) == 2
    assert restored(small, model, np.arange(140)) == 139


def test_a_growing_chat_is_stored_again_after_growing_by_a_third(cache: Path, model: Model):
    for length, count in ((200, 1), (240, 1), (300, 2)):
        store = PromptStore(cache, model.engine, "model", LIMIT)
        keep(store, model, TOKENS[:length])
        store.close()
        assert len(files(cache)) == count


@pytest.mark.parametrize("call", ["mkdir", "glob", "write_bytes", "replace", "stat", "unlink"])
def test_a_failing_disk_changes_no_response_and_is_a_one_line_warning(
    call: str,
    cache: Path,
    model: Model,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
):
    with running(model) as server:
        plain = ask(server)[0]
    with running(model.without_history(), SETTINGS) as server:
        ask(server)
    original = getattr(Path, call)

    def fail(path: Path, *arguments: Any, **options: Any) -> Any:
        if cache in (path, *path.parents):
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        return original(path, *arguments, **options)

    if call in ("write_bytes", "replace"):
        (path,) = files(cache)
        path.unlink()
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(Path, call, fail)
        with running(model.without_history(), SETTINGS) as server:
            assert ask(server)[0] == plain
    assert len([r for r in caplog.records if r.name == "paceline.server"]) <= 1, caplog.text
    with running(model.without_history(), SETTINGS) as server:
        assert ask(server)[0] == plain, "it works again"


def test_prompts_of_recurrent_models_are_not_stored_with_a_warning(
    cache: Path, caplog: pytest.LogCaptureFixture
):
    path = write_gguf_of("lfm2", cache.parent / "lfm2.gguf")
    settings = EngineSettings(cache_tokens=1024, threads=1)
    with closing(LlamaCppEngine(path, 512, settings)) as engine, caplog.at_level(logging.WARNING):
        store = PromptStore(cache, engine, "model", LIMIT)
        assert len(caplog.records) == 1
        with closing(engine.open()) as sequence:
            engine.step([(sequence, Block(TOKENS.tolist(), 0, prefill=True))])
            sequence.commit(300)
            store.save(sequence, TOKENS)
            assert store.extend(sequence, np.append(TOKENS, TOKENS)) == 0
    assert files(cache) == []
