"""Heads in specs of drafters: whose they are, their options, and one that is opened once."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from paceline import plugins
from paceline.decoding.sampling import Sampling
from paceline.decoding.types import Drafter, Proposal
from paceline.drafters import DrafterResources, DrafterSpec, DraftKV, RequestContext, create, taps
from paceline.drafters import shipped as shipped_with
from paceline.errors import InvalidRequest
from support.errors import raises


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


def test_a_sequence_keeps_the_cache_of_its_head(kind: EchoKind):
    shared, memory = DrafterResources(engine="toy"), DraftKV()
    first: Any = create("echo:x", shared, RequestContext(memory))[0]
    shared.heads["echo:x"].new_cache = None  # type: ignore[assignment, method-assign]
    second: Any = create("echo:x", shared, RequestContext(memory))[0]
    other: Any = create("echo:y", shared, RequestContext(memory))[0]
    assert first.cache is second.cache is not other.cache
    memory.truncate(7)
    assert first.cache.cut == other.cache.cut == 7
    assert all(cache.cut == 3 for cache in memory.copy_prefix(3).values())  # type: ignore[attr-defined]


def test_auto_has_the_head_inside_a_target_of_its_engine(kind: EchoKind, tmp_path: Path):
    (tmp_path / "echo").touch()
    shipped = shipped_with("x", tmp_path, "toy")
    assert shipped == {"echo": tmp_path}
    assert shipped_with("x", tmp_path, "llamacpp") == {}
    spec = DrafterSpec.parse("auto").resolve(shipped)
    assert str(spec) == "suffix+echo"
    create(spec, DrafterResources(engine="toy", shipped=shipped))
    assert kind.opened[0][0] == tmp_path


def test_a_head_of_another_engine_is_refused_by_the_name_of_its_own(kind: EchoKind):
    shared = DrafterResources(target="tiny", engine="llamacpp")
    for refuse in (create, taps):
        with raises(InvalidRequest, "echo", "engine toy", "tiny", "llamacpp"):
            refuse("suffix+echo:x", shared)
    assert not kind.opened


@pytest.mark.parametrize("spec", ["echo", "echo:window=64"])
def test_without_a_head_inside_a_folder_is_required(kind: EchoKind, spec: str):
    shared = DrafterResources(target="tiny", engine="toy")
    for refuse in (create, taps):
        with raises(InvalidRequest, "tiny", "echo:NAME"):
            refuse(spec, shared)


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


def test_a_folder_may_have_the_sign_of_an_option_in_its_name():
    part = DrafterSpec.parse("dflash:/models/a=b/c,window=9").parts[0]
    assert (part.name, part.options) == ("/models/a=b/c", {"window": 9})


def test_an_option_of_another_engine_s_heads_is_refused():
    for refuse in (create, taps):
        with raises(InvalidRequest, "no option 'vocab'", "llamacpp", "expected length"):
            refuse("mtp:x,length=2,vocab=9", DrafterResources(engine="llamacpp"))
