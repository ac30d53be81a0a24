"""DFlash on a target in MLX: exactness, and the number of waits of the host."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.decoding.sampling import Sampling
from paceline.decoding.stopping import Stopping
from paceline.drafters import DrafterResources, create
from paceline.engines.base import Engine
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
        size = float(mx.abs(mask).mean()) / 2  # a layer's contribution to the mask's embedding
        tensors = {
            name: rows * size
            for name, rows in random_weights(config).items()
            if name.endswith(("o_proj.weight", "down_proj.weight"))
        }
        write_checkpoint(self.folder, config, tensors={**tensors, "norm.weight": 4 * norm})
        return DrafterResources(
            engine="mlx", opened=self.engine, vocab_size=mlx.VOCAB, shipped={"dflash": self.folder}
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
    return Target(mlx.engine("lfm2", request, (0, 1)), tmp_path_factory.mktemp("one"), {})


@pytest.mark.parametrize(
    ("spec", "policy", "block"),
    [
        ("dflash", "fixed", 12),
        ("suffix+dflash:window=8", "kelly", 7),
        ("dflash:bits=4+suffix", "auto", 5),
    ],
)
def test_dflash_changes_no_token(target: Target, spec: str, policy: str, block: int):
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


def test_taps_stay_on_the_device(one: Target, monkeypatch: pytest.MonkeyPatch):
    from paceline_mlx.step import TapArrays

    expected = one.plainly(0, 0)
    (drafter,) = create("dflash", one.shared)
    monkeypatch.setattr(TapArrays, "__getitem__", lambda *_: pytest.fail("came to the host"))
    assert answer(one.engine, prompt_of(0), drafters=[drafter], **asked(0)) == expected


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Count waits for arrays that are not computed: by mx.eval, or by a read on the host."""
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
def test_a_step_syncs_once_or_twice_if_the_policy_reads_drafts(
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
