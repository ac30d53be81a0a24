"""The promise again, for drafters that read the target's hidden states."""

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import Any

import numpy as np
import pytest

from paceline.decoding.policy import Fixed
from paceline.decoding.stopping import Stopping
from paceline.decoding.types import Block
from paceline.drafters import DrafterResources, create
from paceline.drafters.dflash import Config, DFlashDrafter, HostKV
from paceline.drafters.mtp import drafter as mtp_drafter
from paceline.drafters.networks.context import ContextCache, DraftCost
from paceline.engines import EngineSettings, open_engine
from paceline.engines.base import Engine
from paceline.models import ModelFiles
from support.dflash import tiny_config, write_checkpoint
from support.driver import POLICIES, generation, run, total
from support.exactness import SAMPLINGS, TOKENS, Plainly, plain_answers, prompt_of
from support.mtp import HeadForm, write_head

SPECS = [
    *("dflash", "suffix+dflash:window=8", "dflash:int8=0+suffix"),
    *("mtp", "suffix+mtp:length=3", "mtp:own,int8=0,vocab=200"),
]


class Rehearsed:
    """In place of a network: goes on as a known text does, but for some positions.

    It checks what it is told of the target: the features of each token, in order, none left out.
    """

    def __init__(
        self, config: Config, text: Sequence[int], features: np.ndarray, wrong_at: Sequence[int]
    ) -> None:
        self.config = config
        self.cost = DraftCost(0.1)
        self._text = text
        self._features = features
        self._wrong_at = set(wrong_at)

    def new_cache(self) -> ContextCache[HostKV]:
        return ContextCache(HostKV(1, 1, 2))

    def tapped(self, taps: Mapping[str, np.ndarray], rows: int) -> np.ndarray:
        return np.concatenate([taps["tap.0"][:rows], taps["tap.1"][:rows]], axis=1)

    def concat(self, parts: Sequence[np.ndarray]) -> np.ndarray:
        return np.concatenate([self._features[:0], *parts])

    def prefill(self, context: ContextCache[HostKV], features: np.ndarray, start: int) -> None:
        positions = range(start, start + len(features))
        assert np.array_equal(features, self._features[start : start + len(features)])
        assert [*context.positions, *positions] == [*range(start + len(features))]
        context.positions += positions

    def draft(
        self,
        context: ContextCache[HostKV],
        token: int,
        position: int,
        features: np.ndarray,
        start: int,
        **_: Any,
    ) -> tuple[list[int], list[float]]:
        self.prefill(context, features, start)
        assert len(context) == position
        assert token == self._text[position]
        block = range(position + 1, position + self.config.block_size)
        # Behind the end of the text anything will do.
        drafts = [self._text[at] if at < len(self._text) else 5 for at in block]
        wrong = [token ^ (at in self._wrong_at) for at, token in zip(block, drafts, strict=True)]
        return wrong, [0.9] * len(wrong)


@pytest.fixture(scope="module")
def tapped(tiny_files: ModelFiles) -> Engine:
    settings = EngineSettings(cache_tokens=9 * 64, taps=(0, 1))
    return open_engine("openvino", tiny_files.path, tiny_files.context_length, settings)


@pytest.fixture(scope="module")
def plainly_tapped(tapped: Engine) -> Plainly:
    return plain_answers(tapped)


@pytest.fixture(scope="module")
def dflash(
    tapped: Engine,
    plainly_tapped: Plainly,
    tiny_files: ModelFiles,
    tmp_path_factory: pytest.TempPathFactory,
) -> DrafterResources:
    """A drafter that fits the target and knows nothing, but of few tokens: some drafts stand."""
    often = Counter(token for prompt in range(8) for token in plainly_tapped(prompt, 0).tokens)
    folder = tmp_path_factory.mktemp("dflash")
    drafted = sorted(token for token, _ in often.most_common(6))
    write_checkpoint(folder, tiny_config(tiny_files, block_size=16), draft_vocab=drafted)
    heads = {
        "mtp": HeadForm(drafted=drafted),
        "own": HeadForm(own=True, taps=(1,), kv_heads=1, rotary=0.5),
    }
    for name, form in heads.items():
        write_head(folder / name, form)
    return DrafterResources(
        vocab_size=tapped.vocab_size,
        graph=tiny_files.path,
        shipped={"dflash": folder, "mtp": folder / "mtp"},
        find=lambda name: folder / name,
    )


@pytest.mark.parametrize(
    ("policy", "blocks"), [("fixed", range(2, 17, 2)), ("auto", range(3, 17, 2))]
)
@pytest.mark.parametrize("spec", SPECS)
def test_a_drafter_that_reads_hidden_states_changes_no_token(
    tapped: Engine,
    plainly_tapped: Plainly,
    dflash: DrafterResources,
    spec: str,
    policy: str,
    blocks: range,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(mtp_drafter, "LEAST_CHANCE", 0.0)  # random heads are never sure
    ran = []
    for block in blocks:
        asks = [(i % 8, (block + i) % len(SAMPLINGS)) for i in range(1 + block % 5)]
        going = [
            generation(
                tapped,
                prompt_of(tapped, prompt),
                sampling=SAMPLINGS[sampling],
                stopping=Stopping(max_tokens=TOKENS),
                drafters=create(spec, dflash),
                policy=POLICIES[policy](block),
                prefill_chunk=block,
            )
            for prompt, sampling in asks
        ]
        ran += going
        for (prompt, sampling), told in zip(asks, run(tapped, going), strict=True):
            assert told == plainly_tapped(prompt, sampling), f"{block=} {SAMPLINGS[sampling]}"
    # What `auto` drafts depends on the seconds that a draft takes here, now.
    assert (0 if policy == "fixed" else -1) < total(ran).accepted < total(ran).drafted
    drafted = Counter[str]()
    for one in ran:
        drafted.update(one.counters.drafted_by)
    for name in ("dflash", "mtp"):
        assert (drafted[name] > 0) is (name in spec), name


@pytest.mark.parametrize("block", range(2, 17))
@pytest.mark.parametrize("every", [1, 2, 5, TOKENS])
def test_drafts_from_hidden_states_rejected_at_any_position_change_no_token(
    tapped: Engine, plainly_tapped: Plainly, tiny_files: ModelFiles, block: int, every: int
):
    config = tiny_config(tiny_files, block_size=16)
    expected, going = [], []
    for place in range(4):
        prompt, sampling = prompt_of(tapped, place), (block + 3 * place) % len(SAMPLINGS)
        expected.append(plainly_tapped(place, sampling))
        text = prompt + expected[-1].tokens
        wrong_at = range(len(prompt) + every, len(text), every)
        network: Any = Rehearsed(config, text, features_of(tapped, prompt, text), wrong_at)
        going.append(
            generation(
                tapped,
                prompt,
                sampling=SAMPLINGS[sampling],
                stopping=Stopping(max_tokens=TOKENS),
                drafters=[DFlashDrafter(network, network.new_cache())],
                policy=Fixed(block),
                prefill_chunk=1 + place * 5,
            )
        )
    assert run(tapped, going) == expected
    for one in going:
        if every == TOKENS:
            assert one.counters.steps == -(-(TOKENS - 1) // block)
        if every == 1:
            assert one.counters.accepted == 0


def features_of(engine: Engine, prompt: Sequence[int], text: Sequence[int]) -> np.ndarray:
    """What the taps show of a prompt and of the rest of a text, an answer to it."""
    seen = []
    with closing(engine.open()) as sequence:
        for block in (Block(prompt, 0, prefill=True), Block(text[len(prompt) :], 0)):
            taps = engine.step([(sequence, block)]).taps[0]
            seen.append(np.concatenate([*taps.values()], axis=1))
            sequence.commit(len(block.tokens))
    return np.concatenate(seen)
