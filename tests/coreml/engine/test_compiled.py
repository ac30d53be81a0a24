"""Compiled shards are kept, and what is no whole compilation is not used; see `fake_mac.py`."""

import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import ModelError
from paceline.storage import manifest
from paceline.storage.files import read_json
from paceline.system.machine import cache_dir, lock_path
from paceline.system.processes import Finished
from paceline_coreml.engine import compiled
from paceline_coreml.engine.artifact import read_artifact
from paceline_coreml.engine.failures import Mac
from paceline_coreml.engine.packages import PackageOpener, Packages
from support.errors import raises
from support.fake_mac import COMPILE, LOAD, FakeMac, mac
from support.waiting import PATIENCE, until

pytestmark = pytest.mark.coreml

__all__ = ["mac"]

PACKAGES = 4


@pytest.fixture(autouse=True)
def without_checksums(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))


def opened(folder: Path, said: list[str] | None = None) -> Packages:
    say = [].append if said is None else said.append
    opener = PackageOpener(
        read_artifact(folder), units="cpu-and-ne", rounding="f16", on_message=say
    )
    return opener.open_all(None)


def kept(folder: Path) -> Iterator[Path]:
    """Folders of the compiled shards of the only build."""
    (build,) = (folder / "compiled").iterdir()
    yield from build.iterdir()


def test_a_second_load_neither_compiles_nor_hashes(
    artifact: Path, mac: FakeMac, monkeypatch: pytest.MonkeyPatch
):
    hashed: list[Path] = []
    sha256_of = manifest.sha256_of

    def counted(path: Path, *more: Any) -> str:
        hashed.append(path)
        return sha256_of(path, *more)

    monkeypatch.setattr(manifest, "sha256_of", counted)
    said: list[str] = []
    opened(artifact, said)
    fresh = len(mac.calls) + len(hashed)
    assert Counter(mac.calls) == {COMPILE: PACKAGES, LOAD: PACKAGES}
    assert len(hashed) == len(read_artifact(artifact).files)
    assert len(said) == 1
    mac.again()
    hashed.clear()
    opened(artifact, said)
    assert mac.calls == [LOAD] * PACKAGES
    assert hashed == []
    assert len(said) == 1
    assert fresh >= 2 * len(mac.calls)


def test_a_macos_update_or_a_failed_load_triggers_recompilation(artifact: Path, mac: FakeMac):
    opened(artifact)
    mac.again()
    mac.system = Mac("26.2", "25C56")
    opened(artifact)
    assert Counter(mac.calls) == {COMPILE: PACKAGES, LOAD: PACKAGES}
    (build,) = (artifact / "compiled").iterdir()
    assert build.name.startswith("25C56-"), "it replaces the old one"
    mac.again()
    mac.fails = lambda call: call == 0
    opened(artifact)
    assert mac.calls[:3] == [LOAD, COMPILE, LOAD]
    assert Counter(mac.calls) == {COMPILE: 1, LOAD: PACKAGES + 1}


def cut(place: Path) -> None:
    """Half of a file."""
    path = next((place / "model.mlmodelc").rglob("*.mlmodel"))
    path.write_bytes(path.read_bytes()[:100])


def lose(place: Path) -> None:
    next((place / "model.mlmodelc").rglob("*.bin")).unlink()


def unfinished(place: Path) -> None:
    """The process ended while it moved the model."""
    (place / "files.json").unlink()
    place.rename(place.with_name(".making"))


@pytest.mark.parametrize("damage", [cut, lose, unfinished])
def test_a_partial_compilation_is_repeated(damage: Any, artifact: Path, mac: FakeMac):
    opened(artifact)
    damage(sorted(kept(artifact))[0])
    mac.again()
    opened(artifact)
    assert Counter(mac.calls) == {COMPILE: 1, LOAD: PACKAGES}
    assert len([*kept(artifact)]) == PACKAGES
    for place in kept(artifact):
        assert read_json(place / "files.json")


def test_compiled_packages_are_kept_if_a_later_package_fails(artifact: Path, mac: FakeMac):
    mac.fails = lambda call: call == 2
    with raises(ModelError, "head-000000-000080.mlpackage"):
        opened(artifact)
    mac.again()
    opened(artifact)
    assert Counter(mac.calls) == {COMPILE: PACKAGES - 2, LOAD: PACKAGES}


def test_only_one_process_compiles_at_a_time(artifact: Path, mac: FakeMac):
    (artifact / "compiled").mkdir()
    release = lock_path(artifact / "compiled", wait=False)
    assert release is not None
    said: list[str] = []
    second = threading.Thread(target=opened, args=(artifact, said))
    second.start()
    try:
        until(lambda: len(said) == 1)
        assert mac.calls == []
    finally:
        release()
        second.join(PATIENCE)
    assert Counter(mac.calls) == {COMPILE: PACKAGES, LOAD: PACKAGES}


def test_read_only_models_are_compiled_into_the_cache(
    artifact: Path, mac: FakeMac, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(compiled.os, "access", lambda path, _: path != artifact)
    for calls in ({COMPILE: PACKAGES, LOAD: PACKAGES}, {LOAD: PACKAGES}):
        mac.again()
        opened(artifact)
        assert Counter(mac.calls) == calls
    assert not (artifact / "compiled").exists()
    assert len([*(cache_dir() / "coreml").rglob("model.mlmodelc")]) == PACKAGES


def test_a_killed_compiler_is_a_one_line_error(
    artifact: Path, mac: FakeMac, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(compiled, "run_child", lambda _: Finished(-9, ("half a line",)))
    with raises(ModelError, "layers-000-002.mlpackage", "signal 9"):
        opened(artifact)
    assert mac.calls == []
