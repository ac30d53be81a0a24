"""Which form of a GGUF file's weights `--weights auto` takes."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.decoding.costs import CostTable
from paceline.engines import EngineSettings, open_engine
from paceline.engines.base import Engine
from paceline.errors import InvalidRequest
from paceline.models import QUIET, ModelFiles, resolve
from paceline.plan import plan
from paceline.runtime import load as loading
from paceline.runtime import weights_choice
from paceline.runtime.load import load
from paceline.runtime.model import Model
from paceline.runtime.weights_choice import (
    FILE,
    INT8,
    Comparison,
    WeightsChoice,
    choose_weights,
    divergence,
    measure_seconds,
)
from support.tiny_checkpoints import write_gguf_of

SLOW, FAST = CostTable({1: 0.02, 8: 0.03}), CostTable({1: 0.01, 8: 0.015})


def choose(
    files: ModelFiles, folder: Path, cache: Path, contexts: int = 1
) -> tuple[ModelFiles, WeightsChoice]:
    settings = EngineSettings(measurements=folder, contexts=contexts)
    return choose_weights(files, lambda: resolve(f"{files.name}@int8", cache), settings, QUIET)


def measured(monkeypatch: pytest.MonkeyPatch, comparison: Comparison) -> None:
    """Conversions are real, and what is measured of them is this."""
    monkeypatch.setattr(weights_choice, "_compare", lambda *_: comparison)


def no_measuring(*_: object) -> Comparison:
    raise AssertionError("measured again")


@pytest.mark.parametrize(
    ("file", "int8", "kl", "form"),
    [
        (SLOW, FAST, 0.002, INT8),
        (FAST, SLOW, 0.002, FILE),
        (FAST, FAST, 0.002, FILE),
        (SLOW, FAST, 0.01, FILE),
        (SLOW, FAST, float("nan"), FILE),
    ],
)
@pytest.mark.parametrize("serves", [False, True])
def test_the_faster_form_is_taken_if_it_is_close(
    file: CostTable, int8: CostTable, kl: float, form: str, serves: bool
):
    assert Comparison(file, int8, kl).choice(serves=serves).form == form


def test_servers_weigh_calls_of_many_rows():
    dear, cheap = CostTable({1: 0.02, 8: 0.16}), CostTable({1: 0.03, 8: 0.08})
    comparison = Comparison(dear, cheap, 0.0)
    assert comparison.choice(serves=True).faster == pytest.approx(2)
    single = comparison.choice(serves=False).faster
    assert single is not None
    assert single < 2


def test_costs_are_the_least_of_both_forms_and_a_form_is_equal_to_itself(
    tiny_files: ModelFiles, tiny_int8: ModelFiles
):
    def opened(files: ModelFiles, *, round_inputs: bool = False) -> Engine:
        settings = EngineSettings(cache_tokens=256, round_inputs=round_inputs)
        return open_engine("openvino", files.path, files.context_length, settings)

    own, int8 = opened(tiny_files), opened(tiny_int8)
    tables = measure_seconds([own, int8])
    assert [[*table] for table in tables] == [[1, 2, 4, 8]] * 2
    text = [*range(1, 100)]
    assert divergence(own, own, text) == 0
    assert 0 < divergence(own, int8, text) < 0.1
    assert own.describe() != opened(tiny_files, round_inputs=True).describe(), "profiles are apart"


def test_the_form_is_measured_once_and_answers_as_plain_decoding_of_it(
    tiny_gguf: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(loading, "MEASUREMENTS", str(tmp_path / "measured"))
    measured(monkeypatch, Comparison(SLOW, FAST, 0.002))

    def opened(engine: str = "openvino") -> Model:
        return load(tiny_gguf, engine=engine, weights="auto")

    model = opened()
    assert model.files.name == f"{tiny_gguf}@int8"
    assert model.files.fingerprint != load(tiny_gguf, engine="openvino").files.fingerprint
    assert model.weights_choice is not None
    assert model.weights_choice.kl == 0.002
    monkeypatch.setattr(weights_choice, "_compare", no_measuring)
    prompt = [5, 6, 7, 5, 6, 7, 5, 6]
    answers = [
        opened().generate(prompt, drafter=drafter, max_tokens=40, ignore_eos=True).token_ids
        for drafter in ("none", "suffix", "ngram")
    ]
    assert answers == [answers[0]] * 3
    report = plan(opened, "openvino", again=False)
    assert report.value["weights"]["form"] == INT8
    assert "weights: int8" in report.text


def test_a_form_that_loses_is_removed_unless_it_was_here(
    tiny_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    cache = tmp_path / "cache"
    monkeypatch.setenv("PACELINE_CACHE", str(cache))
    measured(monkeypatch, Comparison(FAST, SLOW, 0.002))
    files = resolve(str(tiny_gguf), cache)
    taken, choice = choose(files, tmp_path / "measured", cache)
    assert (taken, choice.form) == (files, FILE)
    assert not [*(cache / "models").glob("int8-*")]
    resolve(f"{tiny_gguf}@int8", cache)
    shutil.rmtree(tmp_path / "measured")
    choose(files, tmp_path / "measured", cache)
    assert len([*(cache / "models").glob("int8-*")]) == 1


def test_nothing_is_stored_of_an_interrupted_comparison(
    tiny_files: ModelFiles, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def interrupted(*_: object) -> float:
        raise KeyboardInterrupt

    folder = tmp_path / "measured"
    resolve(f"{tiny_files.name}@int8", cache)
    monkeypatch.setattr(weights_choice, "divergence", interrupted)
    with pytest.raises(KeyboardInterrupt):
        choose(tiny_files, folder, cache)
    assert not [*folder.glob("*")]
    monkeypatch.setattr(weights_choice, "divergence", lambda *_: 0.5)
    assert choose(tiny_files, folder, cache)[1].form == FILE
    (stored,) = folder.iterdir()
    stored.write_bytes(b'{"file": {}}')
    assert choose(tiny_files, folder, cache)[1].kl == 0.5, "a damaged record is measured again"


@pytest.mark.parametrize("hinders", ["memory", "disk", "family", "engine"])
def test_where_int8_cannot_be_the_file_stays_and_nothing_is_measured(
    hinders: str,
    tiny_files: ModelFiles,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    cache, files = tmp_path / "cache", tiny_files
    monkeypatch.setattr(weights_choice, "_compare", no_measuring)
    if hinders == "memory":
        monkeypatch.setattr(weights_choice, "fits", lambda _bytes: False)
    elif hinders == "disk":
        monkeypatch.setattr("paceline.models.prepare.peak_disk_bytes", lambda _bytes: 1 << 60)
    elif hinders == "family":
        files = resolve(str(write_gguf_of("llama3", tmp_path / "m.gguf")), cache)
    else:
        files = replace(files, engine="llamacpp")
    taken, choice = choose(files, tmp_path / "measured", cache)
    assert taken == files
    assert choice == WeightsChoice(FILE, choice.reason)
    assert not (tmp_path / "measured").exists()
    assert not [*(cache / "models").glob("int8-*")]


def test_a_name_with_a_form_contradicts_auto(tiny_gguf: Path, cache: Path):
    with pytest.raises(InvalidRequest):
        load(f"{tiny_gguf}@int8", weights="auto")
