"""Published drafters as GGUF files, beside a target in the engine llamacpp.

Perfect ones are right where the wiring is: which layers, rows, positions and tokens they get.
"""

from collections.abc import Iterator, Sequence
from contextlib import closing
from math import nan
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline import load as load_model
from paceline.decoding.policy import Fixed
from paceline.decoding.sampling import Sampling
from paceline.decoding.stopping import Stopping
from paceline.drafters import DrafterResources, DraftKV, RequestContext, create, taps
from paceline.drafters.heads import DraftCost
from paceline.engines import EngineSettings
from paceline.engines.base import Engine
from paceline.engines.llamacpp.engine import LlamaCppEngine
from paceline.engines.llamacpp.libraries import load
from paceline.errors import ModelError
from support.driver import Answer, generation, run
from support.errors import raises
from support.native_drafters import (
    COUNT,
    partner,
    write_cycles,
    write_dflash,
    write_dflash2,
    write_dspark,
    write_eagle3,
    write_mtp_model,
)
from support.packages import missing

LIBRARIES = [name for name in ("ik_llama.cpp", "llama.cpp") if not missing(name)]
WRITERS = {
    "DFlash": ("dflash", write_dflash),
    "DFlash 2": ("dflash", write_dflash2),
    "DSpark": ("dflash", write_dspark),
    "EAGLE-3": ("mtp", write_eagle3),
}
SAMPLINGS = [Sampling(), Sampling(temperature=0.8, seed=5)]
PROMPTS = [[first, partner(first)] * 8 for first in (20, 31, 48)]
TOKENS = 40


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_cycles(tmp_path_factory.mktemp("target") / "cycles.gguf")


@pytest.fixture(scope="module", params=LIBRARIES)
def engine(request: pytest.FixtureRequest, target: Path) -> Iterator[LlamaCppEngine]:
    settings = EngineSettings(taps=(0, 1, 2))
    with closing(LlamaCppEngine(target, 512, settings, binding=load(request.param))) as engine:
        yield engine


def resources(engine: LlamaCppEngine) -> DrafterResources:
    return DrafterResources(
        engine="llamacpp", files=engine.path, opened=engine, vocab_size=engine.vocab_size,
        shipped={"mtp": engine.path},
    )  # fmt: skip


def answers(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    spec: str = "none",
    shared: DrafterResources | None = None,
    kv: DraftKV | None = None,
) -> tuple[list[Answer], int, int]:
    """Answers, all in one batch, with the drafts in them: how many, and how many were right."""
    generations = [
        generation(
            engine,
            prompt,
            sampling=sampling,
            stopping=Stopping(max_tokens=TOKENS),
            policy=Fixed(6),
            drafters=create(
                spec,
                shared,
                RequestContext(kv or DraftKV(), sampling=sampling, prompt_length=len(prompt)),
            ),
        )
        for prompt in prompts
    ]
    told = run(engine, generations)
    counters = [generation.counters for generation in generations]
    return told, sum(c.drafted for c in counters), sum(c.accepted for c in counters)


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "sampled"])
@pytest.mark.parametrize("form", WRITERS)
def test_a_perfect_drafter_is_always_accepted_and_a_random_one_changes_no_token(
    engine: LlamaCppEngine, form: str, sampling: Sampling, tmp_path: Path
):
    kind, write = WRITERS[form]
    plain = answers(engine, PROMPTS, sampling)[0]
    assert [answer.tokens[:2] for answer in plain] == [prompt[:2] for prompt in PROMPTS]
    for perfect, count in ((True, len(PROMPTS)), (False, 2)):
        spec = f"{kind}:{write(tmp_path / f'{perfect}.gguf', perfect=perfect)}"
        prompts = PROMPTS[:count]
        told, drafted, accepted = answers(engine, prompts, sampling, spec, resources(engine))
        assert told == plain[:count]
        assert (drafted == accepted > 2 * TOKENS) if perfect else drafted


@pytest.mark.parametrize("perfect", [True, False])
def test_built_in_mtp_layers_draft_for_a_model_with_recurrent_layers(tmp_path: Path, perfect: bool):
    path = write_mtp_model(tmp_path / "model.gguf", perfect=perfect)
    with closing(LlamaCppEngine(path, 512, EngineSettings(taps=(3,)))) as engine:
        shared = resources(engine)
        assert taps("mtp", shared) == (3,)
        told, drafted, accepted = answers(engine, PROMPTS, SAMPLINGS[1], "mtp", shared)
        assert told == answers(engine, PROMPTS, SAMPLINGS[1])[0]
        assert drafted == accepted if perfect else accepted < drafted


@pytest.mark.parametrize("form", WRITERS)
def test_a_continued_text_reuses_the_drafters_kv(engine: LlamaCppEngine, form: str, tmp_path: Path):
    # The next request begins with the tokens before position 12, and goes on otherwise.
    kind, write = WRITERS[form]
    spec = f"{kind}:{write(tmp_path / 'drafter.gguf', perfect=True)}"
    shared, kv = resources(engine), DraftKV()
    with closing(engine.open()) as sequence:
        answers(engine, PROMPTS[:1], SAMPLINGS[0], spec, shared, kv)
        fork = kv.copy_prefix(12)
        prompt = [*PROMPTS[0][:12], 48, 49, 48, 49, 48, 49, 48, 49]
        request = RequestContext(fork, prompt_length=len(prompt))
        one = generation(
            engine, prompt, policy=Fixed(6), drafters=create(spec, shared, request),
            stopping=Stopping(max_tokens=TOKENS), cached=0,
        )  # fmt: skip
        assert run(engine, [one])[0].tokens[:4] == [48, 49, 48, 49]
        assert sequence.length == 0
    assert one.counters.accepted > TOKENS // 2


def test_prefilling_a_prompt_does_not_count_as_draft_cost(
    engine: LlamaCppEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    reads: list[int] = []
    monkeypatch.setattr(DraftCost, "observe", lambda _, seconds, read: reads.append(read))
    spec = f"dflash:{write_dflash(tmp_path / 'drafter.gguf', perfect=True)}"
    answers(engine, PROMPTS[:1], SAMPLINGS[0], spec, resources(engine))
    assert reads[0] == len(PROMPTS[0])
    assert 1 <= max(reads[1:]) <= 6
    monkeypatch.undo()
    cost = DraftCost()
    for seconds, read in ((3.0, 0), (0.5, 6), (9.0, 100)):
        cost.observe(seconds, read)
    assert cost.seconds == 0.5


FAULTS: dict[str, tuple[str, dict[str, Any], str]] = {
    "layer": ("DFlash", {"dflash.target_layers": [1, 2, 9]}, "reads states after layer 8"),
    "width": ("EAGLE-3", {"eagle3.target_hidden_size": 32}, "fc.weight"),
    "block": ("DFlash", {"dflash.block_size": 1}, "blocks of 1 tokens"),
    "mask": ("DFlash", {"tokenizer.ggml.mask_token_id": COUNT}, f"the mask token {COUNT}"),
    "no mask": ("DFlash", {"tokenizer.ggml.mask_token_id": None}, "the mask token None"),
    "no layer": ("DFlash", {"dflash.block_count": 0}, "block_count of 0; expected 1 to 512"),
    "rotation": ("DFlash", {"dflash.rope.dimension_count": 7}, "of 7; expected 2 to 16"),
    "rounding": ("EAGLE-3", {"eagle3.attention.layer_norm_rms_epsilon": nan}, "epsilon of nan"),
    "heads": ("EAGLE-3", {"eagle3.attention.head_count_kv": 3}, "a multiple of 3"),
    "experts": ("EAGLE-3", {"eagle3.expert_count": 4}, "expert_count of 4; expected 0"),
    "scaling": ("EAGLE-3", {"eagle3.rope.scaling.type": "magic"}, "one of linear"),
    "no numbers": ("DFlash", {"dflash.target_layers": [1.0, nan, 2.0]}, "reads layers [1.0"),
    "tokens": ("EAGLE-3", {"tensors": {"d2t": np.full(COUNT, -1)}}, "drafts tokens"),
    "floats": ("EAGLE-3", {"tensors": {"d2t": np.zeros(COUNT, "f4")}}, "drafts tokens"),
    "layers": ("EAGLE-3", {"eagle3.target_layers": [1, 2]}, "reads 2 layers"),
    "one token": ("DFlash", {"tokenizer.ggml.tokens": ["a"] * COUNT}, "or duplicates"),
    "vocabulary": (
        "DFlash",
        {"tokenizer.ggml.tokens": [f"t{i}" for i in range(COUNT - 1)]},
        f"vocabulary is {COUNT - 1}",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_an_incompatible_native_drafter_is_rejected(target: Path, name: str, tmp_path: Path):
    form, fields, expected = FAULTS[name]
    kind, write = WRITERS[form]
    path = write(tmp_path / "drafter.gguf", perfect=False, **fields)
    with (
        load_model(str(target), cache_tokens=256) as model,
        raises(ModelError, expected, "drafter.gguf"),
    ):
        model.generate("a", max_tokens=4, drafter=f"{kind}:{path}")
