import errno
import os
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import errors

from paceline.errors import ModelError, ModelNotFound
from paceline.models import QUIET, Progress, hub, pull, resolve
from paceline.models.names.hub_names import is_hub_name
from support.errors import raises


class Response:
    """As much of a response as the hub's errors look at."""

    headers: dict[str, str] = {}  # noqa: RUF012
    request = None


def http(kind: type[errors.HfHubHTTPError]) -> errors.HfHubHTTPError:
    response: Any = Response()
    return kind("404 Client Error", response=response)


@pytest.fixture
def fails(monkeypatch: pytest.MonkeyPatch) -> Callable[[BaseException], None]:
    """Makes the first request to the hub fail."""

    def fails(error: BaseException) -> None:
        def download(*_: object, **__: object) -> None:
            raise error

        monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)

    return fails


@pytest.fixture(autouse=True)
def empty_hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    from huggingface_hub import constants
    from huggingface_hub.utils import _cache_manager

    folder = tmp_path / "hub"
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    for module in (constants, _cache_manager):
        monkeypatch.setattr(module, "HF_HUB_CACHE", str(folder), raising=False)
    return folder


@pytest.mark.parametrize(
    ("error", "kind", "reason"),
    [
        (http(errors.GatedRepoError), ModelError, "hf auth login"),
        (http(errors.RepositoryNotFoundError), ModelNotFound, "the hub has no model some/model"),
        (http(errors.RemoteEntryNotFoundError), ModelError, "no OpenVINO form"),
        (http(errors.RevisionNotFoundError), ModelNotFound, "no such revision"),
        (http(errors.HfHubHTTPError), ModelError, "cannot be reached"),
        (errors.LocalEntryNotFoundError("no connection"), ModelError, "cannot be reached"),
        (errors.OfflineModeIsEnabled("offline"), ModelError, "cannot be reached"),
        (ConnectionResetError("gone"), ModelError, "cannot be reached"),
        (RuntimeError("a proxy's answer that nobody expected"), ModelError, "cannot be reached"),
        (errors.HFValidationError("no name"), ModelNotFound, "not a hub name"),
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), ModelError, "No space left"),
        (PermissionError(errno.EACCES, "Permission denied", "/x"), ModelError, "denied: '/x'"),
    ],
)
def test_every_way_the_hub_fails_is_one_line_that_names_the_model(
    error: BaseException, kind: type[ModelError], reason: str, fails: Any
):
    fails(error)
    with raises(ModelError, reason, "some/model") as caught:
        hub.fetch_snapshot("some/model", QUIET)
    assert type(caught.value) is kind


@pytest.mark.parametrize("name", ["a--b/c", "x/y..z", "x/" + "y" * 200])
def test_a_name_that_the_hub_does_not_allow_is_no_model(name: str, tmp_path: Path):
    with pytest.raises(ModelNotFound):
        resolve(name, tmp_path)


def test_ctrl_c_during_a_download_stays_ctrl_c(fails: Any):
    fails(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        hub.fetch_snapshot("some/model", QUIET)


@pytest.mark.parametrize(
    ("name", "is_one"),
    [
        *((name, True) for name in ("owner/name", "a.b-c_d/E", "0/1")),
        *((name, False) for name in ("a", "a/b/c", "a/b c", "./a", "../a", "a/..", "-a/b", "")),
    ],
)
def test_a_hub_name_is_an_owner_and_a_name(name: str, is_one: bool):
    assert is_hub_name(name) == is_one


def test_without_a_hub_cache_no_hub_model_is_here():
    assert [*hub.cached_folders()] == []
    assert hub.cached_snapshot("some/model") is None


def snapshot(cache: Path, name: str, *files: str) -> Path:
    """A model as the hub's own cache keeps it."""
    repo = cache / f"models--{name.replace('/', '--')}"
    folder = repo / "snapshots" / ("0" * 40)
    folder.mkdir(parents=True)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("0" * 40)
    for file in files:
        (folder / file).write_text("{}")
    return folder


def test_a_model_with_an_openvino_graph_in_the_hubs_cache_is_here_and_others_are_not(
    empty_hub_cache: Path,
):
    folder = snapshot(empty_hub_cache, "some/model", *hub.REQUIRED)
    snapshot(empty_hub_cache, "some/weights", "model.safetensors")
    snapshot(empty_hub_cache, "some/interrupted", hub.GRAPH)
    assert [*hub.cached_folders()] == [("some/model", folder)]
    assert hub.cached_snapshot("some/model") == folder
    assert hub.cached_snapshot("some/weights") is None
    assert hub.cached_snapshot("some/interrupted") is None


def test_what_is_in_the_hubs_cache_is_used_without_asking_the_hub_and_pull_asks_it(
    empty_hub_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    from huggingface_hub import constants

    folder = snapshot(empty_hub_cache, "some/model", *hub.REQUIRED)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with raises(ModelError, folder):
        resolve("some/model", tmp_path)
    with raises(ModelError, "some/model"):
        pull("some/model", tmp_path)


def test_only_what_an_openvino_model_needs_is_fetched(monkeypatch: pytest.MonkeyPatch):
    asked: dict[str, Any] = {}
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda *_, **__: None)

    def fetch(name: str, **options: Any) -> str:
        asked.update(options, name=name)
        return "/somewhere"

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    heard = StringIO()
    assert hub.fetch_snapshot("some/model", Progress(heard)) == Path("/somewhere")
    assert "some/model" in heard.getvalue()
    assert asked["name"] == "some/model"
    assert "openvino_model.*" in asked["allow_patterns"]
    assert not any("safetensors" in pattern for pattern in asked["allow_patterns"])
