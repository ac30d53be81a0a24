"""Core ML from the command line, with a tiny model that has a real tokenizer."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import paceline
from paceline.cli.app import main
from paceline.errors import InvalidRequest, ModelNotFound
from paceline.models import check_models, list_models
from support.fake_mac import PREDICT, REASON, FakeMac, mac
from support.server import running

__all__ = ["mac"]

pytestmark = pytest.mark.coreml

Run = Callable[..., tuple[int, Any, str]]
PROMPT = "the rain in the rain in the"


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a command with --json: exit code, its output, its error output."""

    def run(*arguments: object) -> tuple[int, Any, str]:
        code = main([*map(str, arguments), "--json", "--quiet"])
        said = capsys.readouterr()
        return code, json.loads(said.out) if said.out else None, said.err

    return run


@pytest.fixture(scope="module")
def converted(tiny_gguf: Path, tiny_cache: Path) -> str:
    """The tiny model's Core ML form, in the tests' cache; its name."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PACELINE_CACHE", str(tiny_cache))
        arguments = ["--to", "coreml", "--topology", "1+1", "--head-rows", "200", "--taps", "all"]
        arguments += ["--slots", "128", "--quiet"]
        assert main(["convert", str(tiny_gguf), *arguments]) == 0
    return f"{tiny_gguf}@coreml"


def test_convert_reports_the_artifact(run: Run, tiny_gguf: Path, cache: Path, tmp_path: Path):
    out = tmp_path / "made"
    recipe = ("--weights", "f16", "--rows", 2, "--functions", "2", "--keep", "head")
    code, found, _ = run("convert", tiny_gguf, "--to", "coreml", *recipe, "--output", out)
    assert code == 0
    assert found["folder"] == found["name"] == str(out)
    assert (found["rows"], found["functions"], found["slots"]) == (2, [2], 512)
    packages = {each["path"]: each for each in found["packages"]}
    assert list(packages) == ["layers-000-002.mlpackage", "head-000000-000320.mlpackage"]
    assert packages["layers-000-002.mlpackage"]["holds"] == "layers 0 to 1"
    assert all(each["bytes"] > 1000 for each in packages.values())
    with pytest.raises(InvalidRequest, match=r"no function for 1 row.*--functions 1,2"):
        paceline.load(out, min_rows=1)


def test_a_converted_model_is_listed_checked_and_planned_as_emulated(
    converted: str, cache: Path, capsys: pytest.CaptureFixture[str]
):
    listed = {model.name: model for model in list_models()}
    assert converted in listed
    assert listed[converted].about.startswith("for Core ML")
    assert listed[converted].bytes > 10_000
    assert check_models() == len([model for model in list_models() if model.here])
    assert main(["plan", "--model", converted, "--quiet"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("emulated")
    assert re.search(r"Exactness costs [\d.]+x: a padded pass takes", printed)


@pytest.mark.parametrize("by", ["name", "engine", "folder"])
def test_a_converted_model_speculates_with_the_tokens_of_plain_decoding(
    run: Run, converted: str, cache: Path, by: str
):
    folder = next(each.folder for each in list_models() if each.name == converted)
    chosen = {
        "name": ("--model", converted),
        "engine": ("--model", converted.removesuffix("@coreml"), "--engine", "coreml"),
        "folder": ("--model", folder),
    }[by]
    common = ("generate", PROMPT, *chosen, "--max-tokens", 32, "--seed", 3)
    code, plain, _ = run(*common, "--drafter", "none")
    assert code == 0
    assert (plain["engine"], plain["exact"], plain["completion_tokens"]) == ("coreml", True, 32)
    assert set(plain["stats"]["parts"]) == {"first calls", "layers", "head", "inputs"}
    fixed = ("--policy", "fixed", "--max-block", 4)
    code, ngram, _ = run(*common, "--drafter", "ngram:min=1", *fixed)
    assert code == 0
    assert ngram["token_ids"] == plain["token_ids"]
    assert ngram["stats"]["drafted"] > 0
    hot = (*common, "--temperature", 0.8)
    _, plain, _ = run(*hot, "--drafter", "none")
    _, ngram, _ = run(*hot, "--drafter", "suffix", "--policy", "fixed", "--max-block", 7)
    assert ngram["token_ids"] == plain["token_ids"]


@pytest.fixture
def on_a_mac(converted: str, cache: Path, mac: FakeMac, tmp_path: Path) -> Path:
    """A copy of the model, for Core ML, which compiles it beside itself."""
    folder = next(model.folder for model in list_models() if model.name == converted)
    return Path(shutil.copytree(folder, tmp_path / "model"))


def next_call(mac: FakeMac, kind: str) -> None:
    """The next call of a kind fails, and no other."""
    before = mac.calls.count(kind)
    mac.fails = lambda _: mac.calls[-1] == kind and mac.calls.count(kind) == before + 1


def test_a_server_fails_one_request_when_core_ml_fails(on_a_mac: Path, mac: FakeMac):
    body = {"prompt": PROMPT, "max_tokens": 4, "temperature": 0}
    with running(paceline.load(str(on_a_mac))) as server:
        expected = server.post("/v1/completions", body).json()["choices"]
        next_call(mac, PREDICT)
        failed = server.post("/v1/completions", {**body, "prompt": f"{PROMPT} north"})
        assert failed.status_code == 500
        assert REASON.rstrip(".") in failed.json()["error"]["message"]
        assert server.post("/v1/completions", body).json()["choices"] == expected


def test_a_model_for_another_engine_is_rejected(tiny_files: Any, converted: str, cache: Path):
    with pytest.raises(InvalidRequest, match="is a model for the engine coreml, not for llamacpp"):
        paceline.load(converted, engine="llamacpp")
    with pytest.raises(InvalidRequest, match=r"engine llamacpp, not for coreml.*--to coreml"):
        paceline.load(tiny_files.folder, engine="coreml")
    with pytest.raises(ModelNotFound, match=r"no Core ML version.*paceline convert"):
        paceline.load("smollm2-135m", engine="coreml")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--slots", "4000"), "slots is 4000; "),
        (("--temporary", "/no/such/folder"), "/no/such/folder is not a folder"),
        (("--functions", "8,64", "--flexible"), "remove one of the two"),
    ],
)
def test_conversion_errors_are_one_line(
    tiny_gguf: Path,
    cache: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    said: str,
):
    out = tmp_path / "out"
    code = main(
        ["convert", str(tiny_gguf), "--to", "coreml", "--quiet", "--output", str(out), *arguments]
    )
    lines = capsys.readouterr().err.strip().splitlines()
    assert code == 2
    assert said in lines[-1]
    assert lines[-1].startswith("paceline: ")
    assert not out.exists()
