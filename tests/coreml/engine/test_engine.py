"""The engine for Core ML artifacts, rehearsed: against torch, and what it asks of its shards."""

from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from paceline.decoding.types import Best, Block
from paceline.engines import EngineSettings
from paceline.errors import InvalidRequest, ModelError
from paceline_coreml.engine.call import keep_best
from paceline_coreml.engine.engine import CoreMlEngine
from support import mil
from support.coreml import STATIC, seal, tiny_artifact
from support.engine_rows import rows_of

pytestmark = pytest.mark.coreml

TEXT = [(7 * i + i * i) % 160 for i in range(23)]


@pytest.fixture(scope="module")
def engine(tiny_core_ml: Path) -> CoreMlEngine:
    return CoreMlEngine(tiny_core_ml, EngineSettings(taps=(0, 2)), rounding="f32")


@pytest.fixture(scope="module")
def static(core_ml: Callable[..., Path]) -> Path:
    """An artifact with functions for two rows and for four."""
    return core_ml(tiny_artifact, **STATIC)


def test_engine_rows_match_the_layers_in_torch(engine: CoreMlEngine, tiny_core_ml: Path):
    from paceline_coreml.conversion.families import open_family
    from support.coreml_torch import TorchModel

    family = open_family(tiny_core_ml.parent / "checkpoint", slots=192, conv_slots=64)
    network = TorchModel(family, rows=4)
    expected, streams = [], []
    for at in range(0, len(TEXT), 4):
        ran = network.step(TEXT[at : at + 4])
        network.keep(len(TEXT[at : at + 4]))
        expected.append(ran.logits)
        streams.append(ran.streams[2])
    rows, whole = np.concatenate(expected), rows_of(engine, TEXT, [len(TEXT)])
    cosines = (rows * whole).sum(1) / np.linalg.norm(rows, axis=1) / np.linalg.norm(whole, axis=1)
    # The weights are int8 here; without that the difference is rounding alone.
    assert cosines.min() > 0.999
    with closing(engine.open()) as sequence:
        taps = engine.step([(sequence, Block(TEXT, 0))]).taps[0]
    assert set(taps) == {"tap.0", "tap.2"}
    last = np.concatenate(streams)
    assert taps["tap.2"].shape == last.shape
    assert np.abs(taps["tap.2"] - last).max() < 0.1 * np.abs(last).max()
    assert np.abs(taps["tap.0"] - last).max() > 0.1 * np.abs(last).max()


def test_best_tokens_match_the_argmax_of_all_logits(engine: CoreMlEngine):
    whole = rows_of(engine, TEXT, [len(TEXT)])
    with closing(engine.open()) as sequence:
        for rows in (0, 1, 6, len(TEXT)):
            result = engine.step([(sequence, Block(TEXT, rows, best=True))])
            best = result.best[0]
            assert best is not None
            assert len(result.logits[0]) == 0
            expected = whole[len(TEXT) - rows :]
            assert best.tokens.tolist() == expected.argmax(axis=1).tolist()
            assert best.scores.tolist() == expected.max(axis=1).tolist()


def parts(rows: np.ndarray, cuts: Sequence[int]) -> Best:
    best = Best(np.zeros(len(rows), np.int64), np.zeros(len(rows), np.float32))
    for start, end in zip((0, *cuts), (*cuts, rows.shape[1]), strict=True):
        keep_best(best, rows[:, start:end], start)
    return best


@pytest.mark.parametrize("cuts", [[], [3], [1, 4], [2, 3, 5]])
def test_a_split_vocabulary_gives_the_same_argmax(cuts: list[int]):
    nan = np.nan
    rows = np.array(
        [
            [1, 5, 2, 5, 0, 5],  # the first of equals
            [-3, -2, -9, -1, -1, -4],
            [-np.inf] * 6,
            [0, 1, nan, 7, nan, 2],  # NaN is above all
            [2, 1, 0, 3, 3, nan],
        ],
        np.float32,
    )
    best = parts(rows, cuts)
    assert best.tokens.tolist() == rows.argmax(axis=1).tolist()
    np.testing.assert_array_equal(best.scores, rows.max(axis=1))


@pytest.mark.parametrize("which", ["flexible", "static"])
def test_forward_passes_may_have_only_the_needed_rows(which: str, tiny_core_ml: Path, static: Path):
    folder = static if which == "static" else tiny_core_ml
    engine = CoreMlEngine(folder, EngineSettings(min_rows=1), rounding="f32")
    exact = CoreMlEngine(folder, rounding="f32")
    expected = rows_of(exact, TEXT, [len(TEXT)])
    assert rows_of(engine, TEXT, [9, 1, 4, 3, 6]).tobytes() == expected.tobytes()
    assert [bucket.rows for bucket in exact._decode] == [4]
    widths = [2, 4] if which == "static" else [1, 2, 3, 4]
    assert [bucket.rows for bucket in engine._decode] == widths
    assert engine.describe()["rows"] == ",".join(map(str, widths))


def test_a_tap_missing_from_the_artifact_is_rejected(tiny_core_ml: Path):
    with pytest.raises(InvalidRequest, match=r"no hidden states of layers 1.*--taps"):
        CoreMlEngine(tiny_core_ml, EngineSettings(taps=(0, 1)))


def test_an_unknown_operation_in_a_shard_is_named(artifact: Path):
    """It is found when the artifact is opened, not in the middle of an answer."""
    mil.edit(
        next(artifact.glob("layers-000-*")),
        lambda spec: setattr(mil.operation(spec, "softmax"), "type", "soft_guess"),
    )
    seal(artifact)
    with pytest.raises(ModelError, match=r"layers-000-002.mlpackage.*soft_guess"):
        CoreMlEngine(artifact)
