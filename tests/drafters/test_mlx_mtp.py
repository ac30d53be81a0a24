"""The MTP head inside a Qwen3.5 checkpoint that MLX runs."""

from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.drafters import DrafterResources, shipped
from paceline.drafters.networks.tensors import stored_tensors
from paceline.engines import EngineSettings
from paceline.errors import InvalidRequest
from paceline.runtime.batching.scheduler import Scheduler
from paceline.runtime.model import Model
from paceline.runtime.stream import run_together
from paceline.storage.files import read_json, write_json
from support import mlx
from support.dflash import write_tensors
from support.errors import raises
from support.heads import LENGTH, answers_in_rounds
from support.mtp import HeadForm, Rounds, perfect_weights, random_weights
from support.scheduling import Submitted

pytestmark = pytest.mark.mlx
mlx.needs()

FORM = HeadForm(own=True, taps=(1,), kv_heads=2, rotary=0.25, vocab=mlx.VOCAB, theta=100_000.0)


def with_head(folder: Path, weights: dict[str, np.ndarray], **tensors: np.ndarray) -> Path:
    """Write a tiny Qwen3.5 with an MTP head; `tensors` replace those whose names end so."""
    mlx.checkpoint(folder, "qwen3_5", num_attention_heads=4, num_key_value_heads=2, head_dim=16)
    config = read_json(folder / mlx.CONFIG)
    config["text_config"] |= {"mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False}
    write_json(folder / mlx.CONFIG, config)
    by_name = {name: tensor.floats() for name, tensor in stored_tensors(folder).items()}
    for end, rows in tensors.items():
        by_name |= {
            name: np.broadcast_to(rows, old.shape).astype(np.float32)
            for name, old in by_name.items()
            if name.endswith(end.replace("__", ".") + ".weight")
        }
    head = {name: rows for name, rows in weights.items() if name.startswith("mtp.")}
    write_tensors(folder / "model.safetensors", {**by_name, **head}, "F32")
    return folder


@pytest.mark.parametrize("reads", ["hidden", "token"])
def test_all_drafts_of_a_perfect_head_are_accepted(tmp_path: Path, reads: str):
    from paceline.engines.mlx.engine import MlxEngine
    from paceline.engines.mlx.rows import RowRange

    rounds, none = Rounds(mlx.VOCAB), np.zeros(1)
    folder = with_head(
        tmp_path / "model",
        perfect_weights(FORM, rounds, reads=reads),
        embed_tokens=rounds.embeddings,
        lm_head=rounds.head,
        model__norm=none,
        **dict.fromkeys(("o_proj", "out_proj", "down_proj"), none),
    )
    settings = EngineSettings(cache_tokens=2048, taps=(1,))
    engine = MlxEngine(folder, mlx.CONTEXT, settings, rows=RowRange(2, 8))
    shared = DrafterResources(graph=folder, mlx=engine.model, shipped=shipped("x", folder))
    for block in (2, 6):
        starts = ((8, 1), (33, 2), (64, 9), (97, 30))
        for one in answers_in_rounds(engine, "mtp", shared, block, starts):
            assert one.counters.accepted == one.counters.drafted > 0
            assert one.counters.steps == -(-(LENGTH - 1) // block)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """With a random head that knows the target's favourites a little."""
    folder = tmp_path_factory.mktemp("mlx")
    return mlx.model(with_head(folder / "qwen3_5", random_weights(FORM)), folder / "cache")


TEXTS = ["abcabcabcabc", "the rain in the", "x y x y x"]
OPTIONS: dict[str, Any] = {"raw": True, "max_tokens": 16}


@pytest.mark.usefixtures("cache")
def test_a_model_answers_with_its_own_head(model: Model):
    assert model.engine.taps == (1,), "auto has it, so the engine was opened for it"
    plain = [model.generate(text, drafter="none", **OPTIONS).token_ids for text in TEXTS]
    drafted = 0
    for spec in ("auto", "mtp", "suffix+mtp:length=2,bits=8", "mtp:vocab=90"):
        for policy in ("fixed", "auto"):
            for text, expected in zip(TEXTS, plain, strict=True):
                result = model.generate(text, drafter=spec, policy=policy, max_block=5, **OPTIONS)
                assert result.token_ids == expected
                assert result.exact
                drafted += result.stats.drafted_by.get("mtp", 0)
        together = [model.stream(text, drafter=spec, policy="fixed", **OPTIONS) for text in TEXTS]
        run_together(together)
        assert [stream.result.token_ids for stream in together] == plain
    assert drafted > 0
    with closing(Scheduler(model)) as scheduler:
        scheduler.start()
        sent = [
            Submitted(scheduler, text, drafter=spec, policy="fixed", **OPTIONS)
            for spec in ("mtp", "auto")
            for text in TEXTS * 2
        ]
        assert [request.result().token_ids for request in sent] == plain * 4


@pytest.mark.usefixtures("cache")
def test_a_conversation_that_goes_back_equals_plain_answers(model: Model):
    options: dict[str, Any] = {"policy": "fixed", "max_tokens": 12}
    answers = []
    for drafter in ("none", "mtp"):
        talk = model.conversation()
        told = []
        for text in [*TEXTS, "", "abc"]:
            if not text:
                talk.drop_oldest()  # the rest is read again, from where it differs
                continue
            stream = talk.say(text, drafter=drafter, **options)
            for _ in stream:
                pass
            told.append(stream.result.token_ids)
        talk.close()
        answers.append(told)
    assert answers[0] == answers[1]


def test_options_of_openvino_are_rejected(model: Model):
    with raises(InvalidRequest, "int8"):
        model.generate("a", drafter="mtp:int8=1", **OPTIONS)
