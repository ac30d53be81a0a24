"""The MTP head inside a GGUF file of Qwen3.5 that OpenVINO runs."""

from contextlib import closing
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import paceline
from paceline.drafters import DrafterResources, DrafterSpec, shipped
from paceline.drafters.mtp import HeadCache, HeadWeights, has_head, read_head
from paceline.drafters.mtp.openvino_head import PagedKV
from paceline.drafters.networks.tensors import stored_tensors
from paceline.engines import EngineSettings, open_engine
from paceline.engines.base import Engine
from paceline.models.checkpoints.convert import plan, write
from paceline.runtime.batching.scheduler import Scheduler
from paceline.runtime.stream import run_together
from support.dflash import write_tensors
from support.engine_rows import run
from support.heads import LENGTH, answers_in_rounds
from support.hybrids import CONFIG, HEAD, LAYERS, with_head
from support.mtp import Rounds, perfect_weights, random_weights
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
    tensors = {name: value.floats() for name, value in stored_tensors(folder).items()}
    tensors |= {name: rows for name, rows in weights.items() if name.startswith("mtp.")}
    write_tensors(folder / "model.safetensors", tensors, "F32")
    write(plan(folder, "f32"), tmp_path / "made.gguf", lambda _done: None)
    assert has_head(tmp_path / "made.gguf")
    head = read_head(tmp_path / "made.gguf", lambda: LAYERS)
    expected = read_head(with_head(tmp_path / "model.gguf", weights), lambda: LAYERS)
    assert head.config == expected.config
    for field in fields(HeadWeights):
        one, other = getattr(head.weights, field.name), getattr(expected.weights, field.name)
        assert np.array_equal(one, other), field.name
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


@pytest.mark.usefixtures("cache")
def test_the_heads_cache_after_a_prefix_hit_is_that_of_a_prompt_read_whole(tmp_path: Path):
    model = paceline.load(with_head(tmp_path / "m.gguf", random_weights(HEAD)), cache_tokens=2048)
    prompt = model.tokens("this is the one and the other in the rain; " * 5, raw=True)
    options: dict[str, Any] = {"drafter": "mtp:int8=0", "policy": "fixed", "max_tokens": 8}
    expected = model.generate(prompt, drafter="none", max_tokens=8).token_ids
    scheduler = Scheduler(model)
    scheduler.start()
    rows: dict[str, dict[int, np.ndarray]] = {}
    for salt, times in (("whole", 1), ("hit", 2)):
        for _ in range(times):
            result = Submitted(scheduler, prompt, salt=salt, **options).result()
            assert result.token_ids == expected
            assert result.stats.drafted_by["mtp"] > 0
        (entry,) = [item for item in scheduler.prefix_cache._entries if item.salt == salt]
        (memory,) = entry.memory.values()
        assert isinstance(memory, HeadCache)
        rows[salt] = dict(zip(memory.positions, _keys_values(memory.kv), strict=False))
    hit = result.stats.cached_tokens
    scheduler.close()
    assert 32 <= hit < len(prompt)
    assert rows["whole"].keys() == {*range(len(prompt) - 1)}
    # The hidden state of the last shared token is not computed again, and the row needs the
    # token after it, too.
    assert rows["hit"].keys() == rows["whole"].keys() - {hit - 1}
    for at, found_row in rows["hit"].items():
        np.testing.assert_allclose(found_row, rows["whole"][at], rtol=1e-5, atol=1e-5)
    assert not np.allclose(rows["hit"][3], rows["hit"][40], atol=1e-2)


def _keys_values(kv: PagedKV) -> np.ndarray:
    """[slots, 2, kv_heads, head_dim]"""
    parts = [blocks.transpose(0, 2, 1, 3).reshape(-1, *blocks.shape[1::2]) for blocks in kv._blocks]
    return np.stack(parts, axis=1)
