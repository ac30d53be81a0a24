"""A token classifier from checkpoint to labels: converted, rehearsed, against transformers."""

import io
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from paceline.cli.app import main
from paceline.errors import InvalidRequest, ModelError
from paceline.models import QUIET
from paceline.storage.manifest import MANIFEST
from paceline_coreml.conversion.convert import convert
from paceline_coreml.engine.artifact import read_artifact
from paceline_coreml.engine.classifier import TextClassifier
from paceline_coreml.engine.engine import CoreMlEngine
from paceline_coreml.options import ConversionOptions
from support.coreml import tiny_source
from support.coreml_families import TinyModel
from support.errors import raises
from support.fake_mac import FakeMac, mac

__all__ = ["mac"]

pytestmark = pytest.mark.coreml

ROWS, REACH, VOCAB, HIDDEN = 24, 5, 160, 64
TOKENIZER = {
    "version": "1.0",
    "added_tokens": [],
    "pre_tokenizer": {"type": "Whitespace"},
    "model": {
        "type": "WordLevel",
        "vocab": {f"w{number}": number for number in range(VOCAB)},
        "unk_token": "w0",
    },
}
LENGTHS = [1, 2, REACH, 2 * REACH + 1, ROWS - 1, ROWS]


class Made:
    """A random checkpoint on disk, and transformers' own model of it."""

    def __init__(self, folder: Path) -> None:
        sizes = {"num_hidden_layers": 2, "hidden_size": HIDDEN, "vocab_size": VOCAB}
        sizes |= {"num_attention_heads": 4, "head_dim": 16, "swiglu_limit": 7.0}
        self.model = TinyModel("privacy filter", folder, **sizes).model
        self.folder = folder

    def scores(self, tokens: Sequence[int]) -> np.ndarray:
        with torch.no_grad():
            found: np.ndarray = self.model(torch.tensor([list(tokens)])).logits[0].numpy()
        return found

    def labels(self, tokens: Sequence[int]) -> tuple[str, ...]:
        names = self.model.config.id2label
        return tuple(names[int(best)] for best in self.scores(tokens).argmax(-1))

    def convert(self, out: Path, **recipe: Any) -> Path:
        settings: dict[str, Any] = {"weights": "f16", "rows": ROWS, "topology": "1+1", **recipe}
        source = tiny_source(self.folder, self.folder)
        source.tokenizer.write_text(json.dumps(TOKENIZER))
        return convert(source, out, ConversionOptions(**settings), progress=QUIET).folder


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return Made(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module")
def folder(made: Made, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made.convert(tmp_path_factory.mktemp("filter") / "artifact")


@pytest.fixture(scope="module")
def exact(folder: Path) -> TextClassifier:
    return TextClassifier(folder, rounding="f32")


@pytest.fixture(scope="module")
def texts() -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [rng.integers(1, VOCAB, length).tolist() for length in LENGTHS]


def called(classifier: TextClassifier, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Fills with the rows of every call of the head."""
    rows: list[int] = []

    def spied(predict: Callable[..., Any]) -> Callable[..., Any]:
        def run(data: Any, state: Any = None) -> Any:
            rows.append(data["hidden"].shape[2])
            return predict(data, state)

        return run

    for call in classifier._buckets.values():
        (head,) = call.packages.heads
        monkeypatch.setattr(head, "predict", spied(head.predict))
    return rows


def test_core_ml_scores_match_the_emulator(
    folder: Path,
    texts: list[list[int]],
    mac: FakeMac,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    copy = Path(shutil.copytree(folder, tmp_path / "artifact"))
    classifier = TextClassifier(copy)
    with_core_ml = [text.scores.tolist() for text in classifier.label(texts)]
    mac.again()
    mac.fails = lambda _: True
    with raises(ModelError, "layers-000-001.mlpackage"):
        classifier.label(texts)
    monkeypatch.setattr("paceline_coreml.engine.packages.on_a_mac", lambda: False)
    assert with_core_ml == [text.scores.tolist() for text in TextClassifier(copy).label(texts)]


@pytest.mark.parametrize("which", range(len(LENGTHS)), ids=LENGTHS)
def test_labels_and_scores_match_transformers(
    made: Made, exact: TextClassifier, texts: list[list[int]], which: int
):
    text = texts[which]
    (found,) = exact.label([text])
    assert found.labels == made.labels(text)
    assert found.scores.shape == (len(text), len(exact.labels))
    np.testing.assert_allclose(found.scores, made.scores(text), atol=1e-3, rtol=1e-3)


def test_a_text_gets_the_same_labels_alone_and_in_a_batch(
    made: Made, exact: TextClassifier, texts: list[list[int]], monkeypatch: pytest.MonkeyPatch
):
    rows = called(exact, monkeypatch)
    together = exact.label([*texts, texts[1]])
    assert rows == [ROWS, ROWS, ROWS, ROWS]  # 1 + 2 + 5 + 11, 23, 24, and 2
    for one, text in zip(together, [*texts, texts[1]], strict=True):
        (alone,) = exact.label([text])
        assert one.labels == alone.labels == made.labels(text)
        np.testing.assert_allclose(one.scores, alone.scores, atol=1e-5, rtol=1e-5)


def test_a_forward_pass_uses_the_smallest_sufficient_function(
    exact: TextClassifier, monkeypatch: pytest.MonkeyPatch
):
    rows = called(exact, monkeypatch)
    exact.label([[7]])
    exact.label([[7], [8]])
    assert rows == [1, ROWS]


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        ([[1, 2], []], "text 2 of 2 is empty"),
        ([[1] * (ROWS + 1)], rf"text 1 of 1 has {ROWS + 1} tokens.*at most {ROWS}.*more rows"),
        ([[1, VOCAB]], rf"text 1 of 1 has the token {VOCAB}; expected 0 to {VOCAB - 1}"),
        ([[1, -1]], "text 1 of 1 has the token -1"),
    ],
)
def test_unreadable_classifier_input_is_rejected(
    exact: TextClassifier, texts: list[list[int]], message: str
):
    with pytest.raises(InvalidRequest, match=message):
        exact.label(texts)


def test_classifiers_and_generative_models_are_not_confused(
    folder: Path, tiny_gguf: Path, tmp_path: Path, cache: Path, capsys: pytest.CaptureFixture[str]
):
    with raises(ModelError, "token-classification", "paceline classify"):
        CoreMlEngine(folder)
    copy = shutil.copytree(folder, tmp_path / "copy")
    manifest = json.loads((copy / MANIFEST).read_text(encoding="utf-8"))
    manifest |= {"task": "causal-lm", "vocab_size": len(manifest["labels"]), "labels": []}
    (copy / MANIFEST).write_text(json.dumps(manifest), encoding="utf-8")
    with raises(ModelError, "causal-lm", "no labels", "token classifier"):
        TextClassifier(copy)
    assert main(["classify", str(tiny_gguf), "text"]) == 2
    assert "expected a token classifier for Core ML" in capsys.readouterr().err
    for raw in ([], ["--raw"]):
        assert main(["generate", "Hi", "--model", str(folder), "--quiet", *raw]) == 2
        assert "paceline classify" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"task": "causal-lm"}, "it has 33 labels, expected none"),
        ({"labels": []}, r"(?s)labels is \[\].*the last shard ends at label 33, expected 0"),
        ({"labels": ["O", "O"]}, "expected at least one, without duplicates"),
        ({"slots": ROWS - 1}, f"slots is {ROWS - 1}, expected at least the {ROWS} rows"),
        (
            {
                "head_shards": [
                    {"path": "head-000000-000033.mlpackage", "start": 0, "end": 3},
                    {"path": "head-000000-000033.mlpackage", "start": 3, "end": 33},
                ]
            },
            "it has 2 head_shards, expected one",
        ),
    ],
)
def test_an_inconsistent_classifier_manifest_is_rejected(
    folder: Path, tmp_path: Path, changes: dict[str, Any], message: str
):
    manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    (tmp_path / MANIFEST).write_text(json.dumps({**manifest, **changes}), encoding="utf-8")
    with pytest.raises(ModelError, match=message):
        read_artifact(tmp_path)


def test_the_command_prints_tokens_and_entities_with_their_characters(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    text = "w3 w90  w41"
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    assert main(["classify", str(folder), "w7", "-", "--tokens", "--json"]) == 0
    first, second = json.loads(capsys.readouterr().out)["texts"]
    (expected,) = TextClassifier(folder).label([[3, 90, 41]])
    assert first["text"] == "w7"
    assert [each["label"] for each in second["tokens"]] == [*expected.labels]
    assert [(each["start"], each["end"]) for each in second["tokens"]] == [(0, 2), (3, 6), (8, 11)]
    assert [each["text"] for each in second["tokens"]] == ["w3", "w90", "w41"]
    assert all(0 < each["score"] <= 1 for each in second["tokens"])

    assert main(["classify", str(folder), text, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["units"] == "rehearsed"
    assert report["seconds"] * report["texts_per_second"] == pytest.approx(1)
    (value,) = report["texts"]
    names = {label[2:] for label in expected.labels if label != "O"}
    assert {each["label"] for each in value["entities"]} == names
    assert main(["classify", str(folder), text]) == 0
    printed = capsys.readouterr()
    assert "score" in printed.out
    assert "texts/s" in printed.err
