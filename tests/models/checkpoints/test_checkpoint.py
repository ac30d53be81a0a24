"""Hugging Face checkpoints that are run as they are."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.errors import ModelError, ModelNotFound
from paceline.models import DEFAULT_MODEL, QUIET, Progress, checkpoints, hub, pull, resolve
from paceline.models.files import open_checkpoint
from paceline.models.manifest import GGUF_WEIGHTS
from support.errors import raises
from support.tiny_checkpoints import write_checkpoint


@pytest.fixture
def folder(tmp_path: Path, exported: Path) -> Path:
    """A checkpoint with the tiny model's words, and weights that nobody looks at here."""
    made = tmp_path / "checkpoint"
    shutil.copytree(exported, made, ignore=shutil.ignore_patterns("openvino_model.*"))
    (made / "model.safetensors").write_bytes(b"weights")
    return made


@pytest.fixture
def as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Mac with mlx-lm."""
    monkeypatch.setattr(checkpoints, "mlx_available", lambda: True)


@pytest.mark.parametrize(
    ("system", "machine", "installed", "expected"),
    [
        ("darwin", "arm64", True, True),
        ("darwin", "arm64", False, False),
        ("darwin", "x86_64", True, False),
        ("linux", "arm64", True, False),
    ],
)
def test_checkpoints_run_as_they_are_on_apple_silicon_with_mlx_lm(
    system: str, machine: str, installed: bool, expected: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("sys.platform", system)
    monkeypatch.setattr("platform.machine", lambda: machine)
    monkeypatch.setattr("importlib.util.find_spec", lambda _: object() if installed else None)
    assert checkpoints.mlx_available() is expected


def test_a_checkpoint_is_opened_where_it_is(folder: Path, tmp_path: Path):
    files = resolve(f"{folder}@mlx", tmp_path / "cache")
    assert (files.engine, files.path) == ("mlx", folder)
    assert files.context_length > 0
    assert files.tokenizer().encode("and then")
    assert files.template().render([{"role": "user", "content": "Hi"}])


@pytest.mark.usefixtures("as_it_is")
def test_it_need_not_be_asked_for_where_it_can_be_run(folder: Path, tmp_path: Path):
    assert resolve(str(folder), tmp_path / "cache").engine == "mlx"


def test_elsewhere_it_is_converted(tmp_path: Path):
    folder = write_checkpoint("qwen3", tmp_path / "checkpoint")
    files = resolve(str(folder), tmp_path / "cache")
    assert (files.engine, files.path.name) == ("openvino", GGUF_WEIGHTS)


@pytest.mark.usefixtures("as_it_is")
def test_a_folder_with_both_forms_is_for_openvino(exported: Path, tmp_path: Path):
    both = tmp_path / "both"
    shutil.copytree(exported, both)
    (both / "model.safetensors").write_bytes(b"weights")
    assert resolve(str(both), tmp_path / "cache").engine == "openvino"
    assert resolve(f"{both}@mlx", tmp_path / "cache").engine == "mlx"


def test_other_weights_have_another_fingerprint(folder: Path):
    first = open_checkpoint(folder, "x").fingerprint
    assert open_checkpoint(folder, "x").fingerprint == first
    (folder / "model.safetensors").write_bytes(b"other weights")
    assert open_checkpoint(folder, "x").fingerprint != first


def index(folder: Path, value: object) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps(value))


@pytest.mark.parametrize(
    ("spoil", "name"),
    [
        (lambda f: (f / "tokenizer.json").unlink(), "tokenizer.json"),
        (lambda f: (f / "config.json").unlink(), "config.json"),
        (lambda f: (f / "model.safetensors").unlink(), "model.safetensors"),
        (
            lambda f: index(
                f, {"weight_map": {"a": "model-2.safetensors", "b": "model.safetensors"}}
            ),
            "model-2.safetensors",
        ),
        (lambda f: index(f, {"weight_map": {"a": 1}}), "weight files"),
        (lambda f: index(f, {}), "weight files"),
    ],
)
def test_what_a_checkpoint_lacks_is_named(folder: Path, spoil: Callable[[Path], object], name: str):
    spoil(folder)
    with raises(ModelError, name):
        open_checkpoint(folder, "x")


@pytest.mark.parametrize("name", [DEFAULT_MODEL, "nowhere", "/no/such/folder", "a.gguf"])
def test_what_is_no_checkpoint_has_no_form_for_mlx(name: str, tmp_path: Path):
    with raises(ModelNotFound, "mlx"):
        resolve(f"{name}@mlx", tmp_path / "cache")


# -- from the hub ----------------------------------------------------------------------------------


class Hub:
    """A hub with some forms of one model, and none of them here at first."""

    def __init__(self, forms: dict[hub.FileSet, Path]) -> None:
        self.forms = forms
        self.here: dict[hub.FileSet, Path] = {}
        self.asked: list[hub.FileSet] = []

    def cached_snapshot(
        self, _: str, files: hub.FileSet = hub.OPENVINO, **__: object
    ) -> Path | None:
        return self.here.get(files)

    def repository(self, name: str, _: str | None) -> hub.Repository:
        if not self.forms:
            raise ModelNotFound(f"the hub has no model {name}")
        paths = {path.name for folder in self.forms.values() for path in folder.iterdir()}
        return hub.Repository(name, "main", {path: hub.HubFile(1, None) for path in paths})

    def fetch_snapshot(
        self, name: str, _: Progress, files: hub.FileSet = hub.OPENVINO, **__: object
    ) -> Path:
        self.asked.append(files)
        if files not in self.forms:
            raise ModelError(files.missing.format(name))
        self.here[files] = self.forms[files]
        return self.forms[files]


@pytest.fixture
def with_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[dict[hub.FileSet, Path]], Hub]:
    def with_hub(forms: dict[hub.FileSet, Path]) -> Hub:
        made = Hub(forms)
        monkeypatch.setattr(hub, "cached_snapshot", made.cached_snapshot)
        monkeypatch.setattr(hub, "fetch_snapshot", made.fetch_snapshot)
        monkeypatch.setattr(hub, "repository", made.repository)
        monkeypatch.setattr(hub, "cache_folder", lambda: tmp_path / "no-hub")
        return made

    return with_hub


def test_a_checkpoint_on_the_hub_is_fetched_once(
    folder: Path, tmp_path: Path, with_hub: Callable[[dict[hub.FileSet, Path]], Hub]
):
    made = with_hub({hub.CHECKPOINT: folder})
    for _ in range(2):
        assert resolve("some/model@mlx", tmp_path / "cache").engine == "mlx"
    assert made.asked == [hub.CHECKPOINT]


def test_one_whose_download_was_interrupted_is_fetched_again(
    folder: Path, tmp_path: Path, with_hub: Callable[[dict[hub.FileSet, Path]], Hub]
):
    partly = tmp_path / "partly"
    shutil.copytree(folder, partly)
    (partly / "model.safetensors").unlink()
    made = with_hub({hub.CHECKPOINT: folder})
    made.here[hub.CHECKPOINT] = partly
    assert resolve("some/model@mlx", tmp_path / "cache").folder == folder


@pytest.mark.usefixtures("as_it_is")
@pytest.mark.parametrize("get", [resolve, pull])
def test_where_it_can_be_run_a_hub_name_may_mean_a_checkpoint(
    get: Callable[..., object],
    folder: Path,
    exported: Path,
    tmp_path: Path,
    with_hub: Callable[[dict[hub.FileSet, Path]], Hub],
):
    with_hub({hub.CHECKPOINT: folder})
    assert get("some/model", tmp_path / "cache", QUIET).engine == "mlx"
    assert get("some/model", tmp_path / "cache", QUIET).engine == "mlx"
    # The form for OpenVINO comes first where there is one.
    with_hub({hub.CHECKPOINT: folder, hub.OPENVINO: exported})
    assert get("some/model", tmp_path / "cache", QUIET).engine == "openvino"
    with_hub({})
    with raises(ModelNotFound, "some/model"):
        get("some/model", tmp_path / "cache", QUIET)


def test_elsewhere_a_checkpoint_of_the_hub_is_converted(
    tmp_path: Path, with_hub: Callable[[dict[hub.FileSet, Path]], Hub]
):
    made = with_hub({hub.CHECKPOINT: write_checkpoint("qwen3", tmp_path / "checkpoint")})
    for _ in range(2):
        files = resolve("some/model", tmp_path / "cache")
        assert (files.engine, files.path.name) == ("openvino", GGUF_WEIGHTS)
    assert made.asked == [hub.CHECKPOINT]
