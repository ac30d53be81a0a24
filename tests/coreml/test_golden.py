"""`golden` passes a right artifact and names the faults planted in others."""

import json
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import coremltools as ct
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import save_file

from paceline.errors import InvalidRequest, ModelError
from paceline.models import QUIET
from paceline.models.checkpoints import read_facts
from paceline.models.manifest import TOKENIZER
from paceline.storage.coreml import EMBEDDINGS
from paceline.storage.manifest import MANIFEST
from paceline.storage.report import Report
from paceline_coreml import golden
from paceline_coreml.conversion import layers
from paceline_coreml.conversion.checkpoint import read_checkpoint
from paceline_coreml.conversion.compress import compress
from paceline_coreml.conversion.convert import CONV_SLOTS
from paceline_coreml.conversion.families import open_family
from paceline_coreml.conversion.scratch import scratch
from paceline_coreml.conversion.shards import ShardSizes, convert_layers
from paceline_coreml.engine.artifact import ROTARY
from paceline_coreml.golden import stored_weights
from paceline_coreml.golden.reference import Reference
from paceline_coreml.rehearsal import plan
from paceline_coreml.rehearsal.rounding import to_half
from support.coreml import seal
from support.coreml_checkpoints import (
    BOS,
    RARE,
    VOCAB,
    convert_tiny,
    tiny_checkpoint,
    write_tokenizer,
)
from support.errors import raises

pytestmark = pytest.mark.coreml

TOKENS = 14
"""Of each text: five blocks, the last not full."""

LAYERS = ("layers-000-002.mlpackage", "layers-002-003.mlpackage")
HEADS = ("head-000000-000080.mlpackage", "head-000080-000160.mlpackage")


def check(artifact: Path, checkpoint: Path, **options: Any) -> Report:
    return golden.report(artifact, checkpoint, **{"tokens": TOKENS, "progress": QUIET, **options})


def failing(report: Report) -> list[str]:
    """The comparisons that fail."""
    return [name for name, passed in report.value["verdicts"].items() if passed is False]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module")
def good(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return convert_tiny(checkpoint, tmp_path_factory.mktemp("artifact") / "llama")


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The last layer of another checkpoint of the same sizes, as the artifact has its own."""
    folder = tmp_path_factory.mktemp("other")
    family = open_family(
        tiny_checkpoint(folder / "checkpoint", seed=1), slots=64, conv_slots=CONV_SLOTS
    )
    program = convert_layers(family, 2, 3, sizes=ShardSizes(3, 64, CONV_SLOTS), taps=(2,))
    compress(program, "int8").save(str(folder / LAYERS[1]))
    return folder / LAYERS[1]


@pytest.fixture
def artifact(good: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(good, tmp_path / "artifact"))


def test_a_converted_artifact_passes(good: Path, checkpoint: Path):
    report = check(good, checkpoint)
    value = json.loads(json.dumps(report.value, allow_nan=False))
    assert report.passed, report.text
    assert (value["passed"], value["faults"]) == (True, [])
    assert (value["family"], value["units"], value["rounding"]) == ("llama", "rehearsed", "f16")
    assert [(way["way"], way["difference"]) for way in value["ways"]] == [
        ("calls of 1 rows", 0),
        ("calls of 2 rows", 0),
        ("the engine, whole texts", 0),
        ("the engine, single tokens", 0),
        ("the engine, with rejected rows", 0),
    ]
    assert [place["layer"] for place in value["layers"]] == [None, 0, 1, 2]
    assert all(place["nearness"]["cosine"]["worst"] > 0.99999 for place in value["layers"])
    assert value["picks"]["ordinary"]["rows"] == 2 * TOKENS
    verdicts = {"blocks": True, "graph": True, "format": True, "weights": None}
    assert value["verdicts"] == verdicts
    assert value["weights"]["divergence"] < 1e-3
    assert "graph-correct" in report.text
    assert "shows nothing about the Neural Engine" in report.text
    assert [len(rows) for _, _, rows in report.tables] == [5, 5]


@pytest.mark.parametrize(
    ("model", "weights"), [("lfm2", "f16"), ("zaya", "int8"), ("zaya", "int4")]
)
def test_other_families_pass_the_parity_check(model: str, weights: str, tmp_path: Path):
    checkpoint = tiny_checkpoint(tmp_path / "checkpoint", model)
    artifact = convert_tiny(checkpoint, tmp_path / "artifact", head_rows=VOCAB, weights=weights)
    report = check(artifact, checkpoint)
    assert report.passed, report.text


def test_soft_expert_routing_is_compared_as_is(tmp_path: Path):
    checkpoint = tiny_checkpoint(tmp_path / "checkpoint", "zaya")
    weights = dict(read_checkpoint(checkpoint)[1])
    for name, weight in weights.items():  # packages have products with the rounded scales
        weights[name] = weight * (1.0004 if name.endswith("hidden_states_scale") else 1)
    save_file(weights, checkpoint / "model.safetensors", {"format": "pt"})
    options = {"head_rows": VOCAB, "weights": "f16", "routing": "soft", "topology": "2"}
    artifact = convert_tiny(checkpoint, tmp_path / "artifact", **options)
    report = check(artifact, checkpoint)
    assert report.passed, report.text
    assert report.value["layers"][-1]["nearness"]["error"]["worst"] < 4e-4
    assert report.value["top_1"]["nearness"]["cosine"]["median"] < 0.99
    assert "soft routing, compared with top-1: " in report.text
    weights["model.layers.1.mlp.experts.down_proj"][0] *= -1
    save_file(weights, checkpoint / "model.safetensors", {"format": "pt"})
    (fault, *_) = check(artifact, checkpoint).value["faults"]
    assert fault.startswith("graph: layer 1, out_hidden")


def test_static_functions_pass_the_parity_check(checkpoint: Path, tmp_path: Path):
    artifact = convert_tiny(
        checkpoint,
        tmp_path / "artifact",
        functions=(3, 12),
        taps=(),
        head_rows=VOCAB,
        weights="f16",
    )
    report = check(artifact, checkpoint)
    assert report.passed, report.text
    assert report.value["ways"][0]["way"] == "calls of 12 rows"
    assert report.value["ways"][-1]["way"] == "the engine, a prompt"
    assert len(report.value["ways"]) == 5
    # Without taps, outputs are the ends of shards.
    assert [place["layer"] for place in report.value["layers"]] == [None, 1, 2]


def test_texts_start_with_the_checkpoints_bos_token(good: Path, checkpoint: Path, tmp_path: Path):
    with_bos = Path(shutil.copytree(checkpoint, tmp_path / "checkpoint"))
    write_tokenizer(with_bos, bos=True)
    begun = Path(shutil.copytree(good, tmp_path / "artifact"))
    facts = json.loads((begun / MANIFEST).read_text())["facts"]
    assert read_facts(with_bos).add_bos
    seal(begun, facts={**facts, "add_bos": True, "bos_token_id": BOS})
    report = check(begun, with_bos)
    assert report.passed, report.text
    assert all(text["tokens"].count(BOS) == 1 for text in report.value["texts"])
    assert all(text["tokens"][0] == BOS for text in report.value["texts"])
    (fault,) = check(good, with_bos).value["faults"]
    assert fault == ("graph: BOS: a text begins with no BOS; the checkpoint's begins with token 1")


def another_shard(artifact: Path, other: Path) -> None:
    shutil.rmtree(artifact / LAYERS[1])
    shutil.copytree(other, artifact / LAYERS[1])


def swapped_taps(artifact: Path, _other: Path) -> None:
    path = artifact / LAYERS[0]
    model = ct.models.MLModel(str(path), skip_model_load=True)
    spec = model.get_spec()
    for old, new in (("tap_0", "a"), ("out_hidden", "tap_0"), ("a", "out_hidden")):
        ct.utils.rename_feature(spec, old, new)
    changed = ct.models.MLModel(spec, weights_dir=model.weights_dir, skip_model_load=True)
    shutil.rmtree(path)
    changed.save(str(path))


def swapped_heads(artifact: Path, _other: Path) -> None:
    first, second = (artifact / name for name in HEADS)
    first.rename(artifact / "beside")
    second.rename(first)
    (artifact / "beside").rename(second)


def bad_rotary(artifact: Path, _other: Path) -> None:
    tables = np.load(artifact / ROTARY)
    tables[:, 1:32] = tables[:, 2:64:2].copy()
    np.save(artifact / ROTARY, tables)


def rare_embeddings(artifact: Path, _other: Path) -> None:
    embeddings = np.load(artifact / EMBEDDINGS)
    embeddings[-RARE:] = embeddings[:RARE]
    np.save(artifact / EMBEDDINGS, embeddings)


def another_tokenizer(artifact: Path, _other: Path) -> None:
    value = json.loads((artifact / TOKENIZER).read_text())
    words = value["model"]["vocab"]
    words["a"], words["e"] = words["e"], words["a"]
    (artifact / TOKENIZER).write_text(json.dumps(value))


FAULTS: dict[str, tuple[Callable[[Path, Path], None], Sequence[str]]] = {
    "a shard of another checkpoint": (
        another_shard,
        [r"layer 2, out_hidden of layers-002-003\.mlpackage: cosine"],
    ),
    "taps of the wrong layers": (
        swapped_taps,
        [r"layer 0, tap_0 of layers-000-002.*cosine .*\(and 2 of the 2 outputs after it"],
    ),
    "shards of the head that are swapped": (swapped_heads, ["logits: cosine"]),
    "a bad rotary table": (
        bad_rotary,
        [
            r"rotary\.npy: differs from the checkpoint's, starting at position 1$",
            r"layer 0, tap_0 .*cosine .* at row",
        ],
    ),
    "other embeddings of rare tokens only": (
        rare_embeddings,
        [
            rf"embeddings\.npy: differs from the checkpoint's, starting at token {VOCAB - RARE}$",
        ],
    ),
    "another tokenizer": (
        another_tokenizer,
        ["tokenizer: prose has other tokens", "tokenizer: code has other tokens"],
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_an_injected_fault_is_reported(name: str, artifact: Path, other: Path, checkpoint: Path):
    plant, expected = FAULTS[name]
    plant(artifact, other)
    seal(artifact)
    report = check(artifact, checkpoint)
    assert not report.passed
    faults = report.value["faults"]
    assert len(faults) >= len(expected), faults
    for fault, pattern in zip(faults, expected, strict=False):
        assert re.match(f"graph: {pattern}", fault), f"{pattern!r} does not match {fault}"
    assert "is NOT" in report.text.splitlines()[-1]


def test_swapped_heads_and_tokens_are_detected_although_one_row_matches(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    right = layers.Attention.forward

    def wrong(self: Any, q: Any, k: Any, v: Any, step: Any) -> Any:
        seen = right(self, q, k, v, step)
        by_head = seen.reshape(1, self.heads, self.head_dim, -1).transpose(2, 3)
        return by_head.reshape(1, self.heads * self.head_dim, -1, 1)

    monkeypatch.setattr(layers.Attention, "forward", wrong)
    artifact = convert_tiny(checkpoint, tmp_path / "artifact", head_rows=VOCAB, weights="f16")
    faults = check(artifact, checkpoint).value["faults"]
    assert faults[0].startswith(
        "blocks: calls of 1 rows: tap_0 of layers-000-002.mlpackage differs from"
    )
    assert any(fault.startswith("graph: layer 0, tap_0") for fault in faults)


def test_one_wrong_expert_of_twelve_is_a_fault_of_the_graph(tmp_path: Path):
    checkpoint = tiny_checkpoint(tmp_path / "checkpoint", "privacy filter")
    artifact = convert_tiny(checkpoint, tmp_path / "artifact", functions=(48,), taps=())
    weights = dict(read_checkpoint(checkpoint)[1])
    for name in ("gate_up_proj", "down_proj"):
        experts = weights[f"model.layers.1.mlp.experts.{name}"]
        experts[[3, 4]] = experts[[4, 3]]
    save_file(weights, checkpoint / "model.safetensors", {"format": "pt"})
    report = check(artifact, checkpoint)
    graph = {"blocks": True, "graph": False, "format": True, "weights": None}
    assert report.value["verdicts"] == graph
    stored = (
        r"graph: model\.layers\.1\.mlp\.experts\.\w+: \d+ of \d+ rows of the stored weight are not"
    )
    assert re.match(stored, report.value["faults"][-1])


def test_a_lost_scale_is_a_fault_of_the_graph(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    with monkeypatch.context() as patch:
        patch.setattr(layers.Attention.__init__, "__defaults__", (1.0,))
        artifact = convert_tiny(checkpoint, tmp_path / "artifact", head_rows=VOCAB, weights="int4")
    report = check(artifact, checkpoint)
    assert failing(report) == ["graph"]
    assert report.value["faults"][0].startswith("graph: layer 0, tap_0")


def test_losses_of_format_and_weights_have_their_own_verdicts(
    good: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
):
    report = check(good, checkpoint, max_divergence=1e-9)
    assert report.value["verdicts"] == {
        "blocks": True,
        "graph": True,
        "format": True,
        "weights": False,
    }
    (fault,) = report.value["faults"]
    assert re.match(r"weights: they diverge by 0\.\d+ nats .* at most 1e-09", fault)

    def coarse(numbers: Any) -> np.ndarray:
        rounded = to_half(numbers)
        rounded.view(np.uint32)[...] &= np.uint32(0xFFFE0000)  # 6 bits of fraction
        return rounded

    monkeypatch.setattr(plan, "to_half", coarse)
    report = check(good, checkpoint, max_divergence=1.0)
    assert report.value["verdicts"] == {
        "blocks": True,
        "graph": True,
        "format": False,
        "weights": True,
    }
    assert report.value["faults"][0].startswith("format: f16 loses ")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tokens": 0}, "texts of 0 tokens"),
        ({"tokens": 62}, "65 slots, and the artifact has 64"),
    ],
)
def test_invalid_parity_check_options_are_rejected(
    options: dict[str, Any], message: str, good: Path, checkpoint: Path
):
    with pytest.raises(InvalidRequest, match=message):
        check(good, checkpoint, **options)


def test_another_family_or_a_missing_weight_is_rejected(
    good: Path, checkpoint: Path, tmp_path: Path
):
    with raises(ModelError, "was not converted from", "family llama, not lfm2, layers 3, not"):
        check(good, tiny_checkpoint(tmp_path / "other", "lfm2"))
    lacking = Path(shutil.copytree(checkpoint, tmp_path / "checkpoint"))
    weights = dict(read_checkpoint(checkpoint)[1])
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, lacking / "model.safetensors", {"format": "pt"})
    with raises(ModelError, "model.layers.1.mlp.up_proj.weight"):
        check(good, lacking)


def test_a_disk_without_room_for_the_copy_is_reported_before_writing(
    good: Path, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    with scratch(tmp_path):
        usage = shutil.disk_usage(tmp_path)._replace(free=300_000)
        monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
        monkeypatch.setattr(stored_weights, "save_file", None)
        free = rf"\(\d{{6}} bytes\) free in {tmp_path}, which has 0\.3 MB.*--temporary"
        with pytest.raises(ModelError, match=f"float32 copy of the checkpoint needs .* {free}"):
            check(good, checkpoint)


def test_classifier_labels_and_scores_are_compared(tmp_path: Path):
    checkpoint = tiny_checkpoint(tmp_path / "checkpoint", "privacy filter")
    options = {"functions": (48,), "taps": (), "weights": "f16"}
    artifact = convert_tiny(checkpoint, tmp_path / "artifact", **options)
    report = check(artifact, checkpoint)
    assert report.passed, report.text
    assert [way["way"] for way in report.value["ways"]] == ["texts packed"]
    assert report.value["picks"]["nearness"]["cosine"]["median"] > 0.99
    with pytest.raises(InvalidRequest, match="49 slots, and the artifact has 48"):
        check(artifact, checkpoint, tokens=49)
    weights = dict(read_checkpoint(checkpoint)[1])
    weights["model.layers.1.self_attn.o_proj.weight"] *= -1
    save_file(weights, checkpoint / "model.safetensors", {"format": "pt"})
    (fault, *_) = check(artifact, checkpoint).value["faults"]
    assert fault.startswith("graph: logits: cosine")


def test_the_reference_records_each_layers_output(checkpoint: Path):
    reference = Reference(checkpoint)
    tokens = [5, 9, 100, 3, 3, 41]
    said = reference.run(tokens)
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    with torch.no_grad():
        out = model(torch.tensor([tokens]), output_hidden_states=True)
        hidden = [each[0].numpy() for each in out.hidden_states]
        last = model.model.norm(torch.from_numpy(said.streams[-1])).numpy()
    assert len(said.streams) == len(hidden) == 4
    for found, expected in zip(said.streams[:-1], hidden[:-1], strict=True):
        np.testing.assert_array_equal(found, expected)
    np.testing.assert_allclose(last, hidden[-1], atol=1e-6)
    assert np.abs(said.streams[-1] - hidden[-1]).max() > 0.1
    np.testing.assert_array_equal(said.logits, out.logits[0].numpy())
