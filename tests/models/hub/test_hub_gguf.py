"""GGUF files from a fake Hugging Face Hub: selection, download, resumption, offline use."""

import errno
import hashlib
import os
import shutil
from collections import namedtuple
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import ModelError, ModelNotFound
from paceline.models import QUIET, Progress, hub
from paceline.models.gguf import support
from paceline.models.hub import download, gguf_files
from paceline.models.names.hub_names import HubName, parse_hub_name
from support.errors import raises
from support.fake_hub import COMMIT, OLDER, TOKEN, FakeHub, content

NAME = "owner/name"
Q4, Q8 = "name-Q4_K_M.gguf", "name-Q8_0.gguf"
SHARDS = [f"BF16/name-BF16-0000{number}-of-00003.gguf" for number in (1, 2, 3)]
Usage = namedtuple("Usage", "total used free")


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "hub"


@pytest.fixture
def name(fake: FakeHub) -> str:
    """A repository with several models and with other files."""
    fake.add(NAME, Q4, Q8, *SHARDS, "README.md", "config.json", "mmproj-F16.gguf", "imatrix.gguf")
    return NAME


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """huggingface_hub tries again at once, and writes small pieces (10 MB otherwise)."""
    from huggingface_hub import constants, file_download

    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 10_000)

    class Time:
        @staticmethod
        def sleep(_: float) -> None:
            pass

    monkeypatch.setattr(file_download, "time", Time)


def fetch(name: HubName, progress: Progress = QUIET, *, to_use: bool = True) -> Path:
    repository = hub.repository(name.repository, name.revision)
    return gguf_files.fetch(name, repository, progress, to_use=to_use)


# -- downloads -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("meant", "path"),
    [
        (HubName(NAME), Q4),
        (HubName(NAME, tag="q8_0"), Q8),
        (HubName(NAME, file=Q8.upper().replace("NAME", "name")), Q8),
    ],
)
def test_a_file_is_downloaded_alone_into_the_hugging_face_cache(
    name: str, fake: FakeHub, cache: Path, meant: HubName, path: str
):
    result = fetch(meant)
    assert result == cache / f"models--owner--name/snapshots/{COMMIT}/{path}"
    assert result.read_bytes() == content(path)
    assert [download.path.rpartition("/")[2] for download in fake.downloads()] == [path]
    assert gguf_files.cached(meant) == result
    from huggingface_hub import try_to_load_from_cache

    assert try_to_load_from_cache(name, path) == str(result), "other tools find it"


def test_all_shards_are_downloaded_and_the_first_is_the_models_path(name: str, fake: FakeHub):
    for meant in (HubName(NAME, tag="BF16"), HubName(NAME, file=SHARDS[1])):
        path = fetch(meant)
        assert path.as_posix().endswith(SHARDS[0])
        for shard in SHARDS:
            assert (path.parents[1] / shard).read_bytes() == content(shard)
    assert len(fake.downloads()) == len(SHARDS), "nothing is fetched twice"


def test_a_revision_has_separate_files(fake: FakeHub, cache: Path):
    older = {Q8: b"older" * 100}
    fake.add(NAME, Q4).older = older
    at_tag = HubName(NAME, tag="Q8_0", revision="v1")
    with raises(ModelNotFound, "Q8_0"):
        fetch(at_tag.at_revision("v1")._replace(revision=None))
    path = fetch(at_tag)
    assert path.read_bytes() == older[Q8]
    assert path.parent.name == OLDER
    for revision in ("v1", OLDER, OLDER[:8]):
        assert gguf_files.cached(at_tag._replace(revision=revision)) == path
    assert gguf_files.cached(at_tag._replace(revision="v2")) is None
    assert gguf_files.cached(at_tag._replace(revision=OLDER[:3])) is None, "too short for a commit"


def test_errors_for_an_unknown_tag_or_file_list_the_available_ones(name: str, fake: FakeHub):
    for wrong in (HubName(NAME, tag="Q3_K_M"), HubName(NAME, file="other.gguf")):
        with raises(ModelNotFound, "it has BF16, Q4_K_M, Q8_0"):
            fetch(wrong)
    with raises(ModelError, "mmproj-F16.gguf"):
        fetch(HubName(NAME, file="mmproj-F16.gguf"))
    assert not fake.downloads()


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        (("config.json", "model.safetensors"), "Hugging Face checkpoint"),
        (("model.onnx", "README.md"), "look for a repository"),
        (("mmproj-F16.gguf", "README.md"), "mmproj-F16.gguf is not a language model"),
    ],
)
def test_a_repository_without_a_usable_file_reports_what_it_has(
    fake: FakeHub, paths: tuple[str, ...], names: str
):
    fake.add(NAME, *paths)
    with raises(ModelError, names, "has no GGUF file"):
        fetch(HubName(NAME))


# -- gated, and no network -------------------------------------------------------------------------


def test_a_gated_repository_needs_a_token_and_its_storage_never_gets_it(
    fake: FakeHub, monkeypatch: pytest.MonkeyPatch
):
    fake.add(NAME, Q4, gated=True)
    with raises(ModelError, "hf auth login", NAME):
        fetch(HubName(NAME))
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert fetch(HubName(NAME)).read_bytes() == content(Q4)
    assert {download.authorization for download in fake.downloads()} == {None}


def test_an_older_commits_file_is_used_if_the_newest_is_not_cached(fake: FakeHub, cache: Path):
    fake.add(NAME, Q4)
    path = fetch(HubName(NAME))
    newer = cache / "models--owner--name/snapshots" / ("d" * 40)
    newer.mkdir()
    (newer / "config.json").write_text("{}")
    (cache / "models--owner--name/refs/main").write_text("d" * 40)
    assert gguf_files.cached(HubName(NAME)) == path
    (newer / Q4).write_bytes(b"")
    assert gguf_files.cached(HubName(NAME)) == newer / Q4


# -- interrupted downloads -------------------------------------------------------------------------


def part_of(cache: Path, path: str) -> Path:
    digest = hashlib.sha256(content(path, SIZE)).hexdigest()
    return cache / f"models--owner--name/blobs/{digest}.incomplete"


SIZE = 100_000


@pytest.mark.usefixtures("impatient")
def test_a_broken_download_resumes_where_it_stopped(fake: FakeHub, cache: Path):
    fake.add(NAME, Q4, size=SIZE)
    fake.cut_after = [30_000, 40_000]
    assert fetch(HubName(NAME)).read_bytes() == content(Q4, SIZE)
    assert [download.range for download in fake.downloads()] == [
        None,
        "bytes=30000-",
        "bytes=70000-",
    ]
    assert not part_of(cache, Q4).exists()


@pytest.mark.usefixtures("impatient")
def test_an_abandoned_download_resumes_with_the_next_command(fake: FakeHub, cache: Path):
    fake.add(NAME, Q4, size=SIZE)
    fake.cut_after = [30_000] + [0] * 9
    with raises(ModelError, "0.0 MB of 0.1 MB"):
        fetch(HubName(NAME))
    assert part_of(cache, Q4).read_bytes() == content(Q4, SIZE)[:30_000]
    assert gguf_files.cached(HubName(NAME)) is None, "half a file is not a model"
    fake.cut_after, fake.asked = [], []
    assert fetch(HubName(NAME)).read_bytes() == content(Q4, SIZE)
    assert [download.range for download in fake.downloads()] == ["bytes=30000-"]


def test_a_download_that_differs_from_the_published_bytes_is_deleted(fake: FakeHub, cache: Path):
    fake.add(NAME, Q4, size=SIZE)
    fake.other_bytes = True
    with raises(ModelError, "SHA-256"):
        fetch(HubName(NAME))
    assert not part_of(cache, Q4).exists()
    assert gguf_files.cached(HubName(NAME)) is None
    fake.other_bytes = False
    part_of(cache, Q4).write_bytes(bytes(SIZE + 1))  # nor a part that is too long
    assert fetch(HubName(NAME)).read_bytes() == content(Q4, SIZE)


# -- disk and memory -------------------------------------------------------------------------------


def test_insufficient_disk_space_is_reported_before_or_during_a_download(
    fake: FakeHub, cache: Path, monkeypatch: pytest.MonkeyPatch
):
    fake.add(NAME, *SHARDS, size=SIZE)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(10**9, 0, 3 * SIZE - 1))
    with raises(ModelError, "owner/name", "300000"):
        fetch(HubName(NAME))
    assert not fake.downloads()
    part = part_of(cache, SHARDS[0])
    part.parent.mkdir(parents=True)
    part.write_bytes(content(SHARDS[0], SIZE)[:10])
    assert fetch(HubName(NAME)).name in SHARDS[0], "a cached file needs no space"

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    fake.add("other/name", Q4)
    monkeypatch.setattr("huggingface_hub.file_download.http_get", full)
    with raises(ModelError, "cannot store other/name"):
        fetch(HubName("other/name"))


def test_only_pull_downloads_a_model_larger_than_memory(
    fake: FakeHub, monkeypatch: pytest.MonkeyPatch
):
    fake.add(NAME, Q4, size=SIZE)
    monkeypatch.setattr(support, "memory_bytes", lambda: SIZE - 1)
    with raises(ModelError, "paceline pull owner/name"):
        fetch(HubName(NAME))
    assert not fake.downloads()
    assert fetch(HubName(NAME), to_use=False).is_file()


# -- the cache -------------------------------------------------------------------------------------


def test_cached_models_have_their_shortest_unambiguous_name(name: str, fake: FakeHub):
    fetch(HubName(NAME, tag="Q8_0"))
    fetch(HubName(NAME, tag="BF16"))
    fake.add("other/two", "1b-Q4_K_M.gguf", "3b-Q4_K_M.gguf", "plain.gguf")
    for path in fake.repositories["other/two"].files:
        fetch(HubName("other/two", file=path))
    by_name = {model.name: model for model in gguf_files.cached_models()}
    assert by_name.keys() == {
        "owner/name:Q8_0",
        "owner/name:BF16",
        "other/two/1b-Q4_K_M.gguf",
        "other/two/3b-Q4_K_M.gguf",
        "other/two/plain.gguf",
    }
    assert by_name["owner/name:BF16"].bytes == 3 * 1000
    for model in by_name.values():
        meant = parse_hub_name(model.name)
        assert meant is not None
        assert gguf_files.cached(meant) == model.path


def test_a_model_with_missing_shards_or_broken_links_is_not_installed(name: str, cache: Path):
    assert gguf_files.cached_models() == []
    path = fetch(HubName(NAME, tag="BF16"))
    (path.parents[1] / SHARDS[1]).unlink()
    assert gguf_files.cached(HubName(NAME, tag="BF16")) is None
    assert gguf_files.cached_models() == []
    assert fetch(HubName(NAME)).is_file()
    shutil.rmtree(cache / "models--owner--name/blobs")
    assert gguf_files.cached(HubName(NAME)) is None


def test_download_progress_counts_all_files_together(name: str):
    heard = StringIO()
    fetch(HubName(NAME, tag="BF16"), Progress(heard))
    assert heard.getvalue() == "downloading owner/name (0.0 MB)\n"
    counted: list[int] = []
    repository = hub.repository(NAME)
    file = repository.files[Q4]
    download._fetch_blob(repository, Q4, counted.append, 5)
    assert counted[0] == 5
    assert counted[-1] == 5 + file.bytes
