"""`mtp` with targets that a perfect head predicts; the built-in head of a Qwen3.5 checkpoint."""

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.decoding.policy import Fixed
from paceline.decoding.sampling import Sampling
from paceline.decoding.stopping import Stopping
from paceline.drafters import DrafterResources, RequestContext, create
from paceline.engines import EngineSettings
from paceline.errors import ModelError
from paceline.runtime.model import Model
from paceline.storage.files import read_json, write_json
from paceline_mlx.heads.weights import stored_tensors
from support import mlx
from support.dflash import write_tensors
from support.driver import generation, run
from support.errors import raises
from support.mtp import HeadForm, Rounds, next_in_round, perfect_weights, random_weights, write_head
from support.scheduling import Submitted

pytestmark = pytest.mark.mlx

FORM = HeadForm(own=True, taps=(1,), kv_heads=2, rotary=0.25, vocab=mlx.VOCAB, theta=100_000.0)


def with_head(folder: Path, weights: dict[str, np.ndarray], **tensors: np.ndarray) -> Path:
    """Write a tiny Qwen3.5 with an MTP head; `tensors` replace those whose names end so."""
    import mlx.core as mx

    mlx.checkpoint(folder, "qwen3_5", num_attention_heads=4, num_key_value_heads=2, head_dim=16)
    config = read_json(folder / mlx.CONFIG)
    config["text_config"] |= {"mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False}
    write_json(folder / mlx.CONFIG, config)
    by_name = {
        name: np.array(tensor.astype(mx.float32)) for name, tensor in stored_tensors(folder).items()
    }
    for end, rows in tensors.items():
        by_name |= {
            name: np.broadcast_to(rows, old.shape).astype(np.float32)
            for name, old in by_name.items()
            if name.endswith(end.replace("__", ".") + ".weight")
        }
    head = {name: rows for name, rows in weights.items() if name.startswith("mtp.")}
    write_tensors(folder / "model.safetensors", {**by_name, **head}, "F32")
    return folder


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose model repeats rounds of eight tokens, without a head for them."""
    rounds, none = Rounds(mlx.VOCAB), np.zeros(1)
    return with_head(
        tmp_path_factory.mktemp("rounds") / "model",
        random_weights(FORM),
        embed_tokens=rounds.embeddings,
        lm_head=rounds.head,
        model__norm=none,
        **dict.fromkeys(("o_proj", "out_proj", "down_proj"), none),
    )


@pytest.fixture(scope="module")
def engine(target: Path) -> Any:
    from paceline_mlx.engine import MlxEngine

    settings = EngineSettings(cache_tokens=2048, taps=(0, 1))
    return MlxEngine(target, mlx.CONTEXT, settings, rules=mlx.rules(2, 8))


def resources(engine: Any, target: Path) -> DrafterResources:
    return DrafterResources(engine="mlx", opened=engine, files=target)


LENGTH = 37
STARTS = ((8, 1), (33, 2), (64, 9), (97, 30))
EAGLE = HeadForm(heads=4, kv_heads=4, drafted=range(mlx.VOCAB), vocab=mlx.VOCAB)
EARLY = replace(EAGLE, taps=(0,))


def answers_in_rounds(engine: Any, spec: str, shared: DrafterResources, block: int) -> list[Any]:
    """Return responses of a target that repeats rounds of eight tokens; fail if one is wrong.

    The prompts have several lengths, are cut into chunks of several sizes, and share their calls.
    """
    ran = [
        generation(
            engine,
            [*range(start, start + count)],
            stopping=Stopping(max_tokens=LENGTH),
            drafters=create(spec, shared),
            policy=Fixed(block),
            prefill_chunk=1 + 3 * start % 11,
        )
        for start, count in STARTS
    ]
    for one, told in zip(ran, run(engine, ran), strict=True):
        expected = [next_in_round(one.tokens[-LENGTH - 1])]
        while len(expected) < LENGTH:
            expected.append(next_in_round(expected[-1]))
        assert told.tokens == expected
    return ran


@pytest.mark.parametrize("reads", ["hidden", "token"])
@pytest.mark.parametrize("form", [EAGLE, EARLY, FORM], ids=["eagle3", "eagle3 early", "qwen3_5"])
def test_a_perfect_head_is_always_accepted(
    engine: Any, target: Path, tmp_path: Path, form: HeadForm, reads: str
):
    write_head(tmp_path, form, perfect_weights(form, Rounds(mlx.VOCAB), reads=reads))
    for block, spec in ((2, f"mtp:{tmp_path}"), (6, f"mtp:{tmp_path},length=7,bits=8")):
        for one in answers_in_rounds(engine, spec, resources(engine, target), block):
            assert one.counters.accepted == one.counters.drafted > 0
            assert one.counters.steps == -(-(LENGTH - 1) // block)


def test_a_reduced_vocabulary_drafts_only_its_tokens(engine: Any, target: Path, tmp_path: Path):
    write_head(tmp_path / "own", FORM, perfect_weights(FORM, Rounds(mlx.VOCAB), reads="token"))
    write_head(tmp_path / "eagle", EAGLE)
    shared = resources(engine, target)
    ran = answers_in_rounds(engine, f"mtp:{tmp_path}/own,vocab=64", shared, 4)
    assert [one.counters.accepted > 0 for one in ran] == [True, True, False, False]
    with raises(ModelError, "vocab"):
        create(f"mtp:{tmp_path}/eagle,vocab=64", shared)


def test_drafts_from_the_targets_distribution_are_always_accepted(
    engine: Any, target: Path, tmp_path: Path
):
    # The head's logits are the target's, and at this temperature the best token is seldom picked.
    write_head(tmp_path, FORM, perfect_weights(FORM, Rounds(mlx.VOCAB), reads="token"))
    how, shared = Sampling(temperature=20.0, seed=1), resources(engine, target)
    answers = []
    for noise in (how, Sampling()):
        context = RequestContext(sampling=noise, prompt_length=1)
        (drafter,) = create(f"mtp:{tmp_path}", shared, context)
        options: Any = {"stopping": Stopping(max_tokens=40), "policy": Fixed(4)}
        answers.append(generation(engine, [8], sampling=how, drafters=[drafter], **options))
        run(engine, answers[-1:])
    followed, unheard = answers
    assert followed.counters.accepted > 0.95 * followed.counters.drafted > 0
    assert unheard.counters.accepted < 0.3 * unheard.counters.drafted
    assert followed.answer == unheard.answer


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = tmp_path_factory.mktemp("mlx")
    return mlx.model(with_head(folder / "qwen3_5", random_weights(FORM)), folder / "cache")


TEXTS = ["abcabcabcabc", "the rain in the", "x y x y x"]
OPTIONS: dict[str, Any] = {"raw": True, "max_tokens": 16}


@pytest.mark.usefixtures("cache")
def test_a_model_drafts_with_its_built_in_head(model: Model):
    assert model.engine.taps == (1,), "auto has it, so the engine was opened for it"
    plain = [model.generate(text, drafter="none", **OPTIONS).token_ids for text in TEXTS]
    drafted = 0
    for spec, policy in (("auto", "auto"), ("suffix+mtp:length=2,bits=8", "fixed")):
        for text, expected in zip(TEXTS, plain, strict=True):
            result = model.generate(text, drafter=spec, policy=policy, max_block=5, **OPTIONS)
            assert result.token_ids == expected
            assert result.exact
            drafted += result.stats.drafted_by.get("mtp", 0)
    assert drafted > 0
    with closing(model.open_scheduler()) as scheduler:
        scheduler.start()
        sent = [
            Submitted(model, text, drafter=spec, policy="fixed", **OPTIONS)
            for spec in ("mtp", "auto")
            for text in TEXTS * 2
        ]
        assert [request.result().token_ids for request in sent] == plain * 4
