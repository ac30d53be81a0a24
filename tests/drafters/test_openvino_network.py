"""DFlash in OpenVINO: 8 bits, the target's weights, cost, and the cache."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
from gguf import GGUFReader
from gguf.quants import dequantize

from paceline.drafters.dflash import Config, HostKV, OpenVinoNetwork
from paceline.drafters.dflash.network import measure_cost
from paceline.drafters.networks.context import ContextCache
from paceline.drafters.networks.target import check_pair, read_target
from paceline.errors import ModelError
from paceline.models import ModelFiles
from support.dflash import ends_of, random_weights, tiny_config, write_checkpoint
from support.errors import raises
from support.networks import FIRST_TOKENS, Case, assert_close, prefilled, without_prefill


def test_int8_drafts_are_close_to_the_reference(form: Case):
    rows = form.tapped(100)
    small = OpenVinoNetwork(form.folder, form.files.path)
    drafts = [prefilled(small, rows, token) for token in FIRST_TOKENS]
    assert_close(drafts, [form.expected(rows, token) for token in FIRST_TOKENS])
    assert drafts[0] != prefilled(form.network, rows, FIRST_TOKENS[0]), "nothing was rounded"


def test_int8_handles_rows_of_zeros_and_tiny_values(tiny_files: ModelFiles, tmp_path: Path):
    config = tiny_config(tiny_files)
    name = "layers.0.mlp.down_proj.weight"
    down = random_weights(config)[name]
    down[:5], down[5:9] = 0, 1e-30
    weights = write_checkpoint(tmp_path, config, tensors={name: down})
    case = Case(config, tmp_path, tiny_files, ends_of(tiny_files), weights)
    rows, small = case.tapped(10), OpenVinoNetwork(case.folder, case.files.path)
    drafts = [without_prefill(small, rows, token) for token in FIRST_TOKENS]
    assert_close(drafts, [case.expected(rows, token) for token in FIRST_TOKENS])


def test_embeddings_and_head_equal_the_targets(tiny_gguf: Path, tiny_files: ModelFiles):
    tensors = {tensor.name: tensor for tensor in GGUFReader(tiny_gguf).tensors}
    for item, name in zip(ends_of(tiny_files), ("token_embd.weight", "output.weight"), strict=True):
        stored = dequantize(tensors[name].data, tensors[name].tensor_type)
        step = np.abs(stored).max(axis=1, keepdims=True) / 127
        assert np.all(np.abs(item - stored) <= 0.51 * step)


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
def test_cost_is_measured_at_the_longest_context_in_attention(
    window: int | None, layers: tuple[int | None, ...], most: int | None
):
    """A network that records the context length of every draft."""

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


def test_a_cache_is_truncated_by_position():
    context = ContextCache(HostKV(1, 1, 2))
    context.positions += [4, 5, 6, 10, 11, 12]
    assert len(context) == 6
    context.truncate(11)
    assert context.positions == [4, 5, 6, 10]
    context.truncate(7)
    context.truncate(7)
    assert context.positions == [4, 5, 6]


def test_pending_hidden_states_are_truncated_too():
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


@pytest.fixture
def config(tiny_files: ModelFiles) -> Config:
    return tiny_config(tiny_files)


def test_a_drafter_for_this_target_is_accepted(config: Config, tiny_files: ModelFiles):
    check_pair(Path("any"), config, read_target(tiny_files.path))


def test_a_target_has_layers_hidden_size_and_vocabulary(tiny_files: ModelFiles):
    target = read_target(tiny_files.path)
    assert (target.layers, target.hidden_size, target.vocab_size) == (2, 64, 320)


def test_an_invalid_graph_is_rejected(tmp_path: Path):
    (tmp_path / "openvino_model.xml").write_text("<net></net>")
    with raises(ModelError, tmp_path / "openvino_model.xml", lines=5):  # OpenVINO says its own
        read_target(tmp_path / "openvino_model.xml")
