"""The engine on Core ML, as far as coremltools' own Python code can tell: see `fake_mac.py`."""

import shutil
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from paceline.decoding.types import Block
from paceline.engines import EngineSettings, open_engine
from paceline.errors import ModelError
from paceline.system.processes import Finished
from paceline_coreml.engine import failures
from paceline_coreml.engine.engine import CoreMlEngine
from paceline_coreml.engine.failures import Mac, reason_of, this_mac
from support.errors import raises
from support.fake_mac import COMPILE, LOAD, PREDICT, REASON, STATE, FakeMac, mac

pytestmark = pytest.mark.coreml

__all__ = ["mac"]


TEXT = [5, 9, 2, 41, 17, 3]


def opened(folder: Path) -> CoreMlEngine:
    engine = open_engine("coreml", folder, 192, EngineSettings())
    assert isinstance(engine, CoreMlEngine)
    return engine


def rows(engine: CoreMlEngine, text: Sequence[int] = TEXT) -> bytes:
    """Logits of a text, in two blocks."""
    with closing(engine.open()) as sequence:
        first = engine.step([(sequence, Block(text[:-1], 1))]).logits[0].tobytes()
        sequence.commit(len(text) - 1)
        return first + engine.step([(sequence, Block(text[-1:], 1))]).logits[0].tobytes()


def test_core_ml_rows_match_the_emulator(
    artifact: Path, mac: FakeMac, monkeypatch: pytest.MonkeyPatch
):
    with_core_ml = rows(opened(artifact))
    assert {*mac.calls} == {COMPILE, LOAD, STATE, PREDICT}
    assert {*mac.units} == {"CPU_AND_NE"}
    for module in ("engine", "packages"):
        monkeypatch.setattr(f"paceline_coreml.engine.{module}.on_a_mac", lambda: False)
    assert with_core_ml == rows(opened(artifact))


def test_each_failing_core_ml_call_is_a_one_line_error(artifact: Path, mac: FakeMac):
    expected = rows(opened(artifact))
    shutil.rmtree(artifact / "compiled")
    calls, mac.calls = mac.calls, []
    for number, kind in enumerate(calls):
        mac.again()
        # A kept model that does not load is compiled again, so what loads then may not either.
        mac.fails = lambda call, number=number: call >= number
        with raises(ModelError, REASON.rstrip("."), ".mlpackage", "macOS 26.1", "--engine"):
            rows(opened(artifact))
        assert mac.calls[number] == kind
        mac.again()
        assert rows(opened(artifact)) == expected
        shutil.rmtree(artifact / "compiled")


def test_a_coremltools_error_is_a_one_line_error(artifact: Path, mac: FakeMac):
    package = opened(artifact)._decode[0].packages.heads[0]
    hidden = np.zeros((1, 64, 4, 1), np.float32)
    assert set(package.predict({"hidden": hidden})) == {"logits"}
    hidden.flags.writeable = False
    with raises(ModelError, "head-000000-000080.mlpackage", "not convertible"):
        package.predict({"hidden": hidden})
    with raises(ModelError, "head-000000-000080.mlpackage", "stream is not an input"):
        package.predict({"stream": np.zeros((1, 64, 4, 1), np.float32)})


def test_the_macos_version_is_read_from_the_system(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(failures.platform, "mac_ver", lambda: ("26.1", ("", "", ""), "arm64"))
    monkeypatch.setattr(failures, "run_child", lambda _: Finished(0, ("25B78", "")))
    assert this_mac() == Mac("26.1", "25B78")
    monkeypatch.setattr(failures, "run_child", lambda _: Finished(1, ("no such command",)))
    assert this_mac() == Mac("26.1", "26.1")


def test_macos_without_state_support_is_rejected_before_compilation(artifact: Path, mac: FakeMac):
    mac.system = mac.system._replace(version="14.7.1")
    with raises(ModelError, "14.7.1", "macOS 15"):
        opened(artifact)
    assert mac.calls == []


def test_error_reasons_are_one_line():
    errors = {
        "": "ValueError",
        "std::bad_cast": "std::bad_cast",
        "a\n  b": "a b",
        '{\n NSLocalizedDescription = "It said \\"no\\".";\n}': 'It said \\"no\\".',
        "{\n NSLocalizedDescription = Unknown;\n NSOther = x;\n}": "Unknown",
    }
    assert {text: reason_of(ValueError(text)) for text in errors} == errors
    assert len(reason_of(ValueError("word " * 1000))) < 400
