"""The rows that a model's forward passes may have, for one sequence and for several.

They are measured of models whose kernels differ.
"""

import io
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.decoding.types import Block
from paceline.engines import EngineSettings
from paceline.engines.exact import BLOCK_LENGTH, measure_invariance
from paceline.engines.rows import RowRange
from paceline_mlx.engine import MlxEngine
from paceline_mlx.hooks import install_hook
from paceline_mlx.kv_sequence import MlxSequence
from paceline_mlx.model import LoadedModel, load
from paceline_mlx.probe import choose_rows, choose_together
from paceline_mlx.rows import ALONE, TOTALS, Budget, agree, shares, used
from support import mlx
from support.mlx_rows import TEXT, step

pytestmark = pytest.mark.mlx


def test_every_pass_allowed_by_the_rules_gives_identical_attention():
    seen = {
        (1, 0): [b"a"],
        (2, 0): [b"A", b"b"],
        (4, 0): [b"A", b"b", b"c", b"d"],
        (8, 0): [b"A", b"b", b"c", b"D", b"e", b"f", b"g", b"h"],
        (4, 3): [b"d", b"e", b"f", b"g"],
    }
    ranges = [(1, 1), (1, 2), (2, 4), (2, 8), (8, 8)]
    assert [agree(mlx.rules(*rows), seen) for rows in ranges] == [True, False, True, False, True]
    # Of a call across a threshold, rows are read up to it if the rest is padding.
    assert [used(mlx.rules(2, 8), count, 1021) for count in (1, 2, 3, 8)] == [0, 1, 0, 0]
    crossing = {(8, 1018): [b"a"] * 8, (2, 1021): [b"b", b"c"]}
    assert agree(mlx.rules(2, 8), crossing), "no block leads to the first"


@pytest.mark.parametrize("rows", [RowRange(1, 32), RowRange(2, 4), RowRange(2, 2)])
def test_each_sequence_has_valid_rows_in_a_batch(rows: RowRange):
    for total in range(2, 33):
        if counts := shares(rows, total):
            assert sum(counts) == total
            assert len(counts) > 1
            assert all(rows.min_rows <= count <= rows.max_rows for count in counts)
    assert shares(RowRange(8, 8), 14) == []


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    return mlx.checkpoint(tmp_path_factory.mktemp("mlx") / "llama", "llama", head_dim=16, **sizes)


Off = Callable[[int, int], Any]
"""(rows of a pass, slots before them) -> error of each row's logits."""


def with_kernels(folder: Path, off: Off, *, in_head: bool = False) -> LoadedModel:
    """A model whose rows depend on how they are computed, as `off` says, or those of its head."""
    import mlx.core as mx

    module = load(folder)
    head = getattr(module, "lm_head", None) or module.model.norm

    def hook(call: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        held = 0 if in_head else kwargs["cache"][0].offset
        return call(*args, **kwargs) + mx.array(np.float32(off(args[0].shape[1], held)))

    install_hook(head if in_head else module, hook)
    return LoadedModel(module)


@pytest.fixture
def engine_of(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., MlxEngine]:
    def engine_of(model: LoadedModel, **options: Any) -> MlxEngine:
        monkeypatch.setattr("paceline_mlx.engine.LoadedModel", lambda *_: model)
        return MlxEngine(folder, mlx.CONTEXT, EngineSettings(cache_tokens=2048), **options)

    return engine_of


@pytest.mark.parametrize(
    ("off", "expected"),
    [
        (lambda rows, held: 0.01 * (rows > 4), RowRange(1, 4)),
        (lambda rows, held: 0.01 * (rows == 1) + 0.02 * (rows > 8), RowRange(2, 8)),
        (lambda rows, held: 0.01 * rows, RowRange(8, 8)),
        # By its place in the call.
        (lambda rows, held: 0.01 * np.arange(rows)[:, None], None),
        # One row alone, behind thousands of slots.
        (lambda rows, held: 0.01 * (held > 4096 and rows == 1), RowRange(2, 8)),
    ],
    ids=["above 4", "one, above 8", "all", "place", "far"],
)
def test_the_cheapest_consistent_row_range_is_chosen(
    folder: Path, off: Off, expected: RowRange | None, request: pytest.FixtureRequest
):
    # Thousands of slots are read only where kernels of long contexts differ.
    context = 8192 if request.node.callspec.id == "far" else 512
    rules = choose_rows(with_kernels(folder, off), context, Budget())
    assert (rules and rules.decode) == expected


def test_a_short_context_is_probed_to_its_end(folder: Path):
    def far(rows: int, held: int) -> float:
        return 0.01 * (held > 4096 and rows == 1)

    for context in (4000, 16):
        rules = choose_rows(with_kernels(folder, far), context, Budget())
        assert rules is not None and rules.decode == (1, 32)


def test_rows_run_alone_if_no_row_count_is_bit_identical(folder: Path, engine_of: Any):
    engine = engine_of(with_kernels(folder, lambda rows, held: 0.01 * np.arange(rows)[:, None]))
    # With fewer than two rows at least, no answer is said to be exact; and drafts change none.
    assert (engine.rules, engine.min_rows) == (ALONE, 1)
    assert measure_invariance(engine)[BLOCK_LENGTH].holds


# -- whose kernels differ between a prompt and an answer -------------------------------------------


@pytest.fixture
def two_kernels(folder: Path, engine_of: Any) -> MlxEngine:
    """Keys and values of passes with more than eight rows differ slightly, as on a GPU."""
    import mlx.core as mx

    model = LoadedModel(load(folder))

    def hook(call: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        return call(*args, **kwargs) * mx.array(np.float32(1.001 if args[0].shape[-1] > 8 else 1))

    install_hook(model.module.model.embed_tokens, hook)
    engine: MlxEngine = engine_of(model)
    assert (engine.rules.decode, engine.min_rows) == ((1, 8), 2)
    return engine


def read(engine: MlxEngine, sequence: Any, prompt: Sequence[int]) -> None:
    engine.step([(sequence, Block(prompt, 0, prefill=True))])
    sequence.commit(len(prompt))


def decoded(engine: MlxEngine, sequence: Any, tokens: Sequence[int]) -> np.ndarray:
    for at in range(0, len(tokens), 4):
        part = tokens[at : at + 4]
        logits = engine.step([(sequence, Block(part, 1))]).logits[0].copy()
        sequence.commit(len(part))
    return logits


def test_a_failed_forward_pass_is_repeated_in_the_same_role(two_kernels: MlxEngine):
    text = np.random.default_rng(1).integers(0, mlx.VOCAB, 60).tolist()
    with closing(two_kernels.open()) as one, closing(two_kernels.open()) as other:
        for item in (one, other):
            read(two_kernels, item, text[:25])
            decoded(two_kernels, item, text[25:])
        other.forget()  # as after a call that failed
        rows = [decoded(two_kernels, entry, [5, 6, 7]) for entry in (one, other)]
    assert rows[0].tobytes() == rows[1].tobytes()


CONTEXTS = (3, 17, 24)


@contextmanager
def sequences(engine: MlxEngine, contexts: Sequence[int] = CONTEXTS) -> Iterator[list[MlxSequence]]:
    with ExitStack() as stack:
        opened = [stack.enter_context(closing(engine.open())) for _ in contexts]
        for number, (sequence, length) in enumerate(zip(opened, contexts, strict=True)):
            engine.step([(sequence, Block(text(number)[:length], 0, prefill=True))])
            sequence.commit(length)
        yield opened


def text(number: int) -> list[int]:
    return [(token + 3 * number) % mlx.VOCAB for token in TEXT]


def blocks(opened: Sequence[MlxSequence], counts: Sequence[int]) -> list[Block]:
    return [
        Block(text(number)[sequence.length :][:count], count)
        for number, (sequence, count) in enumerate(zip(opened, counts, strict=True))
    ]


@pytest.fixture
def together(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    made: list[list[int]] = []
    original = LoadedModel.call_together

    def counting(self: LoadedModel, parts: Any, **options: Any) -> Any:
        if len(parts) > 1:
            made.append([len(tokens) for _, tokens in parts])
        return original(self, parts, **options)

    monkeypatch.setattr(LoadedModel, "call_together", counting)
    return made


@pytest.mark.parametrize("rows", [(1, 32), (2, 4)], ids=str)
@pytest.mark.parametrize("family", mlx.FAMILIES)
def test_batched_rows_and_taps_match_each_sequence_alone(
    family: str, rows: tuple[int, int], opened: mlx.Opened, together: list[list[int]]
):
    engine = opened(family, mlx.rules(*rows, together=16), taps=(0,))
    with sequences(engine) as alone, sequences(engine) as several:
        for counts, kept in ([(1, 4, 3), (1, 2, 0)], [(7, 1, 2), (3, 1, 2)], [(1, 1, 1)] * 2):
            results = [
                engine.step([(sequence, block)])
                for sequence, block in zip(alone, blocks(alone, counts), strict=True)
            ]
            together.clear()
            work = list(zip(several, blocks(several, counts), strict=True))
            result = engine.step(work)
            assert together[0] == [min(count, rows[1]) for count in counts]
            for number, expected in enumerate(results):
                assert result.logits[number].tobytes() == expected.logits[0].tobytes()
                taps = result.taps[number]["tap.0"], expected.taps[0]["tap.0"]
                assert taps[0].tobytes() == taps[1].tobytes()
            for sequence, count in zip([*alone, *several], [*kept, *kept], strict=True):
                sequence.commit(count)


def test_matmuls_run_once_for_all_sequences(checkpoint_of: mlx.Checkpoints):
    import mlx.core as mx

    for family, per_sequence in (("llama", 2 * 2), ("lfm2", 2)):
        model = LoadedModel(load(checkpoint_of(family)))

        def products(count: int, model: LoadedModel = model) -> int:
            states = [model.empty() for _ in range(count)]
            calls = model.call_together([(state, TEXT[:3]) for state in states])
            graph = io.StringIO()
            arrays = [state.arrays() for state in states]
            mx.export_to_dot(graph, *[called.logits for called in calls], *flat(arrays))
            return len(re.findall('"Matmul"', graph.getvalue()))

        # Two of each attention, of keys and of values, have no weights.
        assert products(3) - products(1) == 2 * per_sequence


def flat(value: Any) -> list[Any]:
    import mlx.core as mx
    from mlx.utils import tree_flatten

    return [item for _, item in tree_flatten(value) if isinstance(item, mx.array)]


def test_long_blocks_are_split_into_passes_of_the_measured_rows(
    opened: mlx.Opened, together: list[list[int]]
):
    engine = opened("llama", rules=mlx.rules(2, 4, together=9))
    with sequences(engine, (5, 9, 2, 12)) as several:
        engine.step(list(zip(several, blocks(several, (1, 6, 4, 4)), strict=True)))
    assert together == [[1, 4], [4, 4]]  # and the last two rows of the second sequence alone


def test_without_a_measured_limit_each_sequence_runs_alone(
    opened: mlx.Opened, together: list[list[int]]
):
    engine = opened("llama", rules=mlx.rules(1, 8))
    assert engine.rules.together == 1
    with sequences(engine) as several:
        engine.step(list(zip(several, blocks(several, (1, 1, 1)), strict=True)))
    assert not together


# -- the measurement -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "off", "expected"),
    [
        (RowRange(1, 32), lambda rows, held: 0, 32),
        (RowRange(2, 4), lambda rows, held: 0.01 * (rows > 13), 12),
        (RowRange(8, 8), lambda rows, held: 0.01 * (rows > 8), 1),
    ],
)
def test_the_largest_bit_identical_batch_is_chosen(
    rows: RowRange, off: Off, expected: int, folder: Path
):
    model = with_kernels(folder, off, in_head=True)
    assert choose_together(model, rows, mlx.CONTEXT, Budget()) == expected
    assert expected in (1, *TOTALS)


def test_a_model_that_reads_its_caches_elsewhere_runs_one_sequence_per_pass(
    folder: Path, engine_of: Any
):
    engine = engine_of(with_kernels(folder, lambda rows, held: 0.01 * held))
    assert engine.rules.together == 1
    with sequences(engine) as several:
        result = engine.step(list(zip(several, blocks(several, (1, 2, 3)), strict=True)))
        for number, sequence in enumerate(several):
            block = blocks(several, (1, 2, 3))[number]
            assert result.logits[number].tobytes() == step(engine, sequence, block.tokens).tobytes()


GEMMA_4 = {
    "model_type": "gemma4_text",
    **{"hidden_size": 64, "intermediate_size": 96, "vocab_size": mlx.VOCAB, "rms_norm_eps": 1e-5},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "global_head_dim": 32},
    **{"num_hidden_layers": 4, "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8},
    **{"vocab_size_per_layer_input": mlx.VOCAB, "max_position_embeddings": mlx.CONTEXT},
    **{"sliding_window": 24, "layer_types": ["sliding_attention", "full_attention"] * 2},
    "attention_k_eq_v": False,
}
"""Its last layers have no cache, and get keys and values of layers before."""


def test_a_family_with_shared_kv_layers_runs_in_batches():
    import mlx.core as mx
    from mlx_lm.models import gemma4_text

    mx.random.seed(0)
    model = LoadedModel(gemma4_text.Model(gemma4_text.ModelArgs.from_dict(GEMMA_4)))
    assert choose_together(model, RowRange(1, 8), mlx.CONTEXT, Budget()) == 32
