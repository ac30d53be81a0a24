"""The Hugging Face Hub: its failures, its cache, and models of several files."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import errors

from paceline.errors import ModelError, ModelNotFound
from paceline.models import QUIET, hub, pull, resolve, resolve_drafter
from paceline.models.hub.download import fetch_files
from support.errors import raises
from support.fake_hub import FakeHub


class Response:
    """The parts of a response that the hub's errors read."""

    headers: dict[str, str] = {}  # noqa: RUF012
    request = None


def http(kind: type[errors.HfHubHTTPError]) -> errors.HfHubHTTPError:
    response: Any = Response()
    return kind("404 Client Error", response=response)


@pytest.mark.parametrize(
    ("error", "kind", "reason"),
    [
        (http(errors.GatedRepoError), ModelError, "hf auth login"),
        (http(errors.RepositoryNotFoundError), ModelNotFound, "Hub has no model some/model"),
        (http(errors.RemoteEntryNotFoundError), ModelError, "is incomplete on the Hub"),
        (http(errors.RevisionNotFoundError), ModelNotFound, "no such revision"),
        (http(errors.HfHubHTTPError), ModelError, "cannot be reached"),
        (errors.LocalEntryNotFoundError("no connection"), ModelError, "cannot be reached"),
        (ConnectionResetError("gone"), ModelError, "cannot be reached"),
        (RuntimeError("a proxy's answer that nobody expected"), ModelError, "cannot be reached"),
        (errors.HFValidationError("no name"), ModelNotFound, "not a Hub name"),
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), ModelError, "No space left"),
        (PermissionError(errno.EACCES, "Permission denied", "/x"), ModelError, "denied: '/x'"),
        (KeyboardInterrupt(), KeyboardInterrupt, ""),
    ],
)
def test_every_hugging_face_failure_is_one_line_with_the_model_name(
    error: BaseException, kind: type[BaseException], reason: str
):
    with pytest.raises(kind) as caught, hub.errors_of("some/model"):
        raise error
    assert type(caught.value) is kind
    message = str(caught.value)
    assert reason in message
    assert kind is KeyboardInterrupt or "some/model" in message
    assert "\n" not in message


def snapshot(cache: Path, name: str, *files: str) -> Path:
    """Write a model in the layout of the hub's cache."""
    repo = cache / f"models--{name.replace('/', '--')}"
    folder = repo / "snapshots" / ("0" * 40)
    folder.mkdir(parents=True)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("0" * 40)
    for file in files:
        (folder / file).write_text("{}")
    return folder


@pytest.mark.usefixtures("fake")
def test_a_model_is_installed_if_all_its_files_are_cached(tmp_path: Path):
    assert [*hub.cached_folders(hub.CHECKPOINT)] == []
    folder = snapshot(tmp_path / "hub", "some/model", *hub.CHECKPOINT.required)
    snapshot(tmp_path / "hub", "some/weights", "model.safetensors")
    snapshot(tmp_path / "hub", "some/interrupted", hub.CHECKPOINT.required[0])
    assert [*hub.cached_folders(hub.CHECKPOINT)] == [("some/model", folder)]
    for name in ("some/weights", "some/interrupted", "some/other"):
        assert hub.cached_snapshot(name, hub.CHECKPOINT.required) is None


def test_cached_models_need_no_request_and_pull_checks_for_updates(fake: FakeHub, tmp_path: Path):
    files = (*hub.CHECKPOINT.required, "model.safetensors")
    folder = snapshot(tmp_path / "hub", "some/model", *files)
    with raises(ModelError, folder):
        resolve("some/model@mlx", tmp_path)
    assert fake.asked == []
    with raises(ModelError, "some/model"):
        pull("some/model", tmp_path)
    assert fake.asked


def test_only_the_needed_files_are_downloaded_and_missing_ones_named(fake: FakeHub):
    fake.add("some/model", *hub.CHECKPOINT.required, "model.safetensors", "a.png")
    folder = fetch_files(hub.repository("some/model"), hub.CHECKPOINT, None, QUIET)
    assert {path.name for path in folder.iterdir()} == {
        *hub.CHECKPOINT.required,
        "model.safetensors",
    }
    assert hub.cached_snapshot("some/model", hub.CHECKPOINT.required) == folder
    fake.asked.clear()
    fake.add("some/head", "model.safetensors")
    with raises(ModelError, "some/head has no config.json on the Hub, so it is not a drafter"):
        resolve_drafter("some/head")
    assert fake.downloads() == []
