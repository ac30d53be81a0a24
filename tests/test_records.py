"""The recorded results in benchmarks/results are of the engine as it is today."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from paceline.decoding.types import Block
from paceline.engines import EngineSettings, open_engine
from paceline.engines.base import KVSequence, StepResult
from paceline.engines.llamacpp import engine
from paceline.models import ModelFiles
from paceline.runtime.model import Model
from support.llamacpp import library
from support.scripts import BENCHMARKS, script
from support.tiny_checkpoints import write_gguf_of

RESULTS = sorted((BENCHMARKS / "results").glob("*.json"))

MACHINE = {"device", "threads", "lanes", "taps", "most_rows"}
"""What depends on the processor, the model's size and the drafter, not on how rows are computed."""

OF_GGUF_FILES = {
    "calls-0.6b",
    "calls-1.7b",
    "calls-4b",
    "peers-gemma-270m",
    "peers-gemma-270m-suite",
    "verify-0.6b",
    "verify-0.6b-q4-k-m",
    "verify-1.7b",
}
"""With a GGUF file as it is."""

OF_HYBRIDS = {"soak-hybrid"}
"""With a GGUF file of a model with recurrent states."""

OF_LLAMACPP = {"plan-llamacpp", "plan-llamacpp-one-thread", "verify-llamacpp"}
"""With the default model in the engine llamacpp."""

WITHOUT_ENGINE = {"verify-llama-cpp", "verify-llama-cpp-lookup", "verify-server"}
"""Texts of a server, which does not say what its engine is."""


def outdated(recorded: object, today: Mapping[str, str]) -> list[str]:
    """What a recorded engine description says otherwise than today's; machines may differ."""
    if not isinstance(recorded, dict):
        return ["there is no engine description"]
    names = ({*recorded} | {*today}) - MACHINE
    return [
        f"{name} is {recorded.get(name)!r}, today {today.get(name)!r}"
        for name in sorted(names)
        if _version(name, recorded.get(name)) != _version(name, today.get(name))
    ]


def _version(name: str, text: str | None) -> str | None:
    """Of OpenVINO the release: what follows names the build for a platform."""
    return text.split("-")[0] if name == "openvino" and text else text


def described(path: Path) -> dict[str, str]:
    settings = EngineSettings(cache_tokens=64)
    return open_engine("openvino", path, 64, settings).describe()


@pytest.fixture
def today(tiny_int8: ModelFiles) -> dict[str, str]:
    """Of the form that the default model has."""
    return described(tiny_int8.path)


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_a_recorded_result_is_of_todays_engine(
    path: Path, today: dict[str, str], tiny_files: ModelFiles, tmp_path: Path
):
    record = json.loads(path.read_text())
    recorded = record.get("engine", record.get("engines", {}).get("openvino"))
    if path.stem in OF_HYBRIDS:
        today = described(write_gguf_of("qwen3_5_text", tmp_path / "tiny.gguf"))
    elif path.stem in OF_GGUF_FILES:
        today = described(tiny_files.path)
    faults = outdated(recorded, today)
    if path.stem not in WITHOUT_ENGINE | OF_LLAMACPP:
        assert faults == [], f"{path.name} is of another engine: make it again, or remove it"


@pytest.mark.parametrize("name", ["engines", *sorted(OF_LLAMACPP)])
def test_a_record_of_the_engine_llamacpp_is_of_todays_library(name: str):
    record = json.loads((BENCHMARKS / "results" / f"{name}.json").read_text())
    llamacpp = record["engines"]["llamacpp"] if "engines" in record else record["engine"]
    binding = library("ik_llama.cpp")
    assert llamacpp["library"] == f"{binding.name} {binding.version}"
    assert llamacpp["rows"].startswith(f"{engine._ROWS}, {binding.cache}; ")
    assert not record.get("answers_that_differ")


@pytest.mark.parametrize(
    "change",
    [
        {"attention": "all rows together"},
        {"openvino": "2026.3.0-1-a"},
        {"kv_cache": "u8"},
        {"min_rows": "1"},
        {"attention": None},
        {"another": "thing"},
    ],
)
def test_a_record_of_an_engine_that_computes_otherwise_is_found(
    change: dict[str, Any], today: dict[str, str]
):
    recorded: dict[str, Any] = {**today, "device": "another", "threads": "64"}
    assert outdated(recorded, today) == []
    recorded |= change
    assert len(outdated({k: v for k, v in recorded.items() if v is not None}, today)) == 1
    assert outdated(None, today)


def test_the_first_token_is_compared_with_reading_a_prompt(
    model: Model, monkeypatch: pytest.MonkeyPatch
):
    blocks: list[Block] = []
    step = type(model.engine).step

    def watched(engine: Any, work: list[tuple[KVSequence, Block]]) -> StepResult:
        blocks.extend(block for _, block in work)
        return step(engine, work)

    monkeypatch.setattr(type(model.engine), "step", watched)
    assert script("first_token")._prefill(model, list(range(3, 43)), 16) > 0
    assert [len(block.tokens) for block in blocks] == [16, 16, 8]
    assert [block.rows for block in blocks] == [0, 0, 1]
    assert all(block.prefill for block in blocks)
