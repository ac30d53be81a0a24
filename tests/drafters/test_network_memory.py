"""Calls of a network have few shapes, and padding changes no draft: memory stays flat."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from paceline.drafters.mtp import OpenVinoHead, openvino_head, read_head
from paceline.drafters.mtp.head import Rows
from paceline.drafters.networks.context import PREFILL_CHUNK
from paceline.drafters.networks.padding import padded_size
from paceline.models import ModelFiles
from support.dflash import tiny_config, write_checkpoint
from support.errors import raises
from support.mtp import HeadForm, write_head
from support.tiny import write_tiny

OWN = HeadForm(own=True, taps=(1,), kv_heads=1, rotary=0.5)
MOST_GROWTH_MB = 20
"""Of 200 numbers of rows; 100 and more without padding, 60 of DFlash."""

HEAD = """
from paceline.drafters.mtp import OpenVinoHead, read_head
from paceline.drafters.mtp.head import Rows

head = OpenVinoHead(read_head(Path(sys.argv[1]), lambda: 2), Path(sys.argv[2]))

def run(count):
    rows = np.zeros((count, head.config.tapped_size), np.float32)
    head.draft(head.new_cache(), Rows(rows, [0] * count, 0), 2, 0.0)
"""
DFLASH = """
from paceline.drafters.dflash import OpenVinoNetwork

network = OpenVinoNetwork(Path(sys.argv[1]), Path(sys.argv[2]))

def run(count):
    rows = np.zeros((count, network.config.tapped_size), np.float32)
    network.draft(network.new_cache(), 5, count, rows, 0)
"""
IMPORTS = """
import random, resource, sys
from pathlib import Path
import numpy as np
"""
GROWTH = """
def peak():
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20

for power in range(10):
    run(2**power)
before = peak()
for count in random.Random(1).sample(range(1, 513), 200):
    run(count)
print(peak() - before)
"""


@pytest.fixture(scope="module")
def head_files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A random head, and its target."""
    folder = tmp_path_factory.mktemp("head")
    write_head(folder, OWN)
    return folder, write_tiny(folder / "target.gguf")


@pytest.fixture(scope="module")
def dflash_files(
    tiny_files: ModelFiles, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path]:
    """A random DFlash drafter, and its target."""
    folder = tmp_path_factory.mktemp("dflash")
    write_checkpoint(folder, tiny_config(tiny_files))
    return folder, tiny_files.path


@pytest.mark.parametrize(("files", "code"), [("head_files", HEAD), ("dflash_files", DFLASH)])
def test_memory_does_not_grow_with_the_numbers_of_rows(
    files: str, code: str, request: pytest.FixtureRequest
):
    pytest.importorskip("resource", reason="Windows does not say the peak of memory so")
    script = IMPORTS + code + GROWTH
    command = [sys.executable, "-c", script, *map(str, request.getfixturevalue(files))]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    assert float(process.stdout) < MOST_GROWTH_MB, "MB more after 200 prompts of different lengths"


def test_sizes_are_few_and_never_too_small():
    sizes = [padded_size(rows) for rows in range(1, PREFILL_CHUNK + 1)]
    assert all(size >= rows for rows, size in enumerate(sizes, 1))
    assert sizes[:8] == list(range(1, 9))
    assert max(sizes) == PREFILL_CHUNK
    assert len(set(sizes)) == 20


def test_padding_changes_no_draft(head_files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch):
    folder, target = head_files
    head = OpenVinoHead(read_head(folder, lambda: 2), target, int8=False)
    drawn = np.random.default_rng(3)
    rows = drawn.normal(size=(400, head.config.tapped_size)).astype(np.float32)
    tokens = drawn.integers(0, 320, 400).tolist()

    def drafted() -> list[tuple[list[int], list[float]]]:
        cache, results = head.new_cache(), []
        # Each part writes over the padding of the one before.
        for start, end in ((0, 9), (9, 42), (42, 45), (45, 300), (300, 317), (317, 400)):
            part = Rows(rows[start:end], tokens[start:end], start)
            results.append(head.draft(cache, part, 4, 0.0))
        return results

    padded = drafted()
    monkeypatch.setattr(openvino_head, "padded_size", lambda rows: rows)
    for (drafts, chances), (plain, plainly) in zip(padded, drafted(), strict=True):
        assert drafts == plain
        np.testing.assert_allclose(chances, plainly, rtol=1e-4)


def test_fewer_hidden_states_than_tokens_are_refused(head_files: tuple[Path, Path]):
    folder, target = head_files
    head = OpenVinoHead(read_head(folder, lambda: 2), target)
    short = Rows(np.zeros((8, head.config.tapped_size), np.float32), [0] * 10, 0)
    with raises(ValueError, "8 hidden states"):
        head.draft(head.new_cache(), short, 1, 0.0)
