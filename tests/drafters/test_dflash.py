import json
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest

from paceline.decoding.types import ComputedBlock, Proposal
from paceline.drafters import DrafterResources, DrafterSpec, DraftKV, RequestContext, create, taps
from paceline.drafters.dflash import (
    Config,
    ContextCache,
    DFlashDrafter,
    HostKV,
    OpenVinoNetwork,
    read_config,
)
from paceline.drafters.dflash.checkpoint import read_draft_vocab, read_weights
from paceline.drafters.dflash.network import DraftCost, measure_cost
from paceline.drafters.dflash.target_weights import check_pair, read_target
from paceline.errors import InvalidRequest, ModelError
from paceline.models import ModelFiles
from support.dflash import (
    LEFT_OUT,
    MASK,
    Drafted,
    config_json,
    ends_of,
    parts,
    random_weights,
    stored_ends,
    tiny_config,
    write_checkpoint,
    write_config,
)
from support.dflash_forms import (
    FIRST_TOKENS,
    FORMS,
    WAYS,
    Stored,
    as_features,
    assert_close,
    assert_same,
    read_at_once,
    seen,
)


class Case(Stored):
    """With its target for OpenVINO."""

    @cached_property
    def network(self) -> OpenVinoNetwork:
        return self.opened(int8=False)

    def opened(self, **options: Any) -> OpenVinoNetwork:
        return OpenVinoNetwork(self.folder, self.files.path, **options)


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


# -- what the network computes ---------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("length", [0, 1, 5, 100, 300])
def test_a_block_says_what_the_paper_says(form: Case, length: int, way: Callable[..., Any]):
    rows = form.features(length)
    found = [way(form.network, rows, token) for token in FIRST_TOKENS]
    assert_same(found, [form.expected(rows, token) for token in FIRST_TOKENS])


def test_the_reference_depends_on_all_that_it_is_given(form: Case):
    # Without this, a network that ignores its context would pass the test above.
    rows = form.features(30)
    said = form.expected(rows, 3)
    near = [rows + np.eye(30)[at][:, None] for at in (0, 15, 29)]
    others = [
        form.expected(rows, 4),
        form.expected(rows, 3, 31),
        form.expected(rows[::-1], 3),
        *(form.expected(changed, 3) for changed in near if None in form.config.windows),
    ]
    assert len({token for first in FIRST_TOKENS for token in form.expected(rows, first).tokens}) > 2
    for other in others:
        assert not np.allclose(other.hidden, said.hidden, rtol=1e-3)


def test_a_window_hides_what_lies_further_back(make_case: MakeCase):
    case = make_case({"windows": (20, 20)})
    rows = case.features(60)
    # The first row of a block at 60 sees from 41 on.
    changed = rows.copy()
    changed[:41] += 1
    same = [read_at_once(case.network, each, 3) for each in (rows, changed)]
    assert same[0] == same[1]
    changed[:42] += 1
    assert read_at_once(case.network, changed, 3) != same[0]


def test_only_tokens_of_a_reduced_vocabulary_are_drafted(make_case: MakeCase):
    case = make_case({}, [4, 9, 200])
    drafts = [as_features(case.network, case.features(5), token)[0] for token in FIRST_TOKENS]
    assert {token for each in drafts for token in each} <= {4, 9, 200}


def test_what_was_cut_is_forgotten_and_other_rows_take_its_place(form: Case):
    kept, dropped, others = form.features(60, 1), form.features(45, 2), form.features(290, 3)
    network, context = form.network, form.network.new_cache()
    network.prefill(context, np.concatenate([kept, dropped[:40]]), 0)
    network.draft(context, 5, 105, dropped[40:], 100)
    context.truncate(60)
    assert len(context) == 60
    network.prefill(context, others[:284], 60)
    found = [network.draft(context, 5, 350, others[284:], 344)]
    found += [network.draft(context, token, 350, others[:0], 350) for token in FIRST_TOKENS]
    rows = np.concatenate([kept, others])
    assert_same(found, [form.expected(rows, token) for token in (5, *FIRST_TOKENS)])


def test_rows_may_be_cut_again_and_again(case: Case):
    rows = case.features(300)
    network, context = case.network, case.network.new_cache()
    for end in (300, 256, 255, 30, 0):
        context.truncate(end)
        network.prefill(context, rows[len(context) : end], len(context))
        found = [network.draft(context, token, end, rows[:0], end) for token in FIRST_TOKENS]
        assert_same(found, [case.expected(rows[:end], token) for token in FIRST_TOKENS])


def test_rows_stand_at_their_positions_whatever_lies_between(form: Case):
    rows = form.features(30)
    positions = [*range(10, 25), *range(90, 105)]
    network, context = form.network, form.network.new_cache()
    network.prefill(context, rows[:15], 10)
    found = [network.draft(context, 3, 105, rows[15:], 90)]
    found += [network.draft(context, token, 105, rows[:0], 105) for token in FIRST_TOKENS]
    expected = [
        form.expected(rows, token, 105, positions=positions) for token in (3, *FIRST_TOKENS)
    ]
    assert_same(found, expected)


@pytest.mark.parametrize("window", [1, 7, 64, 256, 300])
@pytest.mark.parametrize("layers", [(None, None), (20, None)], ids=str)
def test_with_the_option_window_only_the_last_rows_are_looked_at(
    make_case: MakeCase, layers: tuple[int | None, ...], window: int
):
    case = make_case({"windows": layers})
    network = case.opened(window=window, int8=False)
    rows = case.features(280)
    last = list(range(280))[-window:]
    found = [read_at_once(network, rows, token) for token in FIRST_TOKENS]
    expected = [case.expected(rows[last], token, 280, positions=last) for token in FIRST_TOKENS]
    assert_same(found, expected)


def test_with_the_option_window_new_rows_count_as_well(case: Case):
    network = case.opened(window=10, int8=False)
    rows = case.features(40)
    context = network.new_cache()
    network.prefill(context, rows[:35], 0)
    found = network.draft(context, 3, 40, rows[35:], 35)
    assert_same([found], [case.expected(rows[30:], 3, 40, positions=range(30, 40))])


def test_the_answer_does_not_depend_on_what_else_was_asked(case: Case):
    rows = case.features(40)
    network, first, second = case.network, case.network.new_cache(), case.network.new_cache()
    network.prefill(first, rows[:20], 0)
    network.prefill(second, rows[20:], 0)
    found = [
        network.draft(context, token, 20, rows[:0], 20)
        for token in FIRST_TOKENS
        for context in (first, second)
    ]
    expected = [
        case.expected(part, token) for token in FIRST_TOKENS for part in (rows[:20], rows[20:])
    ]
    assert_same(found, expected)


def test_eight_bits_say_nearly_the_same(form: Case):
    rows = form.features(100)
    small = form.opened()
    found = [read_at_once(small, rows, token) for token in FIRST_TOKENS]
    assert_close(found, [form.expected(rows, token) for token in FIRST_TOKENS])
    assert found[0] != read_at_once(form.network, rows, FIRST_TOKENS[0]), "nothing was rounded"


def test_eight_bits_stand_rows_of_zeros_and_tiny_rows(tiny_files: ModelFiles, tmp_path: Path):
    config = tiny_config(tiny_files)
    name = "layers.0.mlp.down_proj.weight"
    down = random_weights(config)[name]
    down[:5], down[5:9] = 0, 1e-30
    weights = write_checkpoint(tmp_path, config, tensors={name: down})
    case = Case(config, tmp_path, tiny_files, ends_of(tiny_files), weights)
    rows, small = case.features(10), case.opened()
    found = [as_features(small, rows, token) for token in FIRST_TOKENS]
    assert_close(found, [case.expected(rows, token) for token in FIRST_TOKENS])


def test_embeddings_and_head_are_the_targets_own(tiny_gguf: Path, tiny_files: ModelFiles):
    for found, stored in zip(ends_of(tiny_files), stored_ends(tiny_gguf), strict=True):
        step = np.abs(stored).max(axis=1, keepdims=True) / 127
        assert np.all(np.abs(found - stored) <= 0.51 * step)


# -- what the drafter does -------------------------------------------------------------------------


def drafter_of(case: Case) -> DFlashDrafter:
    return DFlashDrafter(case.network, case.network.new_cache())


def assert_says(proposal: Proposal, expected: Drafted) -> None:
    assert_same([(proposal.tokens, proposal.probabilities)], [expected])
    assert (proposal.source, proposal.match) == ("dflash", 0)


def test_it_says_nothing_before_the_target_was_seen(case: Case):
    drafter = drafter_of(case)
    assert drafter.propose([1, 2, 3], 7) == Proposal((), "dflash")
    nothing = np.zeros((0, 320), np.float32)
    drafter.observe(ComputedBlock([1, 2, 3], 0, 3, nothing))
    assert not drafter.propose([1, 2, 3], 7).tokens, "an engine without taps"
    drafter.observe(seen(case.features(3), 0, kept=0))
    assert not drafter.propose([1, 2, 3], 7).tokens, "nothing was kept"


def test_it_drafts_a_block_from_what_it_saw(case: Case):
    drafter, rows = drafter_of(case), case.features(12)
    drafter.observe(seen(rows, 0))
    assert_says(drafter.propose([1] * 12 + [8], 7), case.expected(rows, 8))


def test_asked_twice_it_says_the_same(case: Case):
    drafter, rows = drafter_of(case), case.features(12)
    drafter.observe(seen(rows, 0))
    first = drafter.propose([1] * 12 + [8], 7)
    assert drafter.propose([1] * 12 + [8], 7) == first
    assert drafter.propose([1] * 12 + [8], 3) == first.cut(3)
    assert drafter.propose([1] * 12 + [8], 7) == first


@pytest.mark.parametrize("limit", [1, 2, 7, 8, 100])
def test_the_limit_is_obeyed(case: Case, limit: int):
    drafter = drafter_of(case)
    drafter.observe(seen(case.features(12), 0))
    proposal = drafter.propose([1] * 13, limit)
    assert (
        len(proposal.tokens)
        == len(proposal.probabilities)
        == min(limit, case.config.block_size - 1)
    )


def test_only_rows_that_were_kept_become_context(case: Case):
    drafter, rows = drafter_of(case), case.features(20)
    wrong = case.features(8, seed=9)
    drafter.observe(seen(rows[:12], 0))
    drafter.propose([1] * 13, 7)
    drafter.observe(seen(np.concatenate([rows[12:15], wrong]), 12, kept=3))
    drafter.observe(seen(np.concatenate([rows[15:], wrong]), 15, kept=5))
    assert_says(drafter.propose([1] * 20 + [8], 7), case.expected(rows, 8))


def test_it_need_not_be_asked_after_every_step(case: Case):
    drafter, rows = drafter_of(case), case.features(100)
    at = 0
    for count in (10, 1, 1, 30, 2, 1, 20, 35):
        drafter.observe(seen(rows[at : at + count], at))
        at += count
        if count == 30:
            drafter.propose([1] * (at + 1), 7)
    assert_says(drafter.propose([1] * 100 + [8], 7), case.expected(rows, 8))


def test_what_an_engine_shows_may_change_after_it_was_shown(case: Case):
    drafter, rows = drafter_of(case), case.features(12)
    shown = seen(rows.copy(), 0)
    drafter.observe(shown)
    for array in shown.taps.values():
        array[:] = np.nan
    assert_says(drafter.propose([1] * 12 + [8], 7), case.expected(rows, 8))


def test_a_long_prompt_is_read_as_it_comes(case: Case):
    context = case.network.new_cache()
    drafter, rows = DFlashDrafter(case.network, context), case.features(1000)
    for start, part in parts(rows, 250):
        drafter.observe(seen(part, start))
        assert sum(map(len, context.pending)) <= 750
    assert len(context) >= 750
    assert_says(drafter.propose([1] * 1000 + [8], 7), case.expected(rows, 8))


def test_a_prompt_whose_beginning_was_cached_elsewhere_is_no_trouble(case: Case):
    drafter, rows = drafter_of(case), case.features(12)
    drafter.observe(seen(rows, 40))
    expected = case.expected(rows, 8, 52, positions=range(40, 52))
    assert_says(drafter.propose([1] * 52 + [8], 7), expected)


@pytest.mark.parametrize("asked", [False, True])
def test_a_gap_between_what_it_saw_is_no_trouble(case: Case, asked: bool):
    drafter, rows = drafter_of(case), case.features(20)
    drafter.observe(seen(rows[:12], 0))
    if asked:
        drafter.propose([1] * 13, 7)
    drafter.observe(seen(rows[12:], 60))
    positions = [*range(12), *range(60, 68)]
    expected = case.expected(rows, 8, 68, positions=positions)
    assert_says(drafter.propose([1] * 68 + [8], 7), expected)


def test_it_says_what_a_block_takes(case: Case):
    cost = case.network.cost
    assert drafter_of(case).cost(1) == drafter_of(case).cost(15) == cost.base > 0
    assert cost.per_token >= 0
    assert cost.max_context is None


def test_what_a_block_takes_goes_by_the_context(case: Case, monkeypatch: pytest.MonkeyPatch):
    drafter, rows = drafter_of(case), case.features(30)
    monkeypatch.setattr(case.network, "cost", DraftCost(0.5, 0.01, max_context=25))
    drafter.observe(seen(rows[:20], 0))
    assert drafter.cost(7) == pytest.approx(0.7)
    drafter.propose([1] * 21, 7)
    drafter.observe(seen(rows[20:22], 20))
    assert drafter.cost(7) == pytest.approx(0.72)
    drafter.observe(seen(rows[22:], 22))
    assert drafter.cost(7) == pytest.approx(0.75)


@pytest.mark.parametrize(
    ("window", "layers", "most"),
    [
        (None, (None, None), None),
        (None, (16, None), None),
        (None, (16, 16), 16),
        (300, (None, None), 300),
        (300, (16, None), 300),
        (8, (16, 16), 8),
    ],
)
def test_a_block_is_timed_behind_as_much_as_is_looked_at(
    window: int | None, layers: tuple[int | None, ...], most: int | None
):
    """A network whose blocks look at what they look at, and whose clock is made up."""

    class Slow:
        config = SimpleNamespace(windows=layers)
        behind: ClassVar[list[int]] = []

        def new_cache(self) -> ContextCache[HostKV]:
            return ContextCache(HostKV(1, 1, 2))

        def prefill(self, context: ContextCache[HostKV], features: np.ndarray, start: int) -> None:
            context.positions += range(start, start + len(features))

        def draft(self, context: ContextCache[HostKV], *_: Any) -> tuple[list[int], list[float]]:
            self.behind.append(len(context))
            return [], []

    network: Any = Slow()
    cost = measure_cost(network, lambda rows: np.zeros((rows, 4)), window)
    assert cost.max_context == most
    assert set(network.behind) == {0, most or 2048}
    assert cost(10**6) == cost(most or 10**6) >= cost(0) > 0


def test_two_requests_do_not_disturb_each_other(case: Case):
    one, other = drafter_of(case), drafter_of(case)
    rows, others = case.features(12, 1), case.features(12, 2)
    one.observe(seen(rows, 0))
    other.observe(seen(others, 0))
    assert_says(one.propose([1] * 12 + [8], 7), case.expected(rows, 8))
    assert_says(other.propose([1] * 12 + [8], 7), case.expected(others, 8))


@pytest.mark.parametrize("cut", [30, 20, 12, 5, 0])
@pytest.mark.parametrize("asked", [False, True])
def test_the_next_turn_knows_what_the_last_one_saw_up_to_the_cut(case: Case, cut: int, asked: bool):
    shared, memory = DrafterResources(graph=case.files.path), DraftKV()
    spec = f"dflash:{case.folder},int8=0"
    rows, others = case.features(30, 1), case.features(25, 2)
    (first,) = create(spec, shared, RequestContext(memory))
    first.observe(seen(rows[:20], 0))
    if asked:
        first.propose([1] * 21, 7)
    first.observe(seen(rows[20:], 20))
    (context,) = memory.values()
    context.truncate(cut)
    (second,) = create(spec, shared, RequestContext(memory))
    if cut:
        known = second.propose([1] * cut + [8], 7)
        assert_says(known, case.expected(rows[:cut], 8))
    second.observe(seen(others, cut))
    both = np.concatenate([rows[:cut], others])
    assert_says(second.propose([1] * len(both) + [9], 7), case.expected(both, 9))


def test_without_memory_nothing_is_known_of_another_request(case: Case):
    shared = DrafterResources(graph=case.files.path)
    (first,) = create(f"dflash:{case.folder}", shared)
    first.observe(seen(case.features(20), 0))
    (second,) = create(f"dflash:{case.folder}", shared)
    assert not second.propose([1] * 21, 7).tokens


def test_a_context_says_how_much_it_knows():
    context = ContextCache(HostKV(1, 1, 2))
    context.positions += [4, 5, 6, 10, 11, 12]
    assert len(context) == 6
    context.truncate(11)
    assert context.positions == [4, 5, 6, 10]
    context.truncate(7)
    context.truncate(7)
    assert context.positions == [4, 5, 6]


def test_what_waits_is_cut_as_well():
    context = ContextCache(HostKV(1, 1, 2))
    context.positions += [0, 1]
    context.pending_start = 2
    context.pending = [np.full((count, 1), count) for count in (3, 1, 2)]
    context.truncate(7)
    assert [len(part) for part in context.pending] == [3, 1, 1]
    context.truncate(5)
    assert [len(part) for part in context.pending] == [3]
    context.truncate(3)
    assert [len(part) for part in context.pending] == [1]
    assert context.positions == [0, 1]
    context.truncate(1)
    assert (context.pending, context.positions) == ([], [0])


# -- a checkpoint that cannot be used --------------------------------------------------------------


@pytest.fixture
def config(tiny_files: ModelFiles) -> Config:
    return tiny_config(tiny_files)


@pytest.fixture
def checkpoint(config: Config, tmp_path: Path) -> Path:
    write_checkpoint(tmp_path, config)
    return tmp_path


def refusal(folder: Path, config: Config, **change: Any) -> str:
    """What is said of a config.json with these changes."""
    said = {**config_json(config), **change}
    write_config(folder, {name: value for name, value in said.items() if value is not LEFT_OUT})
    with pytest.raises(ModelError) as error:
        read_config(folder)
    return str(error.value)


def test_a_config_says_all_that_it_said(config: Config, tmp_path: Path):
    config = replace(config, num_hidden_layers=3, windows=(None, 7, 7), rms_norm_eps=0.01)
    write_checkpoint(tmp_path, config)
    assert read_config(tmp_path) == config


def test_what_a_config_may_leave_out(config: Config, tmp_path: Path):
    left_out = ("head_dim", "rms_norm_eps", "rope_theta", "layer_types", "hidden_act")
    write_checkpoint(tmp_path, config, change=dict.fromkeys(left_out, LEFT_OUT))
    expected = replace(config, rms_norm_eps=1e-6, rope_theta=10_000.0)
    assert read_config(tmp_path) == expected


COUNTS = [
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
    "block_size",
    "num_target_layers",
]


@pytest.mark.parametrize("name", COUNTS)
@pytest.mark.parametrize("value", [LEFT_OUT, None, "8", 1.5, 0, -1, True, [8]], ids=repr)
def test_a_count_that_is_none_is_named(config: Config, tmp_path: Path, name: str, value: Any):
    assert f"config.json: {name}: " in refusal(tmp_path, config, **{name: value})


@pytest.mark.parametrize("value", [LEFT_OUT, None, [], ["LlamaForCausalLM"]], ids=repr)
def test_another_architecture_is_refused(config: Config, tmp_path: Path, value: Any):
    assert "config.json: architectures" in refusal(tmp_path, config, architectures=value)


def test_all_faults_are_named_at_once(config: Config, tmp_path: Path):
    said = refusal(
        tmp_path,
        config,
        architectures=["Qwen3ForCausalLM"],
        hidden_size=LEFT_OUT,
        block_size=1,
        dflash_config={"target_layer_ids": [], "mask_token_id": None},
        rope_scaling={"rope_type": "yarn", "factor": 4.0},
        attention_bias=True,
        hidden_act="gelu",
    )
    for fault in (
        str(tmp_path / "config.json"),
        "'Qwen3ForCausalLM'",
        "hidden_size: ",
        "block_size: ",
        "dflash_config.target_layer_ids: ",
        "dflash_config.mask_token_id: ",
        "rope_scaling.rope_type: Input should be 'default', not 'yarn'",
        "attention_bias: ",
        "'gelu'",
    ):
        assert fault in said


def test_all_numbers_that_do_not_go_together_are_named_at_once(config: Config, tmp_path: Path):
    said = refusal(
        tmp_path,
        config,
        num_attention_heads=4,
        num_key_value_heads=3,
        dflash_config={"target_layer_ids": [0, 2], "mask_token_id": 320},
        layer_types=["sliding_attention"],
        sliding_window=None,
    )
    for fault in (
        "num_attention_heads is no multiple of num_key_value_heads",
        "layer 2 is tapped, the target has 2",
        "mask_token_id is 320, the vocabulary has 320 tokens",
        "layer_types has 1 entries, not 2",
        "sliding_window is None",
    ):
        assert fault in said


@pytest.mark.parametrize("value", [LEFT_OUT, None, "DFlash", []], ids=repr)
def test_a_config_without_its_own_part_is_refused(config: Config, tmp_path: Path, value: Any):
    assert "config.json: dflash_config: " in refusal(tmp_path, config, dflash_config=value)


@pytest.mark.parametrize("ids", [[-1], [0.5], 1, "01"], ids=repr)
def test_taps_that_are_no_layers_are_refused(config: Config, tmp_path: Path, ids: Any):
    own = {"target_layer_ids": ids, "mask_token_id": MASK}
    assert "dflash_config.target_layer_ids" in refusal(tmp_path, config, dflash_config=own)


def test_a_mask_below_the_vocabulary_is_refused(config: Config, tmp_path: Path):
    own = {"target_layer_ids": [0], "mask_token_id": -1}
    assert "dflash_config.mask_token_id: " in refusal(tmp_path, config, dflash_config=own)


@pytest.mark.parametrize("theta", ["10000", 0, -1.0, None, float("nan")], ids=repr)
def test_a_theta_that_is_no_number_is_refused(config: Config, tmp_path: Path, theta: Any):
    assert "config.json: rope_theta: " in refusal(tmp_path, config, rope_theta=theta)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_scaling": {"rope_type": "llama3"}},
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 10_000.0}},
        {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
        {"partial_rotary_factor": 0.5},
        {"rope_parameters": {"rope_theta": 0}},
    ],
    ids=repr,
)
def test_a_rope_that_is_not_known_is_refused(config: Config, tmp_path: Path, rope: Any):
    assert "rope" in refusal(tmp_path, config, **rope).lower()


def test_the_form_of_transformers_5_is_read(config: Config, tmp_path: Path):
    new = {"rope_type": "default", "rope_theta": 2000.0}
    change = {"rope_theta": LEFT_OUT, "rope_scaling": LEFT_OUT, "rope_parameters": new}
    write_checkpoint(tmp_path, config, change=change)
    assert read_config(tmp_path) == replace(config, rope_theta=2000.0)


def test_a_window_counts_only_for_layers_that_slide(config: Config, tmp_path: Path):
    write_checkpoint(tmp_path, config, change={"sliding_window": 5})
    assert read_config(tmp_path).windows == (None, None)
    kinds = ["full_attention", "sliding_attention"]
    write_checkpoint(tmp_path, config, change={"sliding_window": 5, "layer_types": kinds})
    assert read_config(tmp_path).windows == (None, 5)


@pytest.mark.parametrize("text", ["", "{", "[]", "5"])
def test_a_config_that_is_no_json_object_is_refused(tmp_path: Path, text: str):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelError, match=r"config\.json"):
        read_config(tmp_path)


def test_a_folder_without_a_config_is_refused(tmp_path: Path):
    with pytest.raises(ModelError, match=r"cannot read .*config\.json"):
        read_config(tmp_path / "nothing")


@pytest.mark.parametrize(
    "change",
    [
        {"dflash_config": {"target_layer_ids": ["1"], "mask_token_id": MASK}},
        {"dflash_config": {"target_layer_ids": [None], "mask_token_id": MASK}},
        {"dflash_config": {"target_layer_ids": [True], "mask_token_id": MASK}},
        {"dflash_config": {"target_layer_ids": [0], "mask_token_id": True}},
        {"architectures": 3},
        {"head_dim": "32"},
        {"head_dim": 31},
        {"head_dim": -2},
        {"head_dim": None, "num_attention_heads": 3, "num_key_value_heads": 3},
        {"rms_norm_eps": None},
        {"rms_norm_eps": "small"},
        {"rms_norm_eps": -1.0},
        {"layer_types": 2},
        {"layer_types": ["chunked_attention"] * 2},
        {"rope_parameters": [1]},
        {"rope_scaling": "yarn"},
        {"rope_theta": True},
    ],
    ids=json.dumps,
)
def test_other_entries_of_a_wrong_kind_are_refused(config: Config, tmp_path: Path, change: Any):
    said = refusal(tmp_path, config, **change)
    assert any(name in said for name in ("hidden_size", *change))


# -- weights that cannot be used -------------------------------------------------------------------


def assert_reads(folder: Path, config: Config, expected: dict[str, np.ndarray]) -> None:
    found = read_weights(folder, config)
    assert expected.keys() <= found.keys()
    for name, rows in expected.items():
        assert found[name].dtype == np.float32
        assert np.array_equal(found[name], rows), name


@pytest.mark.parametrize("kind", ["BF16", "F16", "F32"])
def test_weights_may_be_of_any_common_type(config: Config, tmp_path: Path, kind: str):
    expected = write_checkpoint(tmp_path, config, kind=kind)
    assert_reads(tmp_path, config, expected)


def test_names_may_begin_with_model(config: Config, tmp_path: Path):
    assert_reads(tmp_path, config, write_checkpoint(tmp_path, config, prefix="model."))


def test_weights_may_lie_in_several_files(config: Config, tmp_path: Path):
    assert_reads(tmp_path, config, write_checkpoint(tmp_path, config, files=3))


def test_tensors_that_are_not_needed_are_passed_over(config: Config, tmp_path: Path):
    more = {"embed_tokens.weight": np.ones((320, 64), np.float32)}
    expected = write_checkpoint(tmp_path, config, tensors=more)
    assert_reads(tmp_path, config, expected)


def test_all_tensors_that_are_wrong_are_named_at_once(config: Config, tmp_path: Path):
    endless = np.full((64,), np.inf, np.float32)
    write_checkpoint(
        tmp_path,
        config,
        tensors={
            "fc.weight": LEFT_OUT,
            "hidden_norm.weight": np.full((64,), np.nan, np.float32),
            "layers.0.input_layernorm.weight": endless,
            "layers.1.self_attn.q_proj.weight": np.ones((3, 64), np.float32),
            "layers.1.mlp.down_proj.weight": np.ones((192, 64), np.float32),
        },
    )
    with pytest.raises(ModelError) as error:
        read_weights(tmp_path, config)
    said = str(error.value)
    for fault in (
        str(tmp_path),
        "fc.weight is missing",
        "hidden_norm.weight has values that are not finite",
        "layers.0.input_layernorm.weight has values that are not finite",
        "layers.1.self_attn.q_proj.weight is [3, 64], expected [64, 64]",
        "layers.1.mlp.down_proj.weight is [192, 64], expected [64, 192]",
    ):
        assert fault in said
    assert "more" not in said


def test_of_many_wrong_tensors_some_are_named_and_the_rest_counted(config: Config, tmp_path: Path):
    write_checkpoint(tmp_path, config)
    deeper = replace(config, num_hidden_layers=4, windows=(None,) * 4)
    with pytest.raises(ModelError, match=r"layers\.2\..* is missing;.* and 17 more$"):
        read_weights(tmp_path, deeper)


def test_a_type_that_is_not_known_is_refused(config: Config, tmp_path: Path):
    write_checkpoint(tmp_path, config, kind="F64")
    with pytest.raises(ModelError, match=r"weight is F64, expected BF16, F16 or F32"):
        read_weights(tmp_path, config)


def test_a_folder_without_weights_is_refused(config: Config, tmp_path: Path):
    with pytest.raises(ModelError, match=r"has no \.safetensors file"):
        read_weights(tmp_path, config)


@pytest.mark.parametrize("end", [0, 4, 100, -1])
def test_a_file_that_is_cut_short_is_refused(checkpoint: Path, config: Config, end: int):
    path = checkpoint / "model.safetensors"
    path.write_bytes(path.read_bytes()[:end])
    with pytest.raises(ModelError, match=r"model\.safetensors cannot be read"):
        read_weights(checkpoint, config)


def test_a_file_of_something_else_is_refused(checkpoint: Path, config: Config):
    (checkpoint / "model.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(ModelError, match=r"model\.safetensors cannot be read"):
        read_weights(checkpoint, config)


# -- the tokens that are drafted -------------------------------------------------------------------


def vocab_refusal(folder: Path, config: Config, tokens: Any) -> str:
    np.save(folder / "draft_vocab.npy", np.array(tokens))
    with pytest.raises(ModelError) as error:
        read_draft_vocab(folder, config)
    return str(error.value)


def test_without_a_list_all_tokens_are_drafted(checkpoint: Path, config: Config):
    assert read_draft_vocab(checkpoint, config) is None


@pytest.mark.parametrize("kind", [np.uint16, np.uint32, np.int64])
def test_a_list_of_tokens_may_be_of_any_whole_type(config: Config, tmp_path: Path, kind: type):
    np.save(tmp_path / "draft_vocab.npy", np.array([0, 7, 319], kind))
    found = read_draft_vocab(tmp_path, config)
    assert found is not None
    assert found.dtype == np.int64
    assert found.tolist() == [0, 7, 319]


@pytest.mark.parametrize(
    "tokens", [[], [3, 3], [4, 2], [5, 320], [0.0, 1.0], [[1, 2]], 5, [True]], ids=repr
)
def test_a_list_that_is_none_of_tokens_is_refused(config: Config, tmp_path: Path, tokens: Any):
    said = vocab_refusal(tmp_path, config, tokens)
    assert "no ascending list of tokens below 320" in said
    assert "draft_vocab.npy" in said


@pytest.mark.parametrize("tokens", [[-3, 5], ["a", "b"]], ids=repr)
def test_a_list_of_what_can_be_no_tokens_is_refused(config: Config, tmp_path: Path, tokens: Any):
    assert "no ascending list" in vocab_refusal(tmp_path, config, tokens)


@pytest.mark.parametrize(
    "content",
    [
        b"no numbers",
        b"",
    ],
)
def test_a_list_that_is_no_array_is_refused(config: Config, tmp_path: Path, content: bytes):
    (tmp_path / "draft_vocab.npy").write_bytes(content)
    with pytest.raises(ModelError, match=r"draft_vocab\.npy cannot be read"):
        read_draft_vocab(tmp_path, config)


# -- a drafter for another target ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "faults"),
    [
        ({"hidden_size": 128}, ["its hidden size is 128, the target's 64"]),
        ({"num_target_layers": 30}, ["its number of target layers is 30, the target's 2"]),
        ({"vocab_size": 49152}, ["its vocabulary is 49152, the target's 320"]),
        (
            {"hidden_size": 576, "num_target_layers": 30, "vocab_size": 49152},
            ["hidden size is 576", "target layers is 30", "vocabulary is 49152"],
        ),
    ],
    ids=["width", "depth", "vocabulary", "all"],
)
def test_a_drafter_for_another_target_is_refused_before_its_weights_are_read(
    config: Config, tiny_files: ModelFiles, tmp_path: Path, changes: Any, faults: list[str]
):
    write_config(tmp_path, config_json(replace(config, **changes)))
    with pytest.raises(ModelError, match="is a drafter for another target") as error:
        OpenVinoNetwork(tmp_path, tiny_files.path)
    for fault in faults:
        assert fault in str(error.value)
    assert str(error.value).count(", the target's") == len(faults)


def test_a_drafter_for_this_target_is_not_refused(config: Config, tiny_files: ModelFiles):
    check_pair(Path("any"), config, read_target(tiny_files.path))


def test_a_target_says_what_it_is(tiny_files: ModelFiles):
    target = read_target(tiny_files.path)
    assert (target.layers, target.hidden_size, target.vocab_size) == (2, 64, 320)


def test_a_graph_that_is_none_is_refused(tmp_path: Path):
    (tmp_path / "openvino_model.xml").write_text("<net></net>")
    with pytest.raises(ModelError, match="cannot be read as an OpenVINO model"):
        read_target(tmp_path / "openvino_model.xml")


# -- specs -----------------------------------------------------------------------------------------


def test_a_spec_names_the_folder_and_options(case: Case):
    shared = DrafterResources(graph=case.files.path)
    rows = case.features(100)
    (drafter,) = create(f"dflash:{case.folder},window=64,int8=0", shared)
    assert isinstance(drafter, DFlashDrafter)
    for start, part in parts(rows, 50):
        drafter.observe(seen(part, start))
        drafter.propose([1] * (start + 50), 7)
    expected = case.expected(rows[36:], 8, 100, positions=range(36, 100))
    assert_says(drafter.propose([1] * 100 + [8], 7), expected)


def test_a_network_is_opened_once_for_all_requests_that_ask_alike(case: Case):
    shared = DrafterResources(graph=case.files.path)
    for spec in ("dflash:{}", "dflash:{},int8=0", "suffix+dflash:{}", "dflash:{}"):
        create(spec.format(case.folder), shared)
    assert len(shared.networks) == 2


def test_a_drafter_that_comes_with_the_target_need_not_be_named(case: Case):
    shared = DrafterResources(graph=case.files.path, shipped={"dflash": case.folder})
    for spec in ("dflash", "dflash:", "dflash:window=64", "dflash:int8=0,window=64"):
        assert [drafter.name for drafter in create(spec, shared)] == ["dflash"]
        assert taps(spec, shared) == (0, 1)


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ("dflash:x,window=0", "dflash has window=0; expected 1 or more"),
        ("dflash:x,window=-3", "dflash has window=-3"),
        ("dflash:x,window=all", "option window is 'all'; expected a number"),
        ("dflash:x,window", "option window is ''; expected a number"),
        ("dflash:x,int8=2", "dflash has int8=2; expected 1, or 0 for float32"),
        ("dflash:x,int8=yes", "option int8 is 'yes'"),
        ("dflash:x,block=4", "drafter dflash has no option 'block'; expected bits, int8, window"),
        ("dflash:x,bits=3", "dflash has bits=3; expected 4 or 8"),
        ("dflash:block=4", "drafter dflash has no option 'block'"),
        ("dflash:x,y", "drafter dflash has no option 'y'"),
        ("ngram+dflash:x,int8=2", "dflash has int8=2"),
    ],
)
def test_an_option_that_is_none_is_refused_before_anything_is_opened(spec: str, reason: str):
    for refuse in (DrafterSpec.parse, create, lambda spec: taps(spec, DrafterResources())):
        with pytest.raises(InvalidRequest) as error:
            refuse(spec)
        assert reason in str(error.value)


@pytest.mark.parametrize("spec", ["dflash", "dflash:", "dflash:window=64", "suffix+dflash"])
def test_where_none_comes_with_the_target_one_must_be_named(spec: str, tiny_files: ModelFiles):
    DrafterSpec.parse(spec)
    shared = DrafterResources(target="tiny", graph=tiny_files.path)
    for refuse in (create, taps):
        with pytest.raises(InvalidRequest, match=r"no dflash comes with tiny.*dflash:FOLDER"):
            refuse(spec, shared)


def test_bits_are_for_targets_that_mlx_runs(case: Case):
    with pytest.raises(InvalidRequest, match=r"bits=4, which is for targets of .* mlx; .*int8=1"):
        create(f"dflash:{case.folder},bits=4", DrafterResources(graph=case.files.path))


def test_a_target_that_mlx_runs_is_drafted_for_in_mlx(case: Case, tmp_path: Path):
    target: Any = object()  # is not asked for anything before the checkpoint was found
    shared = DrafterResources(mlx=target)
    with pytest.raises(InvalidRequest, match=r"int8, which is for drafting .*bits=8"):
        create(f"dflash:{case.folder},int8=1", shared)
    with pytest.raises(ModelError, match=r"cannot read .*config\.json"):
        create(f"dflash:{tmp_path},bits=4", shared)


def test_a_target_without_a_graph_cannot_have_one(checkpoint: Path):
    with pytest.raises(InvalidRequest, match="needs a target whose embeddings and head it can use"):
        create(f"dflash:{checkpoint}", DrafterResources())


def test_the_layers_to_tap_are_those_of_all_drafters(config: Config, tmp_path: Path):
    for name, ids in (("one", (3, 1)), ("other", (5, 3))):
        deep = replace(config, num_target_layers=6, target_layer_ids=ids)
        write_checkpoint(tmp_path / name, deep)
    one, other = f"dflash:{tmp_path / 'one'}", f"dflash:{tmp_path / 'other'},window=8"
    shared = DrafterResources()
    assert taps(one, shared) == (1, 3)
    assert taps(f"{other}+suffix", shared) == (3, 5)
    assert taps(f"{one}+ngram+{other}", shared) == (1, 3, 5)


@pytest.mark.parametrize("spec", ["none", "auto", "suffix", "ngram:max=2+recycle", "table:x"])
def test_other_drafters_need_no_taps(spec: str):
    assert taps(spec, DrafterResources()) == ()


def test_a_folder_that_is_no_checkpoint_is_named(tmp_path: Path, tiny_files: ModelFiles):
    shared = DrafterResources(graph=tiny_files.path)
    for refuse in (create, taps):
        with pytest.raises(ModelError, match=r"cannot read .*nothing.config\.json"):
            refuse(f"dflash:{tmp_path / 'nothing'}", shared)
