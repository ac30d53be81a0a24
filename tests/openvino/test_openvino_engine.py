import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from paceline.decoding.types import Block
from paceline.engines import EngineSettings
from paceline.errors import InvalidRequest, MissingExtra, ModelError
from paceline.models import ModelFiles, resolve
from paceline.runtime.model import Model
from paceline_openvino import engine
from paceline_openvino.engine import OpenVinoEngine, open_engine
from paceline_openvino.graph import GRAPH
from support.engine_rows import differing
from support.errors import raises
from support.plain import PROMPTS, plain
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
    sizes: list[int], tiny_ir: ModelFiles, monkeypatch: pytest.MonkeyPatch
):
    three = opened(tiny_ir)
    monkeypatch.setattr(engine, "memory_bytes", lambda: 0)
    one = opened(tiny_ir)
    assert three.describe()["lanes"] != one.describe()["lanes"]
    assert np.array_equal(rows(three, sizes), rows(one, [12]))


def test_large_weights_are_packed_once_while_the_model_is_loaded(
    tiny_ir: ModelFiles, monkeypatch: pytest.MonkeyPatch
):
    said: list[str] = []
    small = opened(tiny_ir, threads=1, say=said.append)
    assert (small._graphs[0].rows, said) == (0, []), "packed in no time, in the first call"
    assert len(small._graphs) > 1
    monkeypatch.setattr(engine, "_PACKED_AT_ONCE_BYTES", 0)
    large = opened(tiny_ir, threads=1, say=said.append)
    assert large._graphs[0].rows == 8
    assert tiny_ir.path.name in said[0]
    assert len(large._graphs) == 1
    assert np.array_equal(rows(small, [2, 8, 2]), rows(large, [12]))


def test_what_another_engine_runs_is_refused_with_what_to_use(tiny_gguf: Path, tiny_ir: ModelFiles):
    with raises(InvalidRequest, tiny_gguf, "--engine", "-ov"):
        open_engine(tiny_gguf, 512, EngineSettings())
    with raises(InvalidRequest, "hidden states", "GGUF"):
        open_engine(tiny_ir.path, 512, EngineSettings(taps=(0,)))
    with raises(InvalidRequest, "is a model for the engine openvino"):
        resolve(str(tiny_ir.path), engine="llamacpp")


def test_a_graph_that_is_no_language_model_is_refused(tmp_path: Path):
    import openvino as ov
    from openvino import opset13

    parameter = opset13.parameter([2], np.float32)
    ov.save_model(ov.Model([opset13.relu(parameter)], [parameter]), tmp_path / "openvino_model.xml")
    (tmp_path / "openvino_model.bin").touch()
    with raises(ModelError, "stateful"):
        open_engine(tmp_path, 64, EngineSettings())


@pytest.fixture
def copied(tiny_ir: ModelFiles, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_ir.path, tmp_path / "copy"))


@pytest.mark.parametrize("keep", [0, 0.5, 0.999])
def test_a_cut_off_graph_or_weights_are_found_before_they_are_used(keep: float, copied: Path):
    weights, graph = copied / "openvino_model.bin", copied / GRAPH
    size = weights.stat().st_size
    os.truncate(weights, int(size * keep))
    with raises(ModelError, f"has {int(size * keep)} bytes but the graph needs {size}"):
        open_engine(copied, 512, EngineSettings())
    os.truncate(graph, int(graph.stat().st_size * keep))
    with raises(ModelError, "not a complete OpenVINO graph"):
        open_engine(copied, 512, EngineSettings())


def test_without_openvino_it_is_one_line_with_the_extra(
    tiny_ir: ModelFiles, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(sys.modules, "openvino", None)
    with raises(MissingExtra, "paceline[openvino]"):
        open_engine(tiny_ir.path, 512, EngineSettings())


def test_requests_share_calls_and_answers_are_those_of_each_alone(tiny_ir: ModelFiles, cache: Path):
    settings = EngineSettings(cache_tokens=8 * 512)
    with Model(tiny_ir, open_engine(tiny_ir.path, 512, settings)) as model:
        assert model.engine.shares_calls
        alone = [plain(model, prompt, drafter="auto").token_ids for prompt in PROMPTS]
        options = {"max_tokens": 60, "drafter": "auto"}
        together = model.generate(PROMPTS, **options)
        assert [result.token_ids for result in together] == alone
        assert all(result.exact for result in together)


# -- row invariance switched off: both checks of it must find that


def test_single_rows_of_the_openvino_engine_are_found(tiny_ir: ModelFiles):
    values = {}
    for min_rows in (1, 2):
        settings = EngineSettings(min_rows=min_rows, cache_tokens=2048)
        opened = open_engine(tiny_ir.path, tiny_ir.context_length, settings)
        values[min_rows] = differing(opened)
    assert all(values[1])
    assert values[2] == (0, 0)


def test_an_eight_bit_kv_cache_of_the_openvino_engine_is_found(
    tiny_ir: ModelFiles, monkeypatch: pytest.MonkeyPatch
):
    # A scale for 32 slots of a key's channel.
    monkeypatch.setattr(engine, "_KV_PRECISION", "u8")
    settings = EngineSettings(cache_tokens=2048)
    opened = open_engine(tiny_ir.path, tiny_ir.context_length, settings)
    assert opened.describe()["kv_cache"] == "u8"
    assert all(differing(opened))


ENDED = """
import gc, signal
import numpy, openvino
from openvino import opset13
from paceline_openvino.library import core

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
