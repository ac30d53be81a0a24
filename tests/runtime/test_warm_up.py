"""Packing of weights while a model is loaded."""

from io import StringIO
from pathlib import Path

from paceline.models import Progress
from paceline.runtime.drafting import warmed_up
from support.toy import ToyEngine


def test_weights_are_packed_while_loading():
    engine, said = ToyEngine(), StringIO()
    engine.warm_rows = (2, 8)
    slots = engine.free_slots
    warmed_up(engine, Progress(said))
    assert engine.steps == 2
    assert "packing weights" in said.getvalue()
    assert engine.free_slots == slots, "no slot is held"


def test_an_engine_without_slow_first_calls_is_not_called(cache: Path):
    engine, said = ToyEngine(), StringIO()
    assert warmed_up(engine, Progress(said)) is engine
    assert (engine.steps, said.getvalue()) == (0, "")
