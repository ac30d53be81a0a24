"""Which engine `--engine auto` takes for a GGUF file."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.decoding.costs import CostTable
from paceline.engines.llamacpp import libraries
from paceline.errors import InvalidRequest, MissingExtra
from paceline.runtime import engine_choice
from paceline.runtime.engine_choice import LLAMACPP, OPENVINO, Costs, EngineChoice
from paceline.runtime.load import load
from support.tiny_checkpoints import write_gguf_of

DEARER = CostTable({1: 0.015, 16: 0.015})
"""A call costs the same for one row and for sixteen."""
CHEAPER = CostTable({1: 0.01, 16: 0.16})

pytest.importorskip("ik_llama_cpp")


def chosen(path: Path, folder: Path, contexts: int = 1) -> tuple[str, str]:
    choice = EngineChoice(folder, contexts=contexts)
    return choice(str(path), path), choice.reason


def remember(path: Path, folder: Path, **costs: Costs) -> None:
    choice = EngineChoice(folder)
    choice(str(path), path)
    for engine, cost in costs.items():
        choice.remember(engine, cost)


def test_single_answers_get_the_engine_that_starts_sooner(tiny_gguf: Path, tmp_path: Path) -> None:
    assert chosen(tiny_gguf, tmp_path) == (
        LLAMACPP,
        "it starts sooner, and needs no more memory than the file",
    )


def test_a_server_gets_the_engine_that_batches(tiny_gguf: Path, tmp_path: Path) -> None:
    assert chosen(tiny_gguf, tmp_path, contexts=4) == (
        OPENVINO,
        "its calls have rows of many answers",
    )


def test_a_server_without_the_memory_gets_the_other(
    tiny_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_choice, "fits", lambda _bytes: False)
    engine, reason = chosen(tiny_gguf, tmp_path, contexts=4)
    assert engine == LLAMACPP
    assert "more memory" in reason


def test_measured_costs_decide(tiny_gguf: Path, tmp_path: Path) -> None:
    """At equal starts further rows that cost nothing win; a slow start loses an answer's time."""
    remember(
        tiny_gguf, tmp_path, openvino=Costs(0.1, DEARER, True), llamacpp=Costs(0.1, CHEAPER, False)
    )
    engine, reason = chosen(tiny_gguf, tmp_path)
    assert engine == OPENVINO
    assert reason.startswith("measured: openvino ")
    remember(tiny_gguf, tmp_path, openvino=Costs(20.0, DEARER, True))
    assert chosen(tiny_gguf, tmp_path)[0] == LLAMACPP
    assert chosen(tiny_gguf, tmp_path, contexts=4)[0] == OPENVINO, "a server starts once"


def test_seconds_of_an_answer() -> None:
    """Half of the texts gain nothing by drafts, and 500 tokens are 500 calls at the least."""
    plain = CostTable({1: 0.01})
    assert Costs(2.0, plain, False).seconds(500) == pytest.approx(2.0 + 500 * 0.01)
    assert Costs(0.0, CostTable({1: 0.01, 8: 0.01}), True).served_seconds() == pytest.approx(
        0.01 / 8
    )
    assert Costs(0.0, CostTable({1: 0.01, 8: 0.01}), False).served_seconds() == 0.01


def test_a_family_that_was_not_compared_gets_openvino(tmp_path: Path) -> None:
    path = write_gguf_of("minicpm", tmp_path / "other.gguf")
    engine, reason = chosen(path, tmp_path / "measured")
    assert engine == OPENVINO
    assert "the family 'minicpm'; expected one of gemma, " in reason


def test_without_a_library_it_is_openvino(
    tiny_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing() -> Iterator[None]:
        raise MissingExtra("no library here")
        yield

    monkeypatch.setattr(libraries, "installed", missing)
    assert chosen(tiny_gguf, tmp_path) == (OPENVINO, "no library here")


def test_damaged_records_are_measured_again(tiny_gguf: Path, tmp_path: Path) -> None:
    remember(
        tiny_gguf, tmp_path, openvino=Costs(0.1, DEARER, True), llamacpp=Costs(0.1, CHEAPER, False)
    )
    for path in tmp_path.iterdir():
        path.write_bytes(b"{")
    assert chosen(tiny_gguf, tmp_path)[0] == LLAMACPP


def test_drafters_that_read_hidden_states_get_openvino(tiny_gguf: Path, tmp_path: Path) -> None:
    choice = EngineChoice(tmp_path, hidden_states=True)
    assert choice(str(tiny_gguf), tiny_gguf) == OPENVINO


def test_an_unknown_engine_is_refused(tiny_gguf: Path, cache: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"'vulkan'"):
        load(tiny_gguf, engine="vulkan")
