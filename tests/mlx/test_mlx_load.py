"""Checkpoints opened like a user does, with `engine="mlx"`: responses and errors."""

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import paceline
from paceline.cli.app import main
from paceline.engines import EngineSettings, open_engine
from paceline.errors import InvalidRequest, MissingExtra, ModelError, pip_install
from support import mlx
from support.errors import raises
from support.scheduling import free_slots


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    mlx.needs()
    return mlx.checkpoint(tmp_path_factory.mktemp("mlx") / "qwen3", "qwen3", num_hidden_layers=1)


@pytest.fixture
def elsewhere(cache: Path, folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(folder, tmp_path / "copy"))


@pytest.fixture
def without_mlx(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    monkeypatch.delitem(sys.modules, "paceline_mlx.entry", raising=False)


@pytest.mark.mlx
@pytest.mark.usefixtures("cache")
def test_a_checkpoint_generates_the_same_with_and_without_drafts(folder: Path):
    model = paceline.load(folder, engine="mlx", cache_tokens=1024)
    prompt = "abcabcabcabc"
    plain = model.generate(prompt, raw=True, max_tokens=24, drafter="none")
    assert (plain.engine, plain.exact, len(plain.token_ids)) == ("mlx", True, 24)
    for drafter in ("suffix+ngram:min=1", "ngram", "auto"):
        drafted = model.generate(prompt, raw=True, max_tokens=24, drafter=drafter, policy="fixed")
        assert drafted.token_ids == plain.token_ids
        assert drafted.exact
        assert drafted.stats.accepted > 0
    assert set(drafted.stats.parts) == {"graph", "device"}
    assert free_slots(model) == 1024


@pytest.mark.mlx
def test_the_command_line_accepts_a_checkpoint(
    folder: Path, cache: Path, capsys: pytest.CaptureFixture[str]
):
    asked = ["--model", str(folder), "--engine", "mlx", "--raw", "--max-tokens", "8", "--json"]
    assert main(["generate", "abcabc", *asked]) == 0
    values = json.loads(capsys.readouterr().out)
    assert (values["engine"], values["exact"], len(values["token_ids"])) == ("mlx", True, 8)


@pytest.mark.mlx
def test_a_smaller_checkpoint_drafts_for_a_larger_one(folder: Path, cache: Path):
    model = paceline.load(folder, engine="mlx", cache_tokens=1024)
    plain = model.generate("abcabc", raw=True, max_tokens=12, drafter="none")
    for drafter in (f"model:{folder}@mlx", f"ahead:model:{folder}@mlx"):
        drafted = model.generate("abcabc", raw=True, max_tokens=12, drafter=drafter, policy="fixed")
        assert drafted.token_ids == plain.token_ids
        assert drafted.stats.accepted > 0


def change(folder: Path, **changes: Any) -> None:
    values = json.loads((folder / mlx.CONFIG).read_text())
    (folder / mlx.CONFIG).write_text(json.dumps({**values, **changes}))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1000])


@pytest.mark.mlx
@pytest.mark.parametrize(
    ("spoil", "cause"),
    [
        (lambda f: (f / "tokenizer.json").unlink(), "tokenizer.json"),
        (lambda f: (f / "model.safetensors").unlink(), "model.safetensors"),
        (lambda f: change(f, model_type="abacus"), "abacus"),
        (lambda f: change(f, model_type=None), "mlx-lm"),
        (lambda f: change(f, hidden_size=32), "shape"),
        (lambda f: change(f, num_hidden_layers=2), "parameters"),
        (lambda f: change(f, model_file="code.py"), "disabled"),
        (lambda f: change(f, max_position_embeddings=None), "context"),
        (lambda f: cut(f / "model.safetensors"), "mlx-lm"),
    ],
    ids=["words", "weights", "kind", "none", "width", "layers", "code", "context", "cut off"],
)
def test_an_unsupported_checkpoint_is_a_one_line_error(
    elsewhere: Path, spoil: Callable[[Path], object], cause: str
):
    spoil(elsewhere)
    with raises(ModelError, cause) as refused:
        paceline.load(elsewhere, engine="mlx")
    assert len(str(refused.value)) < 500


@pytest.mark.mlx
def test_a_cache_without_rewind_is_rejected(folder: Path):
    from mlx import nn

    from paceline_mlx.model import LoadedModel

    class Forgetful:
        def is_trimmable(self) -> bool:
            return False

    class Model(nn.Module):
        model_type = "sieve"
        layers = ()

        def make_cache(self) -> list[Forgetful]:
            return [Forgetful()]

    with raises(ModelError, "Forgetful"):
        LoadedModel(Model())


@pytest.mark.usefixtures("without_mlx")
def test_missing_mlx_lm_is_reported_with_install_instructions(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    how = f"the engine mlx needs mlx-lm; install it with `{pip_install('mlx')}`"
    with pytest.raises(MissingExtra) as refused:
        open_engine("mlx", tmp_path, 64, EngineSettings())
    assert str(refused.value) == how
    # Before anything is looked for, or fetched.
    assert main(["generate", "x", "--model", "some/model", "--engine", "mlx"]) == 2
    assert capsys.readouterr().err.strip().endswith(how)


@pytest.mark.usefixtures("cache")
def test_mlx_rejects_other_formats_and_unknown_engines_are_named(
    tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch
):
    # Which is found out before anything is run, so mlx-lm may as well be missing.
    monkeypatch.setattr("paceline.plugins.load", lambda *_: None)
    with raises(ModelError, "mlx"):
        paceline.load(tiny_gguf, engine="mlx")
    with raises(InvalidRequest, "'mlxx'", "mlx"):
        paceline.load(tiny_gguf, engine="mlxx")
