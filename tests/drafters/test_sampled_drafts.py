"""Drafters that follow a request's noise: no token differs, and more drafts are accepted."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from paceline.decoding.policy import Fixed
from paceline.decoding.sampling import Sampling
from paceline.decoding.stopping import Stopping
from paceline.decoding.types import Counters
from paceline.drafters import DrafterResources, RequestContext, create
from paceline.engines import EngineSettings, open_engine
from paceline.engines.base import Engine
from paceline.models import ModelFiles
from support.dflash import tiny_config, write_checkpoint
from support.driver import generation, run, total
from support.mtp import HeadForm, Rounds, perfect_weights, write_head
from support.tiny import write_tiny

PROMPTS = [[1, 2, 3, 4, 1, 2, 3], [*range(40, 70)], [300, 5, 5, 9]]
LENGTH = 40


@pytest.fixture(scope="module")
def engine(tiny_files: ModelFiles) -> Engine:
    settings = EngineSettings(cache_tokens=2048, taps=(0, 1))
    return open_engine("openvino", tiny_files.path, 512, settings)


def answers(
    engine: Engine,
    how: Sampling,
    spec: str = "none",
    shared: DrafterResources | None = None,
    *,
    follow: bool = True,
) -> tuple[list[list[int]], Counters]:
    """Answers to all prompts, which share their calls, and the sum of their counters."""
    ran = []
    for prompt in PROMPTS:
        drafting = how if follow else Sampling()
        asked = RequestContext(sampling=drafting, prompt_length=len(prompt))
        drafters: Sequence[Any] = () if spec == "none" else create(spec, shared, asked)
        ran.append(
            generation(
                engine,
                prompt,
                sampling=how,
                stopping=Stopping(max_tokens=LENGTH),
                drafters=drafters,
                policy=Fixed(4),
            )
        )
    told = [one.tokens for one in run(engine, ran)]
    return told, total(ran)


@pytest.mark.parametrize("temperature", [0.5, 0.8, 1.0])
def test_no_token_differs_with_any_drafter(
    engine: Engine, tiny_files: ModelFiles, toy_table: Path, tmp_path: Path, temperature: float
):
    write_checkpoint(tmp_path / "dflash", tiny_config(tiny_files))
    write_head(tmp_path / "mtp", HeadForm(drafted=range(5, 300, 3)))
    shared = DrafterResources(vocab_size=320, graph=tiny_files.path, shipped={"table": toy_table})
    specs = ["suffix", f"dflash:{tmp_path}/dflash", f"mtp:{tmp_path}/mtp", "ngram:min=1"]
    penalty = 0.4 if temperature == 0.8 else 0.0
    how = Sampling(temperature=temperature, seed=3, top_p=0.9, frequency_penalty=penalty)
    plain, _ = answers(engine, how)
    assert len({tuple(result) for result in plain}) == len(PROMPTS)
    for spec in specs:
        told, counters = answers(engine, how, spec, shared)
        assert told == plain, spec
        assert counters.drafted > 0, spec


def test_all_drafts_of_the_targets_own_distribution_are_accepted(tmp_path: Path):
    # The head's logits are the target's, and at this temperature the best token is seldom picked.
    target = write_tiny(tmp_path / "rounds.gguf", tensors=Rounds().target_tensors())
    engine = open_engine("openvino", target, 512, EngineSettings(cache_tokens=2048, taps=(0, 1)))
    form = HeadForm(own=True, taps=(1,), kv_heads=1, rotary=0.5)
    write_head(tmp_path / "head", form, perfect_weights(form, Rounds(), reads="token"))
    how, shared = Sampling(temperature=20.0, seed=1), DrafterResources(graph=target)
    spec = f"mtp:{tmp_path / 'head'},int8=0"
    told, counters = answers(engine, how, spec, shared)
    assert counters.accepted > 0.99 * counters.drafted > 0
    best, others = answers(engine, how, spec, shared, follow=False)
    assert others.accepted < 0.3 * others.drafted
    assert told == best
