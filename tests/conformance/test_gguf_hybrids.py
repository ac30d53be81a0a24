"""Hybrid models from GGUF files: each weights form, faults of a file, logits at every position.

That rows do not depend on how they are computed is in test_gguf_families.py, for all families.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize

from paceline.engines import EngineSettings, open_engine
from paceline.engines.base import Engine
from paceline.engines.openvino.batch import CompiledGraph
from paceline.engines.openvino.engine import OpenVinoEngine
from paceline.errors import ModelError
from paceline.models import resolve
from paceline.models.checkpoints.convert import plan, write
from paceline.models.checkpoints.tensors import Output, Shards
from paceline.storage.gguf_file import read_gguf, write_gguf
from support.engine_rows import random_text, run
from support.errors import raises
from support.hybrids import HYBRIDS
from support.tiny import tokenizer_fields
from support.tiny_checkpoints import write_checkpoint, write_gguf_of

pytestmark = pytest.mark.slow

APART = {"f16": 3e-3, "int8": 0.1, "int4": 0.7}
"""Weights -> root mean square difference of a row's logits, over that of the logits themselves.

That of the median row: where a rounded score picks another expert, a row's logits are others. On
CPUs with VNNI activations are in 8 bits too: 0.076 for Qwen3.5 in int8."""


def opened(path: Path, **settings: Any) -> Engine:
    return open_engine("openvino", path, 512, EngineSettings(cache_tokens=1024, **settings))


def logits_of(engine: Engine, text: list[int], rows: int) -> np.ndarray:
    """[tokens, vocab]: the text as a prompt, in chunks of `rows`."""
    sequence = engine.open()
    results = []
    for at in range(0, len(text), rows):
        part = text[at : at + rows]
        results.append(run(engine, prompts=[(sequence, part, len(part))])[0].copy())
        sequence.commit(len(part))
    sequence.close()
    return np.concatenate(results)


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


def apart(result: np.ndarray, expected: np.ndarray) -> float:
    squares = ((result - expected) ** 2).mean(axis=1) / (expected**2).mean(axis=1)
    return float(np.sqrt(np.median(squares)))


@pytest.mark.parametrize("form", HYBRIDS)
def test_weights_of_fewer_bits_give_nearby_logits(form: str, tmp_path: Path):
    exact = opened(write_gguf_of(form, tmp_path / "exact.gguf"))
    text = random_text(exact, 60)
    expected = logits_of(exact, text, 60)
    for weights, most in APART.items():
        path = write_gguf_of(form, tmp_path / f"{weights}.gguf", weights=weights)
        fewer = opened(path)
        rows = logits_of(fewer, text, 60)
        assert 0 < apart(rows, expected) < most, weights
        assert np.array_equal(logits_of(fewer, text, 7), rows), weights


def with_queries(path: Path, source: Path, kind: GGMLQuantizationType) -> Path:
    """Write a Qwen3.5 whose queries and gates have values of Q4_1, stored as `kind`."""
    file = read_gguf(source)
    tensors = {tensor.name: tensor for tensor in file.tensors}
    name = "blk.3.attn_q.weight"
    values = tensors[name].data.view(np.float32).reshape(tensors[name].shape)
    blocks = quantize(values + 0.01, GGMLQuantizationType.Q4_1)
    data = dequantize(blocks, GGMLQuantizationType.Q4_1) if kind.name == "F32" else blocks
    tensors[name] = tensors[name]._replace(kind=kind.value, data=data.view(np.uint8))
    forms = {name: (tensor.kind, tensor.data.nbytes) for name, tensor in tensors.items()}
    result = dataclasses.replace(file, tensors=[*tensors.values()])
    write_gguf(path, result, forms, lambda tensor: tensor.data, lambda _: None)
    return path


def test_a_qwen35_with_offsets_in_the_matrix_of_queries_and_gates_opens(tmp_path: Path):
    """The frontend divides the matrix head by head, and its parts have the tensor's name."""
    source = write_gguf_of("qwen3_5_text", tmp_path / "source.gguf")
    exact = opened(with_queries(tmp_path / "f32.gguf", source, GGMLQuantizationType.F32))
    parts = opened(with_queries(tmp_path / "q4_1.gguf", source, GGMLQuantizationType.Q4_1))
    text = random_text(exact, 60)
    # Offsets of other rows give 2.3e-3.
    assert apart(logits_of(parts, text, 60), logits_of(exact, text, 60)) < 1e-3


@pytest.mark.parametrize(
    ("form", "missing"),
    [
        ("lfm2", "blk.2.shortconv.conv.weight"),
        ("lfm2_moe", "blk.2.shortconv.conv.weight"),
        ("qwen3_5_moe_text", "blk.2.ssm_a"),
        ("qwen3_5_moe_text", "blk.3.ffn_gate_inp_shexp.weight"),
    ],
)
def test_a_missing_tensor_is_refused_by_name(form: str, missing: str, tmp_path: Path):
    checkpoint = plan(write_checkpoint(form, tmp_path / "checkpoint"), "f32")
    kept = [output for output in checkpoint.outputs if output[0].name != missing]
    assert len(kept) == len(checkpoint.outputs) - 1
    path = tmp_path / "m.gguf"
    write(dataclasses.replace(checkpoint, outputs=kept), path, lambda _done: None)
    with raises(ModelError, missing, path):
        opened(path)


@pytest.mark.parametrize(
    ("form", "fields", "reason"),
    [
        ("lfm2", {"lfm2.attention.head_count_kv": [2, 2]}, "head_count_kv"),
        ("lfm2", {"lfm2.attention.head_count": 0}, "head_count is 0"),
        ("lfm2", {"lfm2.attention.head_count": 3}, "OpenVINO"),
        ("qwen3_5_moe_text", {"qwen35moe.ssm.inner_size": 80}, "80"),
        ("qwen3_5_moe_text", {"qwen35moe.ssm.group_count": 3}, "3"),
        ("qwen3_5_moe_text", {"qwen35moe.nextn_predict_layers": 4}, "0 to 3"),
        ("qwen3_5_moe_text", {"qwen35moe.expert_used_count": 5}, "OpenVINO"),
    ],
)
def test_sizes_that_cannot_be_are_refused(
    form: str, fields: dict[str, Any], reason: str, tmp_path: Path
):
    path = write_gguf_of(form, tmp_path / "m.gguf", fields=fields)
    with raises(ModelError, reason):
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
    with raises(ModelError):
        opened(path)


def test_a_table_of_positions_beyond_any_head_is_refused_before_it_is_made(tmp_path: Path):
    more = {"qwen35.rope.dimension_count": 2**31 - 1}
    path = write_gguf_of("qwen3_5_text", tmp_path / "m.gguf", fields=more)
    with raises(ModelError, "dimension_count", "2147483647"):
        resolve(str(path), tmp_path / "cache")


@pytest.mark.parametrize(
    ("form", "arch"), [("qwen3_5_text", "qwen35"), ("qwen3_5_moe_text", "qwen35moe")]
)
def test_qwen35_leaves_out_layers_that_predict_further_tokens(form: str, arch: str, tmp_path: Path):
    plain = write_gguf_of(form, tmp_path / "plain.gguf")
    more = {f"{arch}.nextn_predict_layers": 1, f"{arch}.block_count": 5}
    path = write_gguf_of(form, tmp_path / "more.gguf", fields=more)
    resolve(str(path), tmp_path / "cache")
    engine, other = opened(path), opened(plain)
    text = random_text(engine, 20)
    assert np.array_equal(logits_of(engine, text, 20), logits_of(other, text, 20))


def test_experts_whose_gate_and_up_are_one_matrix_give_the_same_logits(tmp_path: Path):
    plain = write_gguf_of("qwen3_5_moe_text", tmp_path / "plain.gguf")
    checkpoint = plan(tmp_path / "plain-checkpoint", "f32")
    by_name = {output.name: (output, kind) for output, kind in checkpoint.outputs}
    for name in [item for item in by_name if item.endswith("ffn_gate_exps.weight")]:
        gate, kind = by_name.pop(name)
        up, _ = by_name.pop(name.replace("gate", "up"))
        both = name.replace("gate", "gate_up")
        by_name[both] = (joined(both, gate, up), kind)
    path = tmp_path / "both.gguf"
    fields = {**checkpoint.fields, **tokenizer_fields(checkpoint.arch)}
    checkpoint = dataclasses.replace(checkpoint, fields=fields, outputs=[*by_name.values()])
    write(checkpoint, path, lambda _done: None)
    engine, other = opened(path), opened(plain)
    text = random_text(engine, 40)
    found_logits, expected = logits_of(engine, text, 40), logits_of(other, text, 40)
    assert apart(found_logits, expected) < 1e-5
    assert np.array_equal(logits_of(engine, text, 7), found_logits)


def joined(name: str, gate: Output, up: Output) -> Output:
    """One tensor of two, gate above up, expert by expert."""

    def pieces(shards: Shards) -> Iterator[np.ndarray]:
        for item in zip(gate.pieces(shards), up.pieces(shards), strict=True):
            yield np.concatenate(item)

    count, rows, width = gate.shape
    sources = {**gate.sources, **up.sources}
    return Output(name, (count, 2 * rows, width), gate.form, sources, pieces)


@pytest.mark.reference
@pytest.mark.parametrize("form", HYBRIDS)
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
        result = logits_of(engine, text, rows)
        error = np.sqrt(((result - expected) ** 2).mean(axis=1) / (expected**2).mean(axis=1))
        assert error.max() < 1e-3, rows
    # Nearly all of that is the f16 of keys and values, which shows most where there are few.
    wide = with_wide_cache(path, monkeypatch)
    assert np.abs(logits_of(wide, text, 200) - expected).max() < 1e-4
