"""DFlash on a target in MLX: it changes no token, and how often the host waits."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from paceline.decoding.policy import Fixed
from paceline.decoding.sampling import Sampling
from paceline.decoding.stopping import Stopping
from paceline.decoding.types import Block, DeferredRows
from paceline.drafters import DrafterResources, create
from paceline.engines.base import Engine
from paceline_mlx.heads.cache import HeadCache, NewRows
from paceline_mlx.heads.drafter import DFlashDrafter
from paceline_mlx.heads.network import DraftCost
from support import mlx
from support.dflash import config_for, random_weights, write_checkpoint
from support.driver import POLICIES, Answer, answer, generation, run, total

pytestmark = pytest.mark.mlx


TOKENS = 20


SAMPLINGS = [Sampling(), Sampling(temperature=0.8, seed=3), Sampling(repetition_penalty=1.2)]


def prompt_of(which: int) -> list[int]:
    rng = np.random.default_rng(which)
    part = rng.integers(0, mlx.VOCAB, 5 + which).tolist()
    return [*part, 7, *part]


@dataclass
class Target:
    """An engine, its plain answers, and drafters for it."""

    engine: Any
    folder: Path
    known: dict[tuple[int, int], Answer]

    @cached_property
    def shared(self) -> DrafterResources:
        """A random drafter that prefers a frequent token: some drafts are accepted."""
        import mlx.core as mx

        often = [token for prompt in range(4) for token in self.plainly(prompt, 0).tokens]
        config, model = config_for(self.engine), self.engine.model
        mask = model.embed(mx.array([config.mask_token_id]))
        head = model.head(mx.eye(64).astype(mask.dtype))[:, max({*often}, key=often.count)]
        norm = np.array((head * mx.sign(mask[0]) / mx.abs(head).max()).astype(mx.float32))
        size = float(mx.abs(mask).mean()) / 2  # what a layer adds to the mask's embedding
        tensors = {
            name: rows * size
            for name, rows in random_weights(config).items()
            if name.endswith(("o_proj.weight", "down_proj.weight"))
        }
        write_checkpoint(self.folder, config, tensors={**tensors, "norm.weight": 4 * norm})
        return DrafterResources(
            engine="mlx",
            opened=self.engine,
            vocab_size=mlx.VOCAB,
            shipped={"dflash": self.folder},
        )

    def plainly(self, prompt: int, sampling: int, **options: Any) -> Answer:
        if options or (prompt, sampling) not in self.known:
            result = answer(self.engine, prompt_of(prompt), **asked(sampling), **options)
            if options:
                return result
            self.known[prompt, sampling] = result
        return self.known[prompt, sampling]


def asked(sampling: int) -> dict[str, Any]:
    return {"sampling": SAMPLINGS[sampling], "stopping": Stopping(max_tokens=TOKENS)}


@pytest.fixture(scope="module", params=mlx.CASES)
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Target:
    layers = mlx.CASES[request.param].layers
    engine = mlx.engine(request.param, request, taps=tuple(range(layers)))
    return Target(engine, tmp_path_factory.mktemp("drafter"), {})


@pytest.fixture(scope="module")
def one(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Target:
    """One engine, for tests that need no other."""
    return Target(mlx.engine("lfm2", request, (0, 1)), tmp_path_factory.mktemp("one"), {})


@pytest.mark.parametrize(
    ("spec", "policy", "block"),
    [
        ("dflash", "fixed", 12),
        ("suffix+dflash:window=8", "kelly", 7),
        ("dflash:bits=4+suffix", "auto", 5),
    ],
)
def test_it_changes_no_token(target: Target, spec: str, policy: str, block: int):
    asks = [(which, which % len(SAMPLINGS)) for which in range(4)]
    going = [
        generation(
            target.engine,
            prompt_of(prompt),
            drafters=create(spec, target.shared),
            policy=POLICIES[policy](block),
            prefill_chunk=block,
            **asked(sampling),
        )
        for prompt, sampling in asks
    ]
    together = run(target.engine, going[:3]) + run(target.engine, going[3:])
    assert together == [target.plainly(prompt, sampling) for prompt, sampling in asks]
    assert total(going).accepted < total(going).drafted
    assert sum(result.counters.drafted_by.get("dflash", 0) for result in going) > 0


class Even:
    """Allows even tokens; every eighth is forced."""

    def __init__(self) -> None:
        self._count = 0

    def masked(self, logits: np.ndarray) -> np.ndarray:
        result = logits.copy()
        result[1::2] = -np.inf
        if self.forced(1):
            result[:8], result[9:] = -np.inf, -np.inf
        return result

    def push(self, token: int) -> None:
        assert token % 2 == 0
        self._count += 1

    def forced(self, limit: int) -> Sequence[int]:
        return [8][:limit] if self._count % 8 == 7 else []

    def allowed_length(self, tokens: Sequence[int]) -> int:
        odd = [token % 2 for token in tokens]
        return odd.index(1) if 1 in odd else len(odd)


def test_taps_stay_on_the_device(one: Target, monkeypatch: pytest.MonkeyPatch):
    from paceline_mlx.step import TapArrays

    expected = one.plainly(0, 0)
    (drafter,) = create("dflash", one.shared)
    monkeypatch.setattr(TapArrays, "__getitem__", lambda *_: pytest.fail("came to the host"))
    assert answer(one.engine, prompt_of(0), drafters=[drafter], **asked(0)) == expected


def test_tapped_hidden_states_equal_those_on_the_host(one: Target):
    import mlx.core as mx

    create("dflash", one.shared)
    opened: Any = one.shared.heads["dflash"]
    with closing(one.engine.open()) as sequence:
        (taps,) = one.engine.step([(sequence, Block(prompt_of(0), 1))]).taps
    hidden = opened.tapped(taps, 9)
    shown = np.concatenate([taps["tap.0"], taps["tap.1"]], axis=1)
    np.testing.assert_allclose(np.array(hidden.astype(mx.float32)), shown[:9], rtol=1e-2)


class Rehearsed:
    """In place of a network: goes on as a known text does, but for some positions.

    It checks what it gets of the target: the hidden states of each token, in order, none left out.
    """

    def __init__(self, text: Sequence[int], states: np.ndarray, wrong_at: Sequence[int]) -> None:
        self.config, self.cost = SimpleNamespace(vocab_size=mlx.VOCAB), DraftCost()
        self._text, self._states, self._wrong_at = text, states, set(wrong_at)

    def tapped(self, taps: Mapping[str, np.ndarray], rows: int) -> Any:
        import mlx.core as mx

        return mx.array(np.concatenate([taps["tap.0"][:rows], taps["tap.1"][:rows]], axis=1))

    def prefill(self, cache: HeadCache, rows: NewRows) -> None:
        end = rows.start + len(rows.tapped)
        states = np.array(rows.tapped)
        np.testing.assert_allclose(states, self._states[rows.start : end], rtol=1e-3, atol=1e-4)
        cache.positions += range(rows.start, end)
        assert cache.positions == [*range(end)]

    def draft(
        self, cache: HeadCache, token: int, position: int, rows: NewRows, **_: Any
    ) -> tuple[list[int], list[float]]:
        self.prefill(cache, rows)
        assert (len(cache), token) == (position, self._text[position])
        # After the end of the text anything will do.
        text = [*self._text, *[5] * 20][position + 1 : position + 12]
        drafts = [
            (one + (at in self._wrong_at)) % mlx.VOCAB
            for at, one in enumerate(text, start=position + 1)
        ]
        return drafts, [0.9] * len(drafts)


@pytest.mark.parametrize(("block", "every"), [(2, 1), (5, 2), (12, 5), (12, TOKENS)])
def test_drafts_rejected_at_any_position_change_no_token(one: Target, block: int, every: int):
    expected, going = [], []
    for prompt in range(3):
        expected.append(one.plainly(prompt, prompt))
        start, text = len(prompt_of(prompt)), prompt_of(prompt) + expected[-1].tokens
        with closing(one.engine.open()) as sequence:
            (taps,) = one.engine.step([(sequence, Block(text, 0, prefill=True))]).taps
        states = np.concatenate([*taps.values()], axis=1)
        network: Any = Rehearsed(text, states, range(start + every, len(text), every))
        drafter = DFlashDrafter(network, HeadCache(1), Sampling(), start)
        options: Any = {"drafters": [drafter], "policy": Fixed(block), "prefill_chunk": 1 + prompt}
        going.append(generation(one.engine, prompt_of(prompt), **options, **asked(prompt)))
    assert run(one.engine, going) == expected
    for ran in going:
        if every == TOKENS:
            assert ran.counters.steps == -(-(TOKENS - 1) // block)
        assert (ran.counters.accepted == 0) is (every == 1)


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Waits for arrays that are not computed: by mx.eval, or by a read on the host."""
    import io

    import mlx.core as mx
    from mlx.utils import tree_flatten

    results: list[str] = []
    evaluate, as_numpy = mx.eval, np.array

    def undone(values: Any) -> bool:
        arrays = [item for _, item in tree_flatten(values) if isinstance(item, mx.array)]
        file = io.StringIO()
        mx.export_to_dot(file, *arrays)
        return "label" in file.getvalue()  # an operation that is still to come

    def counting(*values: Any) -> None:
        if undone(list(values)):
            results.append("asked for")
        evaluate(*values)

    def looking(value: Any, *args: Any, **options: Any) -> Any:
        if isinstance(value, mx.array) and undone([value]):
            results.append("looked at")
        return as_numpy(value, *args, **options)

    monkeypatch.setattr(mx, "eval", counting)
    monkeypatch.setattr(np, "array", looking)
    yield results


class Steps:
    """An engine that counts the waits of each step: draft, verify, accept."""

    def __init__(self, engine: Engine, waits: list[str]) -> None:
        self._engine, self._waits = engine, waits
        self._before = len(waits)
        self.counted: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def step(self, work: Any) -> Any:
        result = self._engine.step(work)
        self.counted.append(len(self._waits) - self._before)
        self._before = len(self._waits)
        return result


@pytest.mark.parametrize(("policy", "requests"), [("fixed", 1), ("kelly", 3), ("auto", 3)])
def test_a_step_waits_once_and_twice_if_the_policy_reads_drafts(
    one: Target, waits: list[str], policy: str, requests: int
):
    going = [
        generation(
            one.engine,
            prompt_of(which),
            drafters=create("dflash", one.shared),
            policy=POLICIES[policy](6),
            **asked(0),
        )
        for which in range(requests)
    ]
    told = [one.plainly(which, 0) for which in range(requests)]
    counting: Any = Steps(one.engine, waits)
    assert run(counting, going) == told
    assert total(going).drafted > 0
    if policy == "auto":  # it reads the drafts of several requests one by one
        assert set(counting.counted) <= set(range(1, requests + 2))
        assert max(counting.counted) == requests + 1
    else:
        assert set(counting.counted) == {1}


def test_a_constraint_reads_the_draft_before_verification_and_changes_no_token(
    one: Target, waits: list[str]
):
    expected = one.plainly(1, 1, constraint=Even())
    going = generation(
        one.engine,
        prompt_of(1),
        drafters=create("suffix+dflash", one.shared),
        policy=Fixed(6),
        constraint=Even(),
        **asked(1),
    )
    waits.clear()
    counting: Any = Steps(one.engine, waits)
    assert run(counting, [going]) == [expected]
    assert expected != one.plainly(1, 1)
    assert set(counting.counted) <= {1, 2}  # one where there is nothing to draft


def test_a_block_may_have_pending_tokens(one: Target, waits: list[str]):
    going = generation(
        one.engine, prompt_of(0), drafters=create("dflash", one.shared), policy=Fixed(6), **asked(0)
    )
    with closing(one.engine.open()) as sequence:
        result = one.engine.step([(sequence, going.next_block())])
        step = going.accept(result.logits[0], best=result.best[0], taps=result.taps[0])
        sequence.commit(step.accepted_rows)
        waits.clear()
        block = going.next_block()
        assert isinstance(block.tokens, DeferredRows)
        assert len(block.tokens) == 6
        assert waits == []
        assert block.tokens[0] == going.tokens[-1]
        assert len(waits) == 1  # one read waits for all tokens
        assert len(list(block.tokens)) == 6
        assert len(waits) == 1
