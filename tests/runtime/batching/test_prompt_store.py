"""KV of prompts on disk: the same tokens after a restart, and faults of files and of the disk."""

import logging
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from paceline.engines.base import KVSequence
from paceline.models import ModelFiles
from paceline.runtime.batching.prompt_store import PromptStore
from paceline.runtime.load import load
from paceline.runtime.model import Model
from paceline.server.settings import Settings
from support.server import Running, running

PROMPT = " ".join(f"{word} {number % 7}" for number, word in enumerate(["the", "rain", "a"] * 31))
LIMIT = 1 << 30


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path))
    return tmp_path / "prompts"


@pytest.fixture
def model(tiny_ir: ModelFiles) -> Model:
    return load(tiny_ir.path, cache_tokens=2048)


def ask(server: Running, **more: object) -> tuple[str, int]:
    """The answer, and how many tokens of the prompt were not computed."""
    body = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0, **more}
    response = server.post("/v1/completions", body).json()
    return response["choices"][0]["text"], response["usage"]["prompt_tokens_details"][
        "cached_tokens"
    ]


def files(cache: Path) -> list[Path]:
    return sorted(cache.glob("*/*.kv"))


def test_a_prompt_is_read_once_and_gives_the_same_tokens_after_a_restart(
    cache: Path, model: Model, tiny_ir: ModelFiles
):
    settings = Settings(prompt_cache_bytes=LIMIT)
    with running(model, settings) as server:
        text, cached = ask(server)
        assert cached == 0
    assert len(files(cache)) >= 3
    for drafter in ("none", "suffix", "ngram:min=1"):
        with running(load(tiny_ir.path, cache_tokens=2048), settings) as server:
            again, cached = ask(server, speculation={"drafter": drafter})
            assert again == text
            assert cached == 128 * len(files(cache))
    with running(load(tiny_ir.path, cache_tokens=2048)) as server:
        assert ask(server) == (text, 0)
    assert files(cache)[0].parent.stat().st_mode & 0o077 == 0, "others can read prompts"


def test_salted_requests_and_those_without_a_cache_are_not_kept(cache: Path, model: Model):
    with running(model, Settings(prompt_cache_bytes=LIMIT)) as server:
        ask(server, cache_salt="a")
        ask(server, cache_prompt=False)
    assert files(cache) == []


@pytest.fixture
def kept(cache: Path, model: Model) -> Iterator[tuple[PromptStore, Model, np.ndarray]]:
    """A store with the files of a prompt of 300 tokens."""
    tokens = np.arange(300) % 200
    store = PromptStore(cache, model.engine, "model", LIMIT)
    sequence = prefilled(model, tokens)
    store.save(sequence, tokens)
    store.close()
    sequence.close()
    assert len(files(cache)) == 2
    yield store, model, tokens
    assert model.engine.free_slots == 2048, "slots were lost"


def prefilled(model: Model, tokens: np.ndarray) -> KVSequence:
    from paceline.decoding.types import Block

    sequence = model.engine.open()
    model.engine.step([(sequence, Block(tokens.tolist(), 0, prefill=True))])
    sequence.commit(len(tokens))
    return sequence


def restored(store: PromptStore, model: Model, tokens: np.ndarray) -> int:
    sequence = model.engine.open()
    added = store.extend(sequence, tokens)
    assert added == sequence.length
    sequence.close()
    return added


def test_kv_from_disk_is_that_of_a_prefill_bit_for_bit(kept: tuple[PromptStore, Model, np.ndarray]):
    store, model, tokens = kept
    whole = prefilled(model, tokens)
    sequence = model.engine.open()
    store.extend(sequence, tokens)
    mine, theirs = (
        model.engine.kv_of(item, 0, 256)  # type: ignore[attr-defined]
        for item in (sequence, whole)
    )
    assert mine.keys() == theirs.keys()
    assert all(np.array_equal(mine[name], theirs[name]) for name in mine)
    assert sequence.shareable_length == 256
    sequence.close()
    whole.close()


def test_as_much_as_the_prompt_shares_is_read_and_the_last_token_never(
    kept: tuple[PromptStore, Model, np.ndarray],
):
    store, model, tokens = kept
    other = tokens.copy()
    other[200] += 1
    assert restored(store, model, other) == 128
    assert restored(store, model, tokens[1:]) == 0
    assert restored(store, model, tokens[:256]) == 128
    assert restored(store, model, tokens[:257]) == 256


@pytest.mark.parametrize("how", ["cut", "flipped", "foreign", "version", "empty", "of another"])
def test_a_damaged_file_is_ignored_with_a_line_and_removed(
    how: str,
    cache: Path,
    kept: tuple[PromptStore, Model, np.ndarray],
    caplog: pytest.LogCaptureFixture,
):
    store, model, tokens = kept
    path = min(files(cache), key=lambda item: item.stat().st_mtime_ns)
    content = path.read_bytes()
    damaged = {
        "cut": content[:-100],
        "flipped": content[:-5] + bytes([content[-5] ^ 1]) + content[-4:],
        "foreign": b"\x89PNG\r\n" + content,
        "version": content.replace(b"paceline-kv 1", b"paceline-kv 0", 1),
        "empty": b"",
        "of another": content.replace(b'"F16"', b'"I16"'),
    }
    path.write_bytes(damaged[how])
    with caplog.at_level(logging.WARNING):
        assert restored(store, model, tokens) == 0
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert not path.exists()


def test_another_model_or_engine_has_files_of_its_own(
    cache: Path, kept: tuple[PromptStore, Model, np.ndarray]
):
    _, model, tokens = kept
    assert restored(PromptStore(cache, model.engine, "other", LIMIT), model, tokens) == 0
    single = load(model.files.path, rows=1, cache_tokens=512)
    assert restored(PromptStore(cache, single.engine, "model", LIMIT), single, tokens) == 0


def test_a_full_cache_takes_what_fits(cache: Path, kept: tuple[PromptStore, Model, np.ndarray]):
    store, model, tokens = kept
    others = [prefilled(model, np.arange(300)) for _ in range(6)]
    assert restored(store, model, tokens) == 128
    for other in others:
        other.close()


def test_the_least_recently_used_files_go_first(cache: Path, model: Model):
    store = PromptStore(cache, model.engine, "model", LIMIT)
    for start in (0, 1, 2):
        tokens = np.arange(start, start + 140)
        sequence = prefilled(model, tokens)
        store.save(sequence, tokens)
        store.close()
        sequence.close()
    one = files(cache)[0].stat().st_size
    for number, path in enumerate(sorted(files(cache), key=lambda item: item.stat().st_mtime_ns)):
        os.utime(path, (number, number))
    used = PromptStore(cache, model.engine, "model", LIMIT)
    assert restored(used, model, np.arange(140)) == 128  # now the newest
    small = PromptStore(cache, model.engine, "model", int(2.5 * one))
    assert len(files(cache)) == 2
    assert restored(small, model, np.arange(140)) == 128


def test_a_folder_that_cannot_be_made_is_one_warning(
    cache: Path, model: Model, caplog: pytest.LogCaptureFixture
):
    cache.write_text("a file")
    with (
        caplog.at_level(logging.WARNING),
        running(model, Settings(prompt_cache_bytes=LIMIT)) as server,
    ):
        assert ask(server)[1] == 0
    assert len([r for r in caplog.records if "prompts are not kept" in r.getMessage()]) == 1
