"""DFlash in MLX: what it computes, that it changes no token, and how often it is waited for."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import paceline
from paceline.decoding.policy import Fixed
from paceline.decoding.sampling import Sampling
from paceline.decoding.stopping import Stopping
from paceline.decoding.types import Block, ComputedBlock, Pending
from paceline.drafters import DrafterResources, RequestContext, create
from paceline.drafters.dflash import (
    Config,
    DFlashDrafter,
    MlxNetwork,
    Network,
    OpenVinoNetwork,
    read_config,
)
from paceline.engines.base import Engine
from paceline.errors import InvalidRequest, ModelError
from paceline.models import ModelFiles
from paceline.runtime.loop import run_together
from paceline.runtime.model import Model
from paceline.runtime.options import check
from support import mlx
from support.dflash import (
    LEFT_OUT,
    Ends,
    parts,
    write_checkpoint,
)
from support.dflash_forms import FORMS, WAYS, Stored, assert_close, assert_same, read_at_once, seen
from support.driver import POLICIES, Answer, answer, generation, run, total

pytestmark = pytest.mark.mlx

FIRST_TOKENS = range(0, 320, 53)


@pytest.fixture(autouse=True, scope="module")
def needs() -> None:
    mlx.needs()


# -- what the network computes ---------------------------------------------------------------------


class Lent:
    """Embeddings and a head as an MLX target has them."""

    layers = 2

    def __init__(self, ends: Ends, kind: str = "float32") -> None:
        import mlx.core as mx

        embeddings, head = (mx.array(each.astype(np.float32)) for each in ends)
        self._embeddings = embeddings.astype(getattr(mx, kind))
        self._head = head.astype(getattr(mx, kind))

    def embed(self, tokens: Any) -> Any:
        return self._embeddings[tokens]

    def head(self, hidden: Any) -> Any:
        return hidden @ self._head.T

    def head_of(self, tokens: Any) -> Any:
        return lambda hidden: hidden @ self._head[tokens].T


class Shown:
    """A network that takes numpy's arrays for features."""

    def __init__(self, network: MlxNetwork) -> None:
        self.new_cache, self._network = network.new_cache, network

    def prefill(self, context: Any, features: np.ndarray, start: int) -> None:
        import mlx.core as mx

        self._network.prefill(context, mx.array(features), start)

    def draft(self, context: Any, token: int, position: int, rows: np.ndarray, start: int) -> Any:
        import mlx.core as mx

        return self._network.draft(context, token, position, mx.array(rows), start)


class Case(Stored):
    """With a target for OpenVINO and the same one for MLX."""

    @cached_property
    def network(self) -> Any:
        return Shown(self.opened())

    def opened(self, *, kind: str = "float32", **options: Any) -> MlxNetwork:
        return MlxNetwork(self.folder, Lent(self.ends, kind), **options)


MakeCase = Callable[..., Case]


@pytest.fixture(scope="module")
def make_case(tiny_files: ModelFiles, tmp_path_factory: pytest.TempPathFactory) -> MakeCase:
    return lambda *form, **more: Case.make(
        tiny_files, tmp_path_factory.mktemp("drafter"), *form, **more
    )


@pytest.fixture(scope="module", params=FORMS)
def form(request: pytest.FixtureRequest, make_case: MakeCase) -> Case:
    return make_case(*FORMS[request.param])


@pytest.fixture(scope="module")
def case(make_case: MakeCase) -> Case:
    return make_case()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("length", [0, 5, 300])
def test_a_block_says_what_the_paper_says(form: Case, length: int, way: Callable[..., Any]):
    rows = form.features(length)
    found = [way(form.network, rows, token) for token in FIRST_TOKENS]
    assert_same(found, [form.expected(rows, token) for token in FIRST_TOKENS])


def test_rows_stand_at_their_positions_whatever_lies_between(form: Case):
    rows = form.features(30)
    positions = [*range(10, 25), *range(90, 105)]
    network, context = form.network, form.network.new_cache()
    network.prefill(context, rows[:15], 10)
    found = [network.draft(context, 3, 105, rows[15:], 90)]
    found += [network.draft(context, token, 105, rows[:0], 105) for token in FIRST_TOKENS]
    found += [network.draft(context, 3, 110, rows[:0], 105)]
    expected = [
        form.expected(rows, token, 105, positions=positions) for token in (3, *FIRST_TOKENS)
    ]
    assert_same(found, [*expected, form.expected(rows, 3, 110, positions=positions)])


def test_new_rows_that_end_before_the_block_stand_at_their_positions(form: Case):
    rows = form.features(20)
    found = form.network.draft(form.network.new_cache(), 3, 40, rows, 10)
    assert_same([found], [form.expected(rows, 3, 40, positions=range(10, 30))])


@pytest.mark.parametrize("window", [1, 7, 64, 300])
@pytest.mark.parametrize("layers", [(None, None), (20, None)], ids=str)
def test_with_the_option_window_only_the_last_rows_are_looked_at(
    make_case: MakeCase, layers: tuple[int | None, ...], window: int
):
    case = make_case({"windows": layers})
    rows = case.features(280)
    last = list(range(280))[-window:]
    network: Any = Shown(case.opened(window=window))
    for way in WAYS:
        found = [way(network, rows, token) for token in FIRST_TOKENS]
        expected = [case.expected(rows[last], token, 280, positions=last) for token in FIRST_TOKENS]
        assert_same(found, expected)


@pytest.mark.parametrize("kind", ["BF16", "F16"])
@pytest.mark.parametrize("target", ["float32", "bfloat16"])
def test_sixteen_bits_stay_and_say_nearly_the_same(make_case: MakeCase, kind: str, target: str):
    import mlx.core as mx

    case = make_case(kind=kind)
    network, rows = case.opened(kind=target), case.features(100)
    context = network.new_cache()
    features = network.tapped({"tap.0": rows[:, :64], "tap.1": rows[:, 64:]}, 100)
    network.prefill(context, features, 0)
    nothing = network.concat([])
    found = [network.draft(context, token, 100, nothing, 100) for token in FIRST_TOKENS]
    assert_close(found, [case.expected(rows, token) for token in FIRST_TOKENS])
    expected_kind = mx.bfloat16 if kind == "BF16" else mx.float16
    assert {each.keys.dtype for each in context.kv.caches} == {expected_kind}


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("width", [192, 96, 72], ids=["groups of 64", "of 32", "not all"])
def test_few_bits_are_those_that_mlx_makes_of_them(make_case: MakeCase, bits: int, width: int):
    case = make_case({"intermediate_size": width})
    rows, small = case.features(100), Shown(case.opened(bits=bits))
    found = [read_at_once(small, rows, token) for token in FIRST_TOKENS]
    whole = [read_at_once(case.network, rows, token) for token in FIRST_TOKENS]
    rounded = {name: in_few_bits(weight, bits) for name, weight in case.weights.items()}
    few = replace(case, weights=rounded)
    assert_same(found, [few.expected(rows, token) for token in FIRST_TOKENS])
    assert not np.allclose([each[1] for each in whole], [each[1] for each in found])


def in_few_bits(weight: np.ndarray, bits: int) -> np.ndarray:
    """A matrix whose rows have groups of 64 or 32 numbers, with so many bits for each number."""
    import mlx.core as mx

    size = next((size for size in (64, 32) if weight.shape[-1] % size == 0), None)
    if weight.ndim == 1 or size is None:
        return weight
    parts = mx.quantize(mx.array(weight), group_size=size, bits=bits)
    return np.array(mx.dequantize(*parts, group_size=size, bits=bits))


@pytest.mark.parametrize("window", [None, 24])
def test_drafts_are_those_of_the_network_in_openvino(form: Case, window: int | None):
    """Step by step, with blocks of which some rows fall, a gap, a rewind and a fork."""
    networks: list[Network] = [
        OpenVinoNetwork(form.folder, form.files.path, window=window, int8=False),
        form.opened(window=window),
    ]
    drafters = [DFlashDrafter(network, network.new_cache()) for network in networks]
    rng = np.random.default_rng(3)
    at, compared = 0, 0

    def compare() -> None:
        nonlocal compared
        proposals = [drafter.propose([1] * at + [compared % 320], 15) for drafter in drafters]
        ours, theirs = proposals
        assert list(ours.tokens) == list(theirs.tokens)
        np.testing.assert_allclose(list(ours.probabilities), list(theirs.probabilities), rtol=1e-4)
        compared += len(ours.tokens)

    def show(count: int, kept: int) -> None:
        nonlocal at
        rows = rng.normal(size=(count, form.config.tapped_size)).astype(np.float32)
        taps = dict(
            zip(
                [f"tap.{tap}" for tap in form.config.target_layer_ids],
                np.split(rows, len(form.config.target_layer_ids), axis=1),
                strict=True,
            )
        )
        nothing = np.zeros((0, 320), np.float32)
        for drafter in drafters:
            drafter.observe(ComputedBlock([1] * count, at, kept, nothing, taps))
        at += kept

    show(30, 30)
    for kept in (1, 8, 3, 5, 1, 2, 8, 7):
        compare()
        show(8, kept)
    at += 11
    show(40, 40)
    compare()
    for cut in (100, 60, 33):
        at = cut
        for drafter in drafters:
            drafter._cache.truncate(cut)
        compare()
        show(8, 4)
    forks = [
        DFlashDrafter(network, drafter._cache.copy(25))
        for network, drafter in zip(networks, drafters, strict=True)
    ]
    before = at
    compare()
    drafters, kept_drafters = forks, drafters
    at = 25
    show(9, 9)
    compare()
    drafters, at = kept_drafters, before
    show(3, 3)
    compare()
    assert compared > 100


def test_what_an_engine_shows_may_change_after_it_was_shown(case: Case):
    network = case.opened()
    drafter, rows = DFlashDrafter(network, network.new_cache()), case.features(12)
    shown = seen(rows.copy(), 0)
    drafter.observe(shown)
    for array in shown.taps.values():
        array[:] = np.nan
    found = drafter.propose([1] * 12 + [8], 7)
    assert_same([(found.tokens, found.probabilities)], [case.expected(rows, 8)])


@pytest.mark.parametrize("cut", [900, 512, 20])
def test_a_long_prompt_is_read_as_it_comes(case: Case, cut: int):
    network = case.opened()
    context, rows = network.new_cache(), case.features(1000)
    drafter = DFlashDrafter(network, context)
    for start, part in parts(rows, 250):
        drafter.observe(seen(part, start))
        assert sum(map(len, context.pending)) <= 750
    assert len(context) >= 750
    context.truncate(cut)
    found = drafter.propose([1] * cut + [8], 7)
    assert_same([(found.tokens, found.probabilities)], [case.expected(rows[:cut], 8)])


def test_the_next_turn_knows_what_the_last_one_saw_up_to_the_cut(case: Case):
    shared, own = DrafterResources(mlx=Lent(case.ends)), RequestContext()
    rows = case.features(30)
    (first,) = create(f"dflash:{case.folder}", shared, own)
    first.observe(seen(rows[:20], 0))
    first.propose([1] * 21, 7)
    first.observe(seen(rows[20:], 20))
    (context,) = own.memory.values()
    context.truncate(17)
    (second,) = create(f"dflash:{case.folder}", shared, own)
    found = second.propose([1] * 17 + [8], 7)
    assert_same([(found.tokens, found.probabilities)], [case.expected(rows[:17], 8)])
    assert len(shared.networks) == 1


def test_it_says_what_a_block_takes(case: Case):
    network = case.opened()
    drafter = DFlashDrafter(network, network.new_cache())
    assert drafter.cost(1) == drafter.cost(15) == network.cost.base > 0


# -- on a target in MLX ----------------------------------------------------------------------------

TOKENS = 20
SAMPLINGS = [Sampling(), Sampling(temperature=0.8, seed=3), Sampling(repetition_penalty=1.2)]
BITS = [None, 8, 4]


def config_for(engine: Any, **changes: Any) -> Config:
    """A drafter that fits a target, with a layer that slides."""
    found = Config(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=mlx.VOCAB,
        rms_norm_eps=1e-6,
        rope_theta=10_000.0,
        block_size=12,
        num_target_layers=engine.model.layers,
        target_layer_ids=engine.taps,
        mask_token_id=mlx.VOCAB - 1,
        windows=(None, 16),
    )
    return replace(found, **changes)


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
        """The drafter knows nothing, but of few tokens: some drafts stand."""
        often = [token for prompt in range(4) for token in self.plainly(prompt, 0).tokens]
        tokens, counts = np.unique(often, return_counts=True)
        drafted = sorted(tokens[np.argsort(-counts, kind="stable")[:6]].tolist())
        write_checkpoint(self.folder, config_for(self.engine), draft_vocab=drafted)
        return DrafterResources(
            vocab_size=mlx.VOCAB, mlx=self.engine.model, shipped={"dflash": self.folder}
        )

    def plainly(self, prompt: int, sampling: int, **options: Any) -> Answer:
        if options or (prompt, sampling) not in self.known:
            found = answer(self.engine, prompt_of(prompt), **asked(sampling), **options)
            if options:
                return found
            self.known[prompt, sampling] = found
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
    """One of them, for what is the same with all."""
    return Target(mlx.engine("lfm2", request, (0, 1)), tmp_path_factory.mktemp("one"), {})


@pytest.mark.parametrize("policy", ["fixed", "kelly", "auto"])
@pytest.mark.parametrize(
    "spec", ["dflash", "suffix+dflash:window=8", "dflash:bits=8", "dflash:bits=4+suffix"]
)
def test_it_changes_no_token(target: Target, spec: str, policy: str):
    ran = []
    # Other lengths for each policy; one to four sequences share a call.
    for block in {"fixed": (2, 12), "kelly": (7, 16), "auto": (5, 12)}[policy]:
        asks = [(i, (block + i) % len(SAMPLINGS)) for i in range(1 + block % 4)]
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
        ran += going
        for (prompt, sampling), told in zip(asks, run(target.engine, going), strict=True):
            assert told == target.plainly(prompt, sampling), f"{block=} {SAMPLINGS[sampling]}"
    assert total(ran).accepted < total(ran).drafted
    assert sum(each.counters.drafted_by.get("dflash", 0) for each in ran) > 0


def test_some_of_its_drafts_stand(target: Target):
    ran = [
        generation(
            target.engine,
            prompt_of(prompt),
            drafters=create("dflash", target.shared),
            policy=Fixed(12),
            **asked(sampling),
        )
        for prompt in range(4)
        for sampling in range(3)
    ]
    run(target.engine, ran)
    assert total(ran).accepted > 0


class Even:
    """Allows even tokens; every eighth is forced."""

    def __init__(self) -> None:
        self._count = 0

    def masked(self, logits: np.ndarray) -> np.ndarray:
        found = logits.copy()
        found[1::2] = -np.inf
        if self.forced(1):
            found[:8], found[9:] = -np.inf, -np.inf
        return found

    def push(self, token: int) -> None:
        assert token % 2 == 0
        self._count += 1

    def forced(self, limit: int) -> Sequence[int]:
        return [8][:limit] if self._count % 8 == 7 else []

    def allowed_length(self, tokens: Sequence[int]) -> int:
        odd = [token % 2 for token in tokens]
        return odd.index(1) if 1 in odd else len(odd)


@pytest.mark.parametrize("policy", ["fixed", "auto"])
def test_it_changes_no_token_of_an_answer_of_a_form(one: Target, policy: str):
    for sampling in range(3):
        expected = one.plainly(1, sampling, constraint=Even())
        told = answer(
            one.engine,
            prompt_of(1),
            drafters=create("suffix+dflash", one.shared),
            policy=POLICIES[policy](8),
            constraint=Even(),
            **asked(sampling),
        )
        assert told == expected
        assert told != one.plainly(1, sampling)


def test_taps_stay_on_the_device(one: Target, monkeypatch: pytest.MonkeyPatch):
    from paceline.engines.mlx.step import TapArrays

    expected = one.plainly(0, 0)
    (drafter,) = create("dflash", one.shared)
    monkeypatch.setattr(TapArrays, "__getitem__", lambda *_: pytest.fail("came to the host"))
    assert answer(one.engine, prompt_of(0), drafters=[drafter], **asked(0)) == expected


def test_its_features_are_those_that_an_engine_shows_the_host(one: Target):
    import mlx.core as mx

    create("dflash", one.shared)
    (network,) = one.shared.networks.values()
    with closing(one.engine.open()) as sequence:
        (taps,) = one.engine.step([(sequence, Block(prompt_of(0), 1))]).taps
    found = network.tapped(taps, 9)
    shown = np.concatenate([taps["tap.0"], taps["tap.1"]], axis=1)
    np.testing.assert_allclose(np.array(found.astype(mx.float32)), shown[:9], rtol=1e-2)


# -- how often it is waited for --------------------------------------------------------------------


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """How often somebody waits for what is not computed: asked for, or looked at."""
    import io

    import mlx.core as mx
    from mlx.utils import tree_flatten

    found: list[str] = []
    evaluate, as_numpy = mx.eval, np.array

    def undone(values: Any) -> bool:
        arrays = [each for _, each in tree_flatten(values) if isinstance(each, mx.array)]
        file = io.StringIO()
        mx.export_to_dot(file, *arrays)
        return "label" in file.getvalue()  # an operation that is still to come

    def counting(*values: Any) -> None:
        if undone(list(values)):
            found.append("asked for")
        evaluate(*values)

    def looking(value: Any, *args: Any, **options: Any) -> Any:
        if isinstance(value, mx.array) and undone([value]):
            found.append("looked at")
        return as_numpy(value, *args, **options)

    monkeypatch.setattr(mx, "eval", counting)
    monkeypatch.setattr(np, "array", looking)
    yield found


def test_a_wait_is_counted_once(waits: list[str]):
    import mlx.core as mx

    array = mx.arange(4) * 2
    mx.eval(array)
    np.array(array)
    np.array(array + 1)
    assert waits == ["asked for", "looked at"]


class Steps:
    """An engine that counts what was waited for in each step: drafting, verifying, accepting."""

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


@pytest.mark.parametrize(
    ("policy", "expected"), [("fixed", 1), ("adaptive", 1), ("kelly", 1), ("auto", 2)]
)
@pytest.mark.parametrize("requests", [1, 3])
def test_a_step_waits_once_where_nobody_looks_at_drafts_and_twice_where_somebody_does(
    target: Target, waits: list[str], policy: str, expected: int, requests: int
):
    going = [
        generation(
            target.engine,
            prompt_of(which),
            drafters=create("dflash", target.shared),
            policy=POLICIES[policy](6),
            **asked(0),
        )
        for which in range(requests)
    ]
    told = [target.plainly(which, 0) for which in range(requests)]
    counting: Any = Steps(target.engine, waits)
    assert run(counting, going) == told
    assert total(going).drafted > 0
    if expected == 1:
        assert set(counting.counted) == {1}
    else:
        # Drafts of several requests that somebody looks at are looked at one by one.
        assert set(counting.counted) <= set(range(1, requests + 2))
        assert max(counting.counted) == requests + 1


def test_a_form_of_the_answer_is_looked_at_before_it_is_verified(one: Target, waits: list[str]):
    going = generation(
        one.engine,
        prompt_of(1),
        drafters=create("dflash", one.shared),
        policy=Fixed(6),
        constraint=Even(),
        **asked(0),
    )
    counting: Any = Steps(one.engine, waits)
    run(counting, [going])
    assert set(counting.counted) == {1, 2}  # one where there is nothing to draft


def test_a_block_holds_what_is_still_being_computed(one: Target, waits: list[str]):
    going = generation(
        one.engine,
        prompt_of(0),
        drafters=create("dflash", one.shared),
        policy=Fixed(6),
        **asked(0),
    )
    with closing(one.engine.open()) as sequence:
        result = one.engine.step([(sequence, going.next_block())])
        step = going.accept(result.logits[0], best=result.best[0], taps=result.taps[0])
        sequence.commit(step.kept)
        waits.clear()
        block = going.next_block()
        assert isinstance(block.tokens, Pending)
        assert len(block.tokens) == 6
        assert waits == []
        assert block.tokens[0] == going.tokens[-1]
        assert len(waits) == 1  # who looks waits for all of it
        assert len(list(block.tokens)) == 6
        assert len(waits) == 1


# -- as users have it ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = mlx.checkpoint(tmp_path_factory.mktemp("mlx") / "qwen3", "qwen3")
    template = "{% for message in messages %}{{ message.content }}.{% endfor %}"
    (folder / "chat_template.jinja").write_text(template)
    return folder


@pytest.fixture(scope="module")
def model(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Model:
    """Loaded without taps."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("PACELINE_CACHE", str(tmp_path_factory.mktemp("cache")))
        made = paceline.load(checkpoint, engine="mlx", cache_tokens=4096)
        _ = made.profile
        return made


@pytest.fixture(scope="module")
def drafter(model: Model, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("drafter")
    engine: Any = model.engine
    write_checkpoint(folder, config_for(engine, target_layer_ids=(0, 1)))
    return folder


TEXTS = ["abcabcabcabc", "the rain in the", "x y x y x"]
OPTIONS: dict[str, Any] = {"raw": True, "max_tokens": 16}


@pytest.fixture
def plain(model: Model) -> list[list[int]]:
    return [model.generate(text, drafter="none", **OPTIONS).token_ids for text in TEXTS]


@pytest.mark.usefixtures("cache")
def test_a_model_answers_with_it(model: Model, drafter: Path, plain: list[list[int]]):
    drafted = 0
    for spec in (f"dflash:{drafter}", f"suffix+dflash:{drafter},bits=4,window=9"):
        for policy in ("fixed", "auto"):
            for text, expected in zip(TEXTS, plain, strict=True):
                found = model.generate(text, drafter=spec, policy=policy, max_block=5, **OPTIONS)
                assert found.token_ids == expected
                assert found.exact
                drafted += found.stats.drafted_by.get("dflash", 0)
    assert drafted > 0
    assert set(model.engine.taps) == {0, 1}


@pytest.mark.usefixtures("cache")
def test_streams_may_be_interleaved_and_run_together(
    model: Model, drafter: Path, plain: list[list[int]]
):
    options = {"drafter": f"dflash:{drafter}", "policy": "fixed", **OPTIONS}
    model.generate("a", **options)  # taps from here on
    going = streams = [model.stream(text, **options) for text in TEXTS]
    while going:
        going = [stream for stream in going if next(stream, None) is not None]
    together = [model.stream(text, **options) for text in TEXTS]
    run_together(together)
    assert [stream.result.token_ids for stream in streams] == plain
    assert [stream.result.token_ids for stream in together] == plain
    assert sum(stream.result.stats.drafted for stream in together) > 0


@pytest.mark.usefixtures("cache")
def test_a_server_answers_several_at_once(model: Model, drafter: Path, plain: list[list[int]]):
    import queue

    from paceline.server.request import Done, Failed, ServerRequest
    from paceline.server.scheduler import Scheduler

    options = {"drafter": f"suffix+dflash:{drafter}", **OPTIONS}
    model.generate("a", **options)
    scheduler = Scheduler(model)
    scheduler.start()
    heard: queue.Queue[Any] = queue.Queue()
    try:
        for number, text in enumerate(TEXTS * 4):
            policy = ("fixed", "auto")[number % 2]
            tell = lambda event, number=number: heard.put((number, event))  # noqa: E731
            tokens = model.tokens(text, raw=True)
            request = ServerRequest(tokens, check({**options, "policy": policy}))
            scheduler.submit(request, tell)
        answers: dict[int, list[int]] = {}
        while len(answers) < 4 * len(TEXTS):
            number, event = heard.get(timeout=120)
            assert not isinstance(event, Failed), event
            if isinstance(event, Done):
                answers[number] = event.result.token_ids
    finally:
        scheduler.close()
    assert [answers[number] for number in range(len(answers))] == plain * 4


@pytest.mark.usefixtures("cache")
def test_a_conversation_may_go_on_in_another_thread(model: Model, drafter: Path):
    import threading

    options: dict[str, Any] = {"max_tokens": 8, "policy": "fixed"}
    told: dict[str, list[str]] = {}
    for spec in ("none", f"dflash:{drafter}"):
        model.generate("a", drafter=spec, raw=True, max_tokens=2)
        chat = model.conversation()
        told[spec] = []
        for text in TEXTS:
            stream = chat.say(text, drafter=spec, **options)
            worker = threading.Thread(target=lambda stream=stream: list(stream))
            worker.start()
            worker.join()
            told[spec].append(stream.result.text)
        chat.close()
    one, other = told.values()
    assert one == other


# -- what cannot be used ---------------------------------------------------------------------------


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize(
    ("options", "said"),
    [
        (",int8=1", "int8, which is for drafting with OpenVINO; .* expected bits=8 or bits=4"),
        (",bits=3", "dflash has bits=3; expected 4 or 8"),
        (",window=0", "dflash has window=0"),
    ],
)
def test_an_option_that_is_none_is_refused(model: Model, drafter: Path, options: str, said: str):
    with pytest.raises(InvalidRequest, match=said):
        model.generate("a", drafter=f"dflash:{drafter}{options}")


@pytest.mark.usefixtures("cache")
def test_a_folder_that_is_none_is_named(model: Model, tmp_path: Path):
    with pytest.raises(ModelError, match=r"there is no folder .*nothing"):
        model.generate("a", drafter=f"dflash:{tmp_path / 'nothing'}")
    with pytest.raises(ModelError, match=r"cannot read .*config\.json"):
        model.generate("a", drafter=f"dflash:{tmp_path}")


def test_a_drafter_for_another_target_is_refused(one: Target, tmp_path: Path):
    write_checkpoint(tmp_path, config_for(one.engine, hidden_size=96, num_target_layers=9))
    with pytest.raises(ModelError) as refused:
        MlxNetwork(tmp_path, one.engine.model)
    said = str(refused.value)
    assert "its hidden size is 96, the target's 64; its number of target layers is 9" in said
    assert "\n" not in said


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        ({"fc.weight": LEFT_OUT}, "fc.weight is missing"),
        ({"norm.weight": np.full(64, np.nan, np.float32)}, "values that are not finite"),
        ({"norm.weight": np.ones(3, np.float32)}, r"norm.weight is \[3\], expected \[64\]"),
    ],
    ids=["missing", "no number", "shape"],
)
def test_weights_that_cannot_be_used_are_named(
    one: Target, tmp_path: Path, tensors: Any, said: str
):
    write_checkpoint(tmp_path, config_for(one.engine), tensors=tensors)
    with pytest.raises(ModelError, match=said):
        MlxNetwork(tmp_path, one.engine.model)


def test_a_type_that_is_not_known_is_refused(one: Target, tmp_path: Path):
    import mlx.core as mx

    write_checkpoint(tmp_path, config_for(one.engine))
    path = tmp_path / "model.safetensors"
    weights = dict(mx.load(str(path)))
    mx.save_safetensors(str(path), {**weights, "fc.weight": mx.zeros((64, 128), mx.int32)})
    with pytest.raises(ModelError, match=r"fc\.weight is int32, expected bfloat16, float16 or"):
        MlxNetwork(tmp_path, one.engine.model)


@pytest.mark.parametrize("end", [0, 4, 100, -1])
def test_a_file_that_is_cut_short_is_refused(one: Target, tmp_path: Path, end: int):
    write_checkpoint(tmp_path, config_for(one.engine))
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:end])
    with pytest.raises(ModelError, match=r"model\.safetensors cannot be read") as refused:
        MlxNetwork(tmp_path, one.engine.model)
    assert "\n" not in str(refused.value)


def test_names_may_begin_with_model_and_weights_lie_in_several_files(one: Target, tmp_path: Path):
    config = config_for(one.engine)
    write_checkpoint(tmp_path / "one", config)
    write_checkpoint(tmp_path / "other", config, prefix="model.", files=3)
    said = []
    for name in ("one", "other"):
        assert read_config(tmp_path / name) == config
        network = MlxNetwork(tmp_path / name, one.engine.model)
        said.append([list(each) for each in network.draft(network.new_cache(), 3, 0, [], 0)])
    assert said[0] == said[1]


@pytest.mark.parametrize("family", ["phi3", "llama", "lfm2"])
@pytest.mark.parametrize("bits", BITS, ids=str)
def test_the_head_for_some_tokens_is_that_part_of_it(family: str, bits: int | None, tmp_path: Path):
    import mlx.core as mx

    from paceline.engines.mlx.model import LoadedModel, load

    folder = mlx.checkpoint(tmp_path / "made", family, num_hidden_layers=2)
    if bits is not None:
        folder = mlx.quantized(folder, tmp_path / "small", bits=bits)
    model = LoadedModel(load(folder))
    hidden = mx.random.normal((5, 64))
    tokens = mx.array([3, 77, 159])
    found = model.head_of(tokens)(hidden)
    assert mx.allclose(found, model.head(hidden)[:, tokens], rtol=1e-5, atol=1e-5)
    assert model.head(hidden).shape == (5, mlx.VOCAB)  # which is as it was
