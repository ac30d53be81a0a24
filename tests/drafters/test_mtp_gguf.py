"""The MTP head inside a GGUF file of Qwen3.5 that OpenVINO runs."""

from collections.abc import Mapping
from contextlib import closing
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import paceline
from paceline.drafters import DrafterResources, DrafterSpec, shipped
from paceline.drafters.mtp import HeadWeights, has_head, read_head
from paceline.drafters.networks.tensors import stored_tensors
from paceline.engines import EngineSettings, open_engine
from paceline.engines.base import Engine
from paceline.models.to_gguf import plan, write
from paceline.runtime.stream import run_together
from paceline.server.scheduler import Scheduler
from paceline.storage.gguf_file import Tensor, read_gguf, write_gguf
from support.dflash import write_tensors
from support.engine_rows import run
from support.hybrids import CONFIG, HEAD, LAYERS, with_head
from support.heads import LENGTH, answers_in_rounds
from support.mtp import HeadForm, Rounds, gguf_name, perfect_weights, random_weights
from support.scheduling import Submitted
from support.tiny_checkpoints import write_checkpoint, write_gguf_of

SETTINGS = EngineSettings(cache_tokens=2048, taps=(3,))


def _logits(engine: Engine, text: list[int]) -> np.ndarray:
    """[tokens, vocab]"""
    with closing(engine.open()) as sequence:
        return run(engine, prompts=[(sequence, text, len(text))])[0].copy()


@pytest.mark.parametrize("reads", ["hidden", "token"])
def test_all_drafts_of_a_perfect_head_are_accepted(tmp_path: Path, reads: str):
    rounds, none = Rounds(), np.zeros(1)
    path = with_head(
        tmp_path / "model.gguf",
        perfect_weights(HEAD, rounds, reads=reads),
        {
            "token_embd": rounds.embeddings,
            "output": rounds.head,
            "output_norm": none + 1,
            **dict.fromkeys(("attn_output", "ssm_out", "ffn_down"), none),
        },
    )
    engine = open_engine("openvino", path, 512, SETTINGS)
    shared = DrafterResources(graph=path, shipped=shipped("x", path))
    for block in (2, 6):
        for one in answers_in_rounds(engine, "mtp:int8=0", shared, block):
            assert one.counters.accepted == one.counters.drafted > 0
            assert one.counters.steps == -(-(LENGTH - 1) // block)


def test_a_converted_checkpoint_keeps_its_head(tmp_path: Path):
    weights = random_weights(HEAD)
    folder = write_checkpoint("qwen3_5_text", tmp_path / "checkpoint", **CONFIG)
    tensors = {name: each.floats() for name, each in stored_tensors(folder).items()}
    tensors |= {name: rows for name, rows in weights.items() if name.startswith("mtp.")}
    write_tensors(folder / "model.safetensors", tensors, "F32")
    write(plan(folder, "f32"), tmp_path / "made.gguf", lambda _done: None)
    assert has_head(tmp_path / "made.gguf")
    found = read_head(tmp_path / "made.gguf", lambda: LAYERS)
    expected = read_head(with_head(tmp_path / "model.gguf", weights), lambda: LAYERS)
    assert found.config == expected.config
    for each in fields(HeadWeights):
        one, other = getattr(found.weights, each.name), getattr(expected.weights, each.name)
        assert np.array_equal(one, other), each.name
    text = [*range(5, 90)]
    plain = write_gguf_of("qwen3_5_text", tmp_path / "p.gguf", **CONFIG)
    engines = [
        open_engine("openvino", path, 512, SETTINGS) for path in (tmp_path / "made.gguf", plain)
    ]
    assert np.array_equal(*(_logits(engine, text) for engine in engines))


@pytest.mark.usefixtures("cache")
def test_a_model_answers_with_its_own_head(tmp_path: Path):
    path = with_head(tmp_path / "model.gguf", random_weights(HEAD))
    model = paceline.load(path, cache_tokens=2048)
    assert model.engine.taps == (3,), "auto has it, so the engine was opened for it"
    assert str(DrafterSpec.parse("auto").resolve({"mtp"})) == "suffix+mtp"
    options: dict[str, Any] = {"raw": True, "max_tokens": 12, "temperature": 0.0}
    texts = ["the the the", "in the rain", "a"]
    plain = [model.generate(text, drafter="none", **options).token_ids for text in texts]
    drafted = 0
    for spec in ("auto", "mtp", "mtp:vocab=100,length=3"):
        for policy in ("fixed", "auto"):
            going = [
                model.stream(text, drafter=spec, policy=policy, max_block=4, **options)
                for text in texts
            ]
            run_together(going)
            assert [stream.result.token_ids for stream in going] == plain
            drafted += sum(stream.result.stats.drafted_by.get("mtp", 0) for stream in going)
    assert drafted > 0
    scheduler = Scheduler(model)
    scheduler.start()
    try:
        asked = [*texts, *texts, *(text + " the" for text in texts)]
        sent = [
            Submitted(scheduler, text, drafter=spec, policy="fixed", **options)
            for spec in ("mtp", "auto")
            for text in asked
        ]
        found = [each.result() for each in sent]
    finally:
        scheduler.close()
    expected = {text: model.generate(text, drafter="none", **options).token_ids for text in asked}
    assert [each.token_ids for each in found] == [expected[text] for text in asked] * 2
    assert sum(each.stats.drafted_by.get("mtp", 0) for each in found) > 0
