import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from paceline.decoding.types import Block
from paceline.engines import EngineSettings
from paceline.engines.openvino import OpenVinoEngine, engine
from paceline.errors import ModelError
from paceline.models import ModelFiles
from support.errors import raises
from support.waiting import PATIENCE

TOKENS = [5, 9, 2, 14, 7, 11, 30, 21, 8, 40, 3, 12]


def opened(files: ModelFiles, **settings: object) -> OpenVinoEngine:
    chosen = EngineSettings(cache_tokens=files.context_length, **settings)  # type: ignore[arg-type]
    return OpenVinoEngine(files.path, files.context_length, chosen)


def rows(engine: OpenVinoEngine, sizes: list[int]) -> list[np.ndarray]:
    """Logits of TOKENS, run in blocks of these sizes."""
    sequence, results, at = engine.open(), [], 0
    for size in sizes:
        block = Block(TOKENS[at : at + size], size)
        results += list(engine.step([(sequence, block)]).logits[0].copy())
        sequence.commit(size)
        at += size
    sequence.close()
    return results


@pytest.mark.parametrize("sizes", [[1] * 12, [2, 8, 2], [12], [9, 1, 2], [3, 3, 3, 3]])
def test_one_lane_gives_the_rows_of_three(
    sizes: list[int], tiny_files: ModelFiles, monkeypatch: pytest.MonkeyPatch
):
    three = opened(tiny_files)
    monkeypatch.setattr(engine, "memory_bytes", lambda: 0)
    one = opened(tiny_files)
    assert three.describe()["lanes"] != one.describe()["lanes"]
    assert np.array_equal(rows(three, sizes), rows(one, [12]))


def test_large_weights_are_packed_once_while_the_model_is_loaded(
    tiny_files: ModelFiles, monkeypatch: pytest.MonkeyPatch
):
    small = opened(tiny_files, threads=1)
    assert small.warm_rows == (), "packed in no time"
    assert len(small._graphs) > 1
    monkeypatch.setattr(engine, "_PACKED_AT_ONCE_BYTES", 0)
    large = opened(tiny_files, threads=1)
    assert large.warm_rows == (2, 8)
    assert len(large._graphs) == 1
    assert np.array_equal(rows(small, [2, 8, 2]), rows(large, [12]))


@pytest.mark.parametrize("size", [1, 2, 5, 12])
def test_taps_are_the_hidden_states_of_every_row(size: int, tiny_files: ModelFiles):
    tapped = opened(tiny_files, taps=(0, 1))
    whole = tapped.step([(tapped.open(), Block(TOKENS, 0))]).taps[0]
    expected = {name: array.copy() for name, array in whole.items()}
    assert list(expected) == ["tap.0", "tap.1"]
    assert {array.shape[0] for array in expected.values()} == {12}
    result = tapped.step([(tapped.open(), Block(TOKENS[:size], 1))]).taps[0]
    for name, array in result.items():
        assert array.shape == (size, expected[name].shape[1])
        assert np.array_equal(array, expected[name][:size])


def test_taps_of_several_sequences_are_told_apart(tiny_files: ModelFiles):
    tapped = opened(tiny_files, taps=(1,))
    alone = [
        tapped.step([(tapped.open(), Block(TOKENS[a:b], 0))]).taps[0]["tap.1"].copy()
        for a, b in ((0, 1), (1, 4), (4, 12))
    ]
    work = [(tapped.open(), Block(TOKENS[a:b], 0)) for a, b in ((0, 1), (1, 4), (4, 12))]
    for taps, expected in zip(tapped.step(work).taps, alone, strict=True):
        assert np.array_equal(taps["tap.1"], expected)


def test_tapping_changes_no_logits(tiny_files: ModelFiles):
    assert np.array_equal(rows(opened(tiny_files), [12]), rows(opened(tiny_files, taps=(0,)), [12]))


def test_a_layer_that_is_not_there_cannot_be_tapped(tiny_files: ModelFiles):
    with raises(ModelError, "layer 99"):
        opened(tiny_files, taps=(99,))


def test_a_graph_that_is_no_language_model_is_refused(tmp_path: Path):
    import openvino as ov
    from openvino import opset13

    parameter = opset13.parameter([2], np.float32)
    ov.save_model(ov.Model([opset13.relu(parameter)], [parameter]), tmp_path / "openvino_model.xml")
    with raises(ModelError, "stateful"):
        OpenVinoEngine(tmp_path / "openvino_model.xml", 64)


def test_a_graph_that_cannot_be_read_is_refused(tmp_path: Path):
    (tmp_path / "openvino_model.xml").write_text("<net>")
    with raises(ModelError, "OpenVINO"):
        OpenVinoEngine(tmp_path / "openvino_model.xml", 64)


ENDED = """
import gc, signal
import numpy, openvino
from openvino import opset13
from paceline.storage.openvino import core

def graph():
    rows = opset13.parameter([-1, 8], numpy.float32)
    return core().compile_model(openvino.Model([opset13.relu(rows)], [rows]), "CPU")

first, second = graph(), graph()
del first
gc.collect()
del second
gc.collect()
try:
    signal.raise_signal(signal.SIGINT)
except KeyboardInterrupt:
    print("interrupted")
"""


def test_ctrl_c_ends_no_process_whose_graphs_ended_in_the_order_in_which_they_began():
    command = [sys.executable, "-c", ENDED]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE)
    assert (ended.returncode, ended.stdout) == (0, "interrupted\n"), ended.stderr
