import importlib.util
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.decoding.types import Block
from paceline.engines import EngineSettings, open_engine
from paceline.errors import InvalidRequest, MissingExtra, ModelError
from paceline.models import QUIET, convert, hub
from paceline.models.cache import models_dir
from paceline.models.convert import WEIGHTS, checkpoint_bytes, convert_checkpoint
from paceline.models.processes import Finished
from support.saved_checkpoints import save_checkpoint

exporting = sys.modules["paceline.models.convert"]


@pytest.fixture
def optimum(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the extra is installed, as far as can be seen."""
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: object() if name == "optimum" else real(name)
    )


@pytest.fixture
def of_another_family(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that only optimum-intel may know."""
    folder = tmp_path_factory.mktemp("checkpoint")
    (folder / "config.json").write_text('{"model_type": "of another planet"}')
    for name in ("model.safetensors", "tokenizer.json"):
        (folder / name).write_bytes(b"anything")
    return folder


@pytest.fixture
def exporter(
    exported: Path, of_another_family: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., list[list[str]]]:
    """An exporter that makes the tiny model, or ends as told; the commands it was given."""

    def exporter(code: int = 0, *lines: str, without: str = "") -> list[list[str]]:
        asked: list[list[str]] = []

        def child(argv: list[str]) -> Finished:
            asked.append(argv)
            if code == 0:
                shutil.copytree(exported, argv[-1], dirs_exist_ok=True)
                (Path(argv[-1]) / (without or "none")).unlink(missing_ok=True)
            return Finished(code, lines)

        monkeypatch.setattr(exporting, "run_child", child)
        monkeypatch.setattr(hub, "snapshot", lambda *_: of_another_family)
        return asked

    return exporter


def test_without_the_extra_its_name_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(MissingExtra, match=r"pip install 'paceline\[convert\]'"):
        convert_checkpoint("x/y", tmp_path, "int8", QUIET)


def test_weights_of_an_unknown_form_are_refused(tmp_path: Path):
    with pytest.raises(InvalidRequest, match="weights is 'int2'; expected one of int8, int4, f16"):
        convert_checkpoint("x/y", tmp_path, "int2", QUIET)


@pytest.mark.usefixtures("optimum")
@pytest.mark.parametrize("weights", WEIGHTS)
def test_the_exporter_is_asked_for_a_stateful_model_with_these_weights(
    weights: str, exporter: Any, tmp_path: Path
):
    asked = exporter()
    facts = convert_checkpoint("owner/name", tmp_path / "work", weights, QUIET)
    assert facts.context_length == 512
    (command,) = asked
    said = " ".join(command)
    assert "--model owner/name" in said
    assert "--task text-generation-with-past" in said
    assert f"--weight-format {WEIGHTS[weights]}" in said


@pytest.mark.usefixtures("optimum")
@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        (("Traceback", "ValueError: unsupported architecture zaya"), "unsupported architecture"),
        (("OSError: We couldn't connect: cannot find the requested files",), "cannot be reached"),
        (("requests.exceptions.ConnectionError: Max retries exceeded",), "cannot be reached"),
        ((), "it gave no reason"),
    ],
)
def test_the_exporters_own_reason_is_the_last_line_it_says(
    lines: tuple[str, ...], reason: str, exporter: Any, tmp_path: Path
):
    exporter(1, *lines)
    with pytest.raises(ModelError, match=reason) as caught:
        convert("owner/name", "int8", tmp_path)
    assert "owner/name" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not [*models_dir(tmp_path).iterdir()]


@pytest.mark.usefixtures("optimum")
def test_an_exporter_that_fills_the_disk_is_a_full_disk(exporter: Any, tmp_path: Path):
    exporter(1, "OSError: [Errno 28] No space left on device")
    with pytest.raises(ModelError, match="the disk is full"):
        convert("owner/name", "int8", tmp_path)
    assert not [*models_dir(tmp_path).iterdir()]


@pytest.mark.usefixtures("optimum")
@pytest.mark.parametrize(
    ("without", "reason"),
    [("openvino_model.xml", "cannot be converted"), ("tokenizer.json", "no fast tokenizer")],
)
def test_an_export_without_a_piece_is_not_kept(
    without: str, reason: str, exporter: Any, tmp_path: Path
):
    exporter(without=without)
    with pytest.raises(ModelError, match=reason):
        convert("owner/name", "int8", tmp_path)
    assert not [*models_dir(tmp_path).iterdir()]


def test_a_checkpoint_needs_a_config_and_weights(tmp_path: Path):
    (tmp_path / "model-00001-of-00002.safetensors").write_bytes(b"12345")
    (tmp_path / "model-00002-of-00002.safetensors").write_bytes(b"123")
    with pytest.raises(ModelError, match="not a Hugging Face checkpoint"):
        checkpoint_bytes(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    assert checkpoint_bytes(tmp_path) == 8


# -- with the exporter itself ----------------------------------------------------------------------


@pytest.mark.reference
@pytest.mark.slow
@pytest.mark.parametrize("family", ["Llama", "Qwen2", "Qwen3"])
def test_a_real_checkpoint_is_converted_and_computes_what_torch_does(family: str, tmp_path: Path):
    pytest.importorskip("optimum.intel")
    import torch

    model = save_checkpoint(tmp_path / "checkpoint", family)
    files = convert(str(tmp_path / "checkpoint"), "int8", tmp_path / "cache")
    assert files.context_length == 256
    assert 1 in files.stop_token_ids
    text = "What is a paceline?"
    tokens = files.tokenizer().encode(text)
    assert files.tokenizer().decode(tokens) == text
    engine = open_engine("openvino", files.path, files.context_length, EngineSettings())
    found = engine.step([(engine.open(), Block(tokens, len(tokens)))]).logits[0]
    with torch.no_grad():
        expected = model(torch.tensor([tokens])).logits[0].numpy()
    apart = np.sqrt(((found - expected) ** 2).mean() / (expected**2).mean())
    assert apart < 0.05, "what 8 bits a weight cost in so small a model"
