"""What calls of artifacts multiply and read, against formulas and against the rehearsal's sums."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("coremltools")

from paceline.errors import InvalidRequest
from paceline_coreml.engine.artifact import Artifact, read_artifact
from paceline_coreml.engine.engine import CoreMlEngine
from paceline_coreml.engine.flops import (
    PartWork,
    count,
    experts_read,
    only_chosen,
    total,
    work_of,
)
from paceline_coreml.rehearsal.model import RehearsalModel
from support.coreml import STATIC, tiny_artifact
from support.zaya import BIAS_OF_NONE, EXPERTS, LAYERS, zaya_artifact

pytestmark = pytest.mark.coreml

Make = Callable[[str], Artifact]

SLOTS, ZAYA_SLOTS, RING = 192, 64, 64
RECIPES: dict[str, tuple[Callable[..., Path], dict[str, Any]]] = {
    "llama": (tiny_artifact, {"taps": (0, 2)}),
    "static": (tiny_artifact, STATIC),
    "zaya": (zaya_artifact, {}),
    "soft": (zaya_artifact, {"routing": "soft"}),
}
"""`llama` and `static` have weights of int8, the others of float16."""


@pytest.fixture(scope="module")
def made(core_ml: Callable[..., Path], quiet_coremltools: None) -> Make:
    def make(name: str) -> Artifact:
        convert, options = RECIPES[name]
        return read_artifact(core_ml(convert, **options))

    return cache(make)


def attention_macs(*, d: int, heads: int, keys: int, size: int, slots: int) -> int:
    """Of a row: q, k, v and o, writing keys and values to slots, scores, and what is seen."""
    q, k = heads * size, keys * size
    return d * (2 * q + 2 * k) + 2 * slots * k + 2 * slots * q


# Hidden size, heads, heads of keys, head size; see `tiny_llama` and `tiny_zaya`.
LLAMA = {
    "attention": 3 * attention_macs(d=64, heads=4, keys=2, size=16, slots=SLOTS),
    "feed-forward": 3 * 3 * 64 * 96,
    "rest": 0,
    "head": 64 * 160,
}
# Of queries and keys one convolution of both taps within heads; of those and the delayed half of
# the values a ring of recent rows, written once and read for two lags.
ZAYA = {
    "attention": LAYERS
    * (
        attention_macs(d=48, heads=6, keys=2, size=16, slots=ZAYA_SLOTS)
        + 2 * (6 + 2) * 16 * 16
        + 3 * RING * (6 + 2 + 1) * 16
    ),
    "router": LAYERS * (48 * 24 + 2 * 24 * 24 + 24 * (EXPERTS + 1)),
    "experts": LAYERS * EXPERTS * 3 * 48 * 20,
    "rest": 0,
    "head": 48 * 160,
}


@pytest.mark.parametrize(("name", "expected"), [("llama", LLAMA), ("zaya", ZAYA), ("soft", ZAYA)])
def test_a_row_takes_the_multiplications_of_its_matrices(
    made: Make, name: str, expected: dict[str, int]
):
    calls = work_of(made(name)).whole
    assert [*calls] == [1, 4]
    for rows, parts in calls.items():
        assert {part: done.macs for part, done in parts.items()} == {
            part: rows * macs for part, macs in expected.items()
        }


def test_a_call_reads_the_weights_once_as_they_are_stored(made: Make):
    # In int8 with a float16 scale for each channel, but for the two matrices of 2,048 numbers.
    attention = 2 * (64 * 64 + 2 * 64) + 2 * 2 * 32 * 64
    feed_forward = 3 * 64 * 96 + 2 * (96 + 96 + 64)
    for parts in work_of(made("llama")).whole.values():
        assert parts["attention"].weight_bytes == 3 * attention
        assert parts["feed-forward"].weight_bytes == 3 * feed_forward
        # The head's own norm is with it: a weight, and its two bounds.
        assert parts["head"].weight_bytes == 64 * 160 + 2 * 160 + 2 * (2 * 64 + 2 * 2)


@pytest.mark.parametrize("name", ["zaya", "soft"])
def test_a_static_graph_reads_and_computes_all_experts_for_every_row(made: Make, name: str):
    calls = work_of(made(name)).whole
    # The converter adds the bias of the merge behind it to the last matrix.
    stored = 2 * LAYERS * (EXPERTS * 3 * 48 * 20 + 48)
    assert [parts["experts"].weight_bytes for parts in calls.values()] == [stored, stored]
    assert calls[4]["experts"].macs == 4 * calls[1]["experts"].macs


@pytest.mark.parametrize("name", ["llama", "zaya"])
@pytest.mark.parametrize("rows", [1, 4])
def test_parts_together_are_all_that_the_rehearsal_counts(made: Make, name: str, rows: int):
    artifact = made(name)
    done = []
    for shard in (*artifact.layer_shards, *artifact.head_shards):
        model = RehearsalModel(artifact.folder / shard.path)
        shapes = {
            one.name: [
                least if least == most else rows
                for least, most in zip(one.lower, one.upper, strict=True)
            ]
            for one in model.function.inputs
        }
        zeros = {input: np.zeros(shape, np.float32) for input, shape in shapes.items()}
        model.predict(zeros, model.make_state())
        done.append(model.last_work)
    assert total(work_of(artifact).whole[rows]) == PartWork(
        sum(work.macs for work in done), sum(work.weight_bytes for work in done)
    )


def test_which_expert_a_row_has_is_what_transformers_picks(made: Make):
    import torch
    from transformers import ZayaForCausalLM

    artifact = made("zaya")
    text = np.random.default_rng(0).integers(0, 160, 40).tolist()
    model = ZayaForCausalLM.from_pretrained(artifact.folder.parent / "checkpoint").float().eval()
    for layer in model.model.layers:
        layer.mlp.gate.balancing_biases[-1] = BIAS_OF_NONE
    with torch.no_grad():
        out = model(torch.tensor([text]), output_router_logits=True)
    picks = [
        (logits.softmax(-1) + layer.mlp.gate.balancing_biases).argmax(-1).numpy()
        for logits, layer in zip(out.router_logits, model.model.layers, strict=True)
    ]
    # Its last class is none of the experts.
    expected = np.eye(EXPERTS + 1, dtype=bool)[np.array(picks)][..., :EXPERTS]
    assert 0 < expected.any(-1).mean() < 1
    for rows in (1, 4):
        calls = count(artifact, [text[at : at + rows] for at in range(0, 40, rows)])
        found = np.concatenate([call.has for call in calls], axis=1)
        np.testing.assert_array_equal(found, expected)


def test_in_soft_routing_there_is_nothing_to_leave_out(made: Make):
    work = work_of(made("soft"))
    assert work.chosen == work.whole


def test_without_what_no_row_has_a_call_of_more_rows_reads_more(made: Make):
    artifact = made("zaya")
    text = np.random.default_rng(1).integers(0, 160, 61).tolist()
    calls = count(artifact, [text[:1], *(text[at : at + 4] for at in range(1, 61, 4))])
    has = np.concatenate([call.has for call in calls], axis=1)
    fewer, more = (only_chosen(calls[at].parts, has, rows) for at, rows in ((0, 1), (1, 4)))
    assert {**more, "experts": calls[1].parts["experts"]} == calls[1].parts
    less, read = fewer["experts"].weight_bytes, more["experts"].weight_bytes
    assert less < read < min(4 * less, calls[1].parts["experts"].weight_bytes)
    assert more["experts"].macs == pytest.approx(4 * fewer["experts"].macs, abs=4)


def test_a_model_without_experts_leaves_out_nothing(made: Make):
    assert work_of(made("llama")).chosen == {}


def test_only_calls_that_a_static_function_takes_are_counted(made: Make):
    assert [*work_of(made("static")).whole] == [4]
    found = count(made("static"), [[1, 2], [3, 4, 5, 6]])
    flexible = count(made("llama"), [[1, 2], [3, 4, 5, 6]])
    for one, other in zip(found, flexible, strict=True):
        assert total(one.parts).macs == total(other.parts).macs
        assert one.parts["attention"] == other.parts["attention"]
    with pytest.raises(InvalidRequest, match=r"1, 3 rows"):
        count(made("static"), [[1], [2, 3, 4]])


def test_a_text_that_does_not_fit_is_refused(made: Make):
    with pytest.raises(InvalidRequest, match=rf"{SLOTS + 1} tokens"):
        count(made("llama"), [[1]] * (SLOTS + 1))


def test_the_engine_says_what_its_calls_do(made: Make):
    engine = CoreMlEngine(made("zaya").folder)
    assert engine.work() == work_of(made("zaya"))


def test_experts_are_read_once_for_rows_of_a_block():
    # One layer, four rows: the first two have one expert, the third another, the last none.
    has = np.zeros((1, 4, 4), bool)
    has[0, 0, 2] = has[0, 1, 2] = has[0, 2, 3] = True
    assert experts_read(has, 1) == pytest.approx(3 / 4)
    assert experts_read(has, 2) == pytest.approx((1 + 2 + 1) / 3)
    assert experts_read(has, 4) == 2
    parts = {"experts": PartWork(160, 80), "head": PartWork(10, 20)}
    assert only_chosen(parts, has, 4) == {
        "experts": PartWork(160 * 3 // 16, 80 * 2 // 4),
        "head": PartWork(10, 20),
    }
