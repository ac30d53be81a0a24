"""Hugging Face names, resolved to models that an engine can open, on a fake hub."""

from io import StringIO
from pathlib import Path

import pytest

from paceline.errors import InvalidRequest, ModelNotFound
from paceline.models import QUIET, names, open_origin, pull, resolve, resolve_drafter
from paceline.models.names import KnownModel
from paceline.storage.progress import Progress
from support.errors import raises
from support.fake_hub import FakeHub, FakeRepository

NAME = "owner/tiny"
F16 = "tiny-F16.gguf"


@pytest.fixture
def tiny(fake: FakeHub, tiny_gguf: Path) -> FakeRepository:
    """A repository with the tiny model in two quantizations (the name says so)."""
    content = tiny_gguf.read_bytes()
    other = content + bytes(32)  # which is after the last tensor
    repository = FakeRepository({F16: content, "tiny-Q8_0.gguf": other, "README.md": b"tiny"})
    fake.repositories[NAME] = repository
    return repository


def short_name(monkeypatch: pytest.MonkeyPatch, **more: str) -> None:
    """Make `tiny` a short name of the repository's file."""
    known_model = KnownModel("Tiny", NAME, F16, 1000, "cc0-1.0", **more)
    monkeypatch.setattr(names, "known_models", lambda: {"tiny": known_model})


def test_a_missing_tag_means_the_cached_file_and_pull_takes_the_default(
    tiny: FakeRepository, fake: FakeHub, tmp_path: Path
):
    first = resolve(f"{NAME}:F16", tmp_path / "cache")
    fake.asked.clear()
    assert resolve(NAME, tmp_path / "cache").folder == first.folder
    assert fake.asked == [], "a cached model needs no network"
    assert pull(NAME, tmp_path / "cache").folder != first.folder
    assert [download.path.rpartition("/")[2] for download in fake.downloads()] == ["tiny-Q8_0.gguf"]
    assert resolve(NAME, tmp_path / "cache").folder != first.folder, "the default is cached now"


def test_a_drafter_name_means_a_file_in_a_repository(
    tiny: FakeRepository, fake: FakeHub, tiny_gguf: Path
):
    path = resolve_drafter(f"{NAME}:F16", gguf=True)
    assert path.read_bytes() == tiny_gguf.read_bytes()
    fake.asked.clear()
    assert resolve_drafter(NAME, gguf=True) == path
    assert fake.asked == []
    with raises(ModelNotFound, "drafter head not found"):
        resolve_drafter("head", gguf=True)


def test_a_revision_selects_another_file_and_only_on_the_hub(
    tiny: FakeRepository, tiny_gguf: Path, fake: FakeHub, tmp_path: Path
):
    tiny.older = {"tiny-Q4_0.gguf": tiny_gguf.read_bytes()}
    newest = resolve(f"{NAME}:F16", tmp_path / "cache")
    older = resolve(NAME, tmp_path / "cache", revision="v1")
    assert older.folder != newest.folder
    with raises(ModelNotFound, "F16"):
        resolve(f"{NAME}:F16", tmp_path / "cache", revision="v1")
    with raises(ModelNotFound, NAME):
        resolve(NAME, tmp_path / "cache", revision="v9")
    with raises(ModelNotFound, "some/where/m.gguf"):
        resolve("some/where/m.gguf", tmp_path)
    for name in (str(tiny_gguf), "smollm2-135m", "ollama/qwen3"):
        with raises(InvalidRequest, "--revision"):
            resolve(name, tmp_path / "cache", revision="v1")
    with raises(InvalidRequest, "v1"):
        resolve(f"https://hf.co/{NAME}/resolve/main/{F16}", tmp_path, revision="v1")


@pytest.mark.usefixtures("tiny")
def test_a_short_name_is_downloaded_used_and_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    short_name(monkeypatch)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny").mkdir()
    files = resolve("tiny", tmp_path / "cache")
    assert files.name == "tiny"
    assert resolve(f"{NAME}:F16", tmp_path / "cache").folder == files.folder
    assert resolve("tiny:Q8_0", tmp_path / "cache").folder != files.folder


def test_a_short_name_uses_its_commit(
    tiny: FakeRepository, fake: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    short_name(monkeypatch, revision="0a" * 20)
    with raises(ModelNotFound, NAME):
        resolve("tiny", tmp_path / "cache")
    tiny.older = dict(tiny.files)
    assert resolve("tiny", tmp_path / "cache").name == "tiny"
    assert "/" + "0a" * 20 + "/" in fake.downloads()[0].path


@pytest.mark.usefixtures("tiny")
def test_a_hugging_face_gguf_file_is_the_source_of_converted_models(tmp_path: Path):
    work = tmp_path / "work"
    work.mkdir()
    origin = open_origin(f"{NAME}:F16", work, QUIET)
    assert (origin.name, origin.context_length) == (f"{NAME}:F16", 512)
    assert origin.path.is_file()
    assert origin.folder.is_relative_to(work)


def test_a_tag_that_selects_a_different_file_is_reported(
    fake: FakeHub, tiny_gguf: Path, tmp_path: Path
):
    name = "owner/tiny-GGUF:Compact"
    files = {"tiny-I-Compact.gguf": tiny_gguf.read_bytes()}
    fake.repositories["owner/tiny-GGUF"] = FakeRepository(files)
    notice = f"{name} is interpreted as tiny-I-Compact.gguf"
    hint = f"; `paceline pull {name}` looks for a closer match"
    exact = name.replace("Compact", "I-Compact")
    cache = tmp_path / "cache"
    for find, meant, expected in (
        (pull, name, f"{notice}\n"),
        (resolve, name, f"{notice}{hint}\n"),
        (resolve, exact, ""),
    ):
        heard = StringIO()
        find(meant, cache, Progress(heard))
        assert [line for line in heard.getvalue().splitlines(True) if " interpreted " in line] == [
            *filter(None, [expected])
        ]
