"""Specs of drafters: which they name, their options, and heads, which are opened once."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from paceline import plugins
from paceline.decoding.sampling import Sampling
from paceline.decoding.types import Drafter, Proposal
from paceline.drafters import (
    AnswerHistory,
    DrafterResources,
    DrafterSpec,
    DraftKV,
    RequestContext,
    create,
    taps,
)
from paceline.drafters import shipped as shipped_with
from paceline.drafters.ngram import NgramDrafter
from paceline.drafters.suffix import SuffixDrafter
from paceline.drafters.table import TableDrafter
from paceline.errors import InvalidRequest
from support.drafters import write_toy_table
from support.errors import raises


@pytest.mark.parametrize(
    ("spec", "kinds"),
    [
        ("none", []),
        ("ngram", [NgramDrafter]),
        ("ngram:", [NgramDrafter]),
        ("ngram:min=2,max=5", [NgramDrafter]),
        ("suffix", [SuffixDrafter]),
        ("ngram:length=3+suffix", [NgramDrafter, SuffixDrafter]),
        ("suffix+ngram", [SuffixDrafter, NgramDrafter]),
    ],
)
def test_a_spec_lists_drafters_in_order(spec: str, kinds: list[type]):
    assert [type(drafter) for drafter in create(spec)] == kinds


def test_auto_is_suffix_plus_the_targets_shipped_table(toy_table: Path):
    parse = DrafterSpec.parse
    assert [drafter.name for drafter in create(parse("auto").resolve({}))] == ["suffix"]
    assert str(parse("ngram").resolve({})) == "ngram"
    shared = DrafterResources(vocab_size=6, shipped={"table": toy_table})
    spec = parse("auto").resolve(shared.shipped)
    assert str(spec) == "suffix+table"
    assert [drafter.name for drafter in create(spec, shared)] == ["suffix", "table"]
    (named,) = create(f"table:{toy_table}", DrafterResources(vocab_size=6))
    assert isinstance(named, TableDrafter)
    with raises(InvalidRequest, "tiny"):
        create("table", DrafterResources(target="tiny"))


def test_a_table_is_opened_once_for_all_requests(tmp_path: Path):
    folder = write_toy_table(tmp_path, [[1, 2, 3] * 3], 6)
    shared = DrafterResources(vocab_size=6, shipped={"table": folder})
    create("table", shared)
    for path in folder.iterdir():
        path.unlink()
    assert create("table", shared)


def test_the_ngram_options_are_applied():
    text = [1, 2, 3, 7, 8, 9, 3, 5, 1, 2, 3]
    assert list(create("ngram:max=1,length=2")[0].propose(text, 9).tokens) == [5, 1]
    assert list(create("ngram:min=2,length=1")[0].propose(text, 9).tokens) == [7]
    assert list(create("ngram:min=4")[0].propose(text, 9).tokens) == []


def test_suffix_searches_earlier_responses_only_if_enabled():
    history = AnswerHistory()
    history.add([1, 2, 3])
    shared = DrafterResources(history=history)
    for spec, resources, tokens in (
        ("suffix:earlier", shared, [3]),
        ("suffix", shared, []),
        ("suffix:earlier", None, []),
    ):
        (drafter,) = create(spec, resources)
        assert list(drafter.propose([1, 2], 1).tokens) == tokens
    parse = DrafterSpec.parse
    assert parse("ngram+suffix:earlier").uses_earlier_answers
    assert not any(parse(spec).uses_earlier_answers for spec in ("none", "auto", "suffix"))


@pytest.mark.parametrize(
    ("spec", "value"),
    [
        ("eagle", "'eagle'"),
        ("", "''"),
        ("ngram+none", "not none or auto"),
        ("ngram:size=3", "'size'; expected length, max, min"),
        ("ngram:min=3,min=4", "'min'; expected length, max, min, each once"),
        ("kept:min=1", "kept has no option 'min=1'"),
        ("suffix:later", "'later'; expected earlier"),
        ("ngram:min=two", "min is 'two'"),
        ("ngram:min=0", "min=0, max=4"),
        ("ngram:length=0", "length=0; expected 1 to 64"),
        ("suffix+ngram+suffix", "3 parts"),
        ("+".join(f"ngram:length={n}" for n in range(1, 10)), "9 parts"),
    ],
)
def test_an_invalid_spec_is_rejected_by_name(spec: str, value: str):
    for refuse in (DrafterSpec.parse, create):
        with raises(InvalidRequest, value):
            refuse(spec)


class Cache:
    def __init__(self) -> None:
        self.cut: int | None = None

    def copy(self, position: int) -> "Cache":
        copied = Cache()
        copied.cut = position
        return copied

    def truncate(self, position: int) -> None:
        self.cut = position


class Echo(Drafter):
    name = "echo"

    def __init__(self, cache: Cache) -> None:
        self.cache = cache

    def propose(self, context: Sequence[int], limit: int) -> Proposal:
        return Proposal([context[-1]] * limit, self.name)


class EchoKind:
    options: Mapping[str, Sequence[int]] = {"bits": (4, 8), "window": ()}

    def __init__(self) -> None:
        self.opened: list[tuple[Path, Any, Mapping[str, int]]] = []

    def is_inside(self, target: Path) -> bool:
        return (target / "echo").exists()

    def taps(self, folder: Path, target: Path) -> tuple[int, ...]:
        return (len(folder.name),)

    def open(self, folder: Path, engine: Any, options: Mapping[str, int]) -> Any:
        self.opened.append((folder, engine, options))

        def drafter(cache: Cache, sampling: Sampling, prompt_length: int) -> Drafter:
            return Echo(cache)

        return SimpleNamespace(taps=(5,), new_cache=Cache, drafter=drafter)

    def facts(self, folder: Path) -> None:
        return None


@pytest.fixture
def kind(monkeypatch: pytest.MonkeyPatch) -> EchoKind:
    echo = EchoKind()
    monkeypatch.setattr(plugins, "names", lambda _: ["toy.echo"])
    monkeypatch.setattr(plugins, "load", lambda *_: echo)
    return echo


@pytest.mark.parametrize("spec", ["echo:x,window=8", "suffix+echo:x,window=8"])
def test_a_head_is_opened_once_for_all_requests(kind: EchoKind, spec: str):
    shared = DrafterResources(engine="toy", opened="the engine")
    assert taps(spec, shared) == (1,)
    first, second = (create(spec, shared)[-1] for _ in range(2))
    assert first is not second
    assert kind.opened == [(Path("x"), "the engine", {"window": 8})]
    assert taps(spec, shared) == (5,)


def test_the_draft_heads_cache_is_kept_per_sequence(kind: EchoKind):
    shared, memory = DrafterResources(engine="toy"), DraftKV()
    first: Any = create("echo:x", shared, RequestContext(memory))[0]
    shared.heads["echo:x"].new_cache = None  # type: ignore[assignment, method-assign]
    second: Any = create("echo:x", shared, RequestContext(memory))[0]
    other: Any = create("echo:y", shared, RequestContext(memory))[0]
    assert first.cache is second.cache is not other.cache
    memory.truncate(7)
    assert first.cache.cut == other.cache.cut == 7
    assert all(cache.cut == 3 for cache in memory.copy_prefix(3).values())  # type: ignore[attr-defined]


def test_auto_uses_the_targets_built_in_head(kind: EchoKind, tmp_path: Path):
    (tmp_path / "echo").touch()
    shipped = shipped_with("x", tmp_path, "toy")
    assert shipped == {"echo": tmp_path}
    assert shipped_with("x", tmp_path, "llamacpp") == {}
    spec = DrafterSpec.parse("auto").resolve(shipped)
    assert str(spec) == "suffix+echo"
    create(spec, DrafterResources(engine="toy", shipped=shipped))
    assert kind.opened[0][0] == tmp_path


@pytest.mark.parametrize(
    ("spec", "engine", "words"),
    [
        ("suffix+echo:x", "llamacpp", ("echo", "engine toy", "tiny", "llamacpp")),
        ("echo", "toy", ("tiny", "echo:NAME")),  # there is none inside the target
        ("echo:window=64", "toy", ("tiny", "echo:NAME")),
    ],
)
def test_an_unusable_head_is_rejected_by_name(
    kind: EchoKind, spec: str, engine: str, words: tuple[str, ...]
):
    shared = DrafterResources(target="tiny", engine=engine)
    for refuse in (create, taps):
        with raises(InvalidRequest, *words):
            refuse(spec, shared)
    assert not kind.opened


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ("dflash:x,window=0", "dflash has window=0; expected 1 or more"),
        ("dflash:x,window", "option window is ''; expected a number"),
        ("dflash:x,block=4", "drafter dflash has no option 'block'; expected bits, window"),
        ("dflash:x,bits=3", "dflash has bits=3; expected 4 or 8"),
        ("mtp:window=9", "drafter mtp has no option 'window'; expected bits, length, vocab"),
    ],
)
def test_an_invalid_option_is_rejected_before_files_are_opened(spec: str, reason: str):
    for refuse in (DrafterSpec.parse, create, lambda spec: taps(spec, DrafterResources())):
        with raises(InvalidRequest, reason):
            refuse(spec)
    for refuse in (create, taps):  # an option of another engine's heads
        with raises(InvalidRequest, "no option 'vocab'", "llamacpp", "expected length"):
            refuse("mtp:x,length=2,vocab=9", DrafterResources(engine="llamacpp"))


def test_a_folder_name_may_contain_option_characters():
    part = DrafterSpec.parse("dflash:/models/a=b/c,window=9").parts[0]
    assert (part.name, part.options) == ("/models/a=b/c", {"window": 9})
