"""Hybrid models from GGUF files: each weights form, faults of a file, logits at every position.

That rows do not depend on how they are computed is in test_gguf_families.py, for all families.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.engines import EngineSettings, open_engine
from paceline.engines.base import Engine
from paceline.engines.openvino.batch import CompiledGraph
from paceline.engines.openvino.engine import OpenVinoEngine
from paceline.errors import ModelError
from paceline.models import resolve
from paceline.models.to_gguf import plan, write
from support.engine_rows import random_text, run
from support.tiny_checkpoints import write_checkpoint, write_gguf_of

FORMS = ("lfm2", "lfm2_moe", "qwen3_5_text")
APART = {"f16": 3e-3, "int8": 0.1, "int4": 0.7}
"""Weights -> root mean square difference of the logits, over that of the logits themselves.

On CPUs with VNNI activations are in 8 bits too: 0.086 for Qwen3.5 in int8, under 0.08 without."""


def opened(path: Path, **settings: Any) -> Engine:
    return open_engine("openvino", path, 512, EngineSettings(cache_tokens=1024, **settings))


def logits_of(engine: Engine, text: list[int], rows: int) -> np.ndarray:
    """[tokens, vocab]: the text as a prompt, in chunks of `rows`."""
    sequence = engine.open()
    found = []
    for at in range(0, len(text), rows):
        part = text[at : at + rows]
        found.append(run(engine, prompts=[(sequence, part, len(part))])[0].copy())
        sequence.commit(len(part))
    sequence.close()
    return np.concatenate(found)


def with_wide_cache(path: Path, monkeypatch: pytest.MonkeyPatch) -> Engine:
    """An engine with keys and values in f32."""
    make_tensors = OpenVinoEngine._make_tensors

    class WideGraph(CompiledGraph):
        def __init__(self, model: Any, options: Mapping[str, str]) -> None:
            super().__init__(model, {**options, "KV_CACHE_PRECISION": "f32"})

    with monkeypatch.context() as patch:
        patch.setattr("paceline.engines.openvino.engine.CompiledGraph", WideGraph)
        patch.setattr(
            OpenVinoEngine,
            "_make_tensors",
            lambda self, shapes, blocks, _: make_tensors(self, shapes, blocks, np.float32),
        )
        return opened(path)


def apart(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.sqrt(((found - expected) ** 2).mean() / (expected**2).mean()))


@pytest.mark.parametrize("form", FORMS)
def test_weights_of_fewer_bits_give_nearby_logits(form: str, tmp_path: Path):
    exact = opened(write_gguf_of(form, tmp_path / "exact.gguf"))
    text = random_text(exact, 60)
    expected = logits_of(exact, text, 60)
    for weights, most in APART.items():
        path = write_gguf_of(form, tmp_path / f"{weights}.gguf", weights=weights)
        fewer = opened(path)
        found = logits_of(fewer, text, 60)
        assert 0 < apart(found, expected) < most, weights
        assert np.array_equal(logits_of(fewer, text, 7), found), weights


@pytest.mark.parametrize("form", ["lfm2", "lfm2_moe"])
def test_a_missing_tensor_is_refused_by_name(form: str, tmp_path: Path):
    made = plan(write_checkpoint(form, tmp_path / "checkpoint"), "f32")
    missing = "blk.2.shortconv.conv.weight"
    kept = [each for each in made.outputs if each[0].name != missing]
    assert len(kept) == len(made.outputs) - 1
    path = tmp_path / "m.gguf"
    write(dataclasses.replace(made, outputs=kept), path, lambda _done: None)
    with pytest.raises(ModelError, match=f"no tensor {missing}") as caught:
        opened(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"lfm2.attention.head_count_kv": [2, 2]}, "head_count_kv .*; expected 4 numbers"),
        ({"lfm2.attention.head_count": 0}, "head_count is 0; expected an integer from 1"),
        ({"lfm2.attention.head_count": 3}, "cannot be opened by OpenVINO"),
    ],
)
def test_sizes_that_cannot_be_are_refused(fields: dict[str, Any], reason: str, tmp_path: Path):
    path = write_gguf_of("lfm2", tmp_path / "m.gguf", fields=fields)
    with pytest.raises(ModelError, match=reason):
        opened(path)


@pytest.mark.parametrize(
    ("form", "fields"),
    [
        ("lfm2", {"lfm2.attention.head_count_kv": [0, 0, 0, 0]}),
        ("qwen3_5_text", {"qwen35.block_count": 3}),
    ],
)
def test_a_model_without_attention_is_refused(form: str, fields: dict[str, Any], tmp_path: Path):
    path = write_gguf_of(form, tmp_path / "m.gguf", fields=fields)
    with pytest.raises(ModelError, match=r"no layer with attention|has no tensor"):
        opened(path)


def test_a_table_of_positions_beyond_any_head_is_refused_before_it_is_made(tmp_path: Path):
    more = {"qwen35.rope.dimension_count": 2**31 - 1}
    path = write_gguf_of("qwen3_5_text", tmp_path / "m.gguf", fields=more)
    with pytest.raises(ModelError, match="dimension_count of 2147483647"):
        resolve(str(path), tmp_path / "cache")


def test_qwen35_leaves_out_layers_that_predict_further_tokens(tmp_path: Path):
    plain = write_gguf_of("qwen3_5_text", tmp_path / "plain.gguf")
    more = {"qwen35.nextn_predict_layers": 1, "qwen35.block_count": 5}
    path = write_gguf_of("qwen3_5_text", tmp_path / "more.gguf", fields=more)
    resolve(str(path), tmp_path / "cache")
    engine, other = opened(path), opened(plain)
    text = random_text(engine, 20)
    assert np.array_equal(logits_of(engine, text, 20), logits_of(other, text, 20))


@pytest.mark.reference
@pytest.mark.parametrize("form", FORMS)
def test_logits_at_every_position_in_chunks_of_any_size(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    path = write_gguf_of(form, tmp_path / "m.gguf")
    engine = opened(path)
    text = random_text(engine, 200)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "m-checkpoint", dtype=torch.float32
    )
    with torch.no_grad():
        expected = model(torch.tensor([text])).logits[0].numpy()
    for rows in (200, 64, 31, 7, 2):
        found = logits_of(engine, text, rows)
        error = np.sqrt(((found - expected) ** 2).mean(axis=1) / (expected**2).mean(axis=1))
        assert error.max() < 1e-3, rows
    # Nearly all of that is the f16 of keys and values, which shows most where there are few.
    wide = with_wide_cache(path, monkeypatch)
    assert np.abs(logits_of(wide, text, 200) - expected).max() < 1e-4
