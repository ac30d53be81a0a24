"""The table of row rules, with a line per type of weights, keys and device."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type

from paceline.engines.llamacpp.binding import Device, Heads, Offload
from paceline.engines.llamacpp.rules import fewer_kernels, ik_key_limits, table_rules
from paceline.engines.rows import RowRange, RowRules
from paceline.storage.gguf_file import GgufFile, read_gguf
from support.tiny import write_tiny

IK, UPSTREAM = "ik_llama.cpp", "llama.cpp"
CARD = Device("CUDA0", "a card", 1 << 33, 0)


@pytest.fixture(scope="module")
def content(tmp_path_factory: pytest.TempPathFactory) -> GgufFile:
    return read_gguf(write_tiny(tmp_path_factory.mktemp("rules") / "m.gguf", weights=Type.Q8_0))


def with_weights(content: GgufFile, kind: Type, *, width: int = 256, experts: int = 0) -> GgufFile:
    """The same file with another matrix."""
    shape = (experts, 256, width) if experts else (256, width)
    data = np.empty(0, np.uint8)
    matrix = content.tensors[0]._replace(name="m", kind=int(kind), shape=shape, data=data)
    return replace(content, tensors=[*content.tensors, matrix])


def rules(library: str, content: GgufFile, threads: int = 1, **about: Any) -> RowRules:
    model = {"packed": False, "quantized": False, "offload": None, "span": 0, "heads": Heads(3, 3)}
    binding = SimpleNamespace(name=library)
    return table_rules(SimpleNamespace(binding=binding, **model | about), content, threads, 2048)


@pytest.mark.parametrize(
    ("library", "kind", "decode", "prefill", "single"),
    [
        (UPSTREAM, Type.Q8_0, (2, 16), (2, 256), True),
        (UPSTREAM, Type.F16, (2, 16), (2, 256), False),
        (UPSTREAM, Type.Q4_K, (2, 7), (8, 256), True),
        (UPSTREAM, Type.IQ3_S, (2, 7), (8, 256), True),
        (IK, Type.Q4_K, (2, 16), (32, 256), True),
        (IK, Type.Q6_K, (2, 16), (64, 256), True),
    ],
)
def test_row_rules_follow_the_weight_types(
    content: GgufFile, library: str, kind: Type, decode: Any, prefill: Any, single: bool
):
    found = rules(library, with_weights(content, kind))
    assert (found.decode, found.prefill, found.single) == (decode, prefill, single)


def test_prefill_uses_the_decode_rules_if_it_cannot_have_its_own(content: GgufFile):
    experts = with_weights(content, Type.Q4_K, experts=4)  # which get any number of a call's rows
    assert rules(UPSTREAM, experts)[:2] == ((2, 7), (2, 7))
    assert rules(IK, with_weights(content, Type.Q4_1, width=576))[:2] == ((2, 16), (2, 16))
    assert rules(IK, content, span=256, heads=None)[:3] == ((2, 16), (2, 16), False)  # a window
    assert rules(IK, content, span=256, packed=True)[:2] == ((2, 16), (2, 256))


def test_a_device_follows_the_rules_of_its_kernels(content: GgufFile):
    def on(device: Device, **about: Any) -> RowRules:
        return rules(UPSTREAM, content, offload=Offload(device, 3, True, 512), **about)

    assert on(CARD) == RowRules(RowRange(3, 4), RowRange(128, 128))
    assert on(CARD, heads=Heads(4, 2)).decode == (2, 4)
    assert on(CARD, heads=Heads(4, 2), quantized=True).decode == (3, 4)
    assert on(CARD._replace(about="llvmpipe"))[:2] == ((3, 4), (3, 4))


@pytest.mark.parametrize(
    ("heads", "threads", "rows", "single"),
    [((3, 3), 2, 6, True), ((3, 3), 1, 3, True), ((8, 4), 8, 3, False), ((9, 1), 8, 7, True)],
)
def test_ik_llama_cpp_reads_q8_0_keys_directly_for_few_rows(
    content: GgufFile, heads: tuple[int, int], threads: int, rows: int, single: bool
):
    """Otherwise their bits depend on the rows of a call; 286 of 384 differed of a real model."""
    limits = ik_key_limits(Heads(*heads), threads)
    assert (limits.decode, limits.single, limits.prompt) == (rows, single, 8)


def test_rules_that_fail_are_replaced_by_ones_with_fewer_kernels():
    first = RowRules(RowRange(2, 16), RowRange(32, 256), single=True, together=32)
    steps = [
        (step.decode, step.prefill, step.single, step.together) for step in fewer_kernels(first)
    ]
    assert steps == [
        ((2, 16), (32, 256), True, 32),
        ((2, 16), (32, 256), True, 1),
        ((2, 16), (32, 256), False, 1),
        ((1, 1), (32, 256), False, 1),
        ((1, 1), (1, 1), False, 1),
    ]
