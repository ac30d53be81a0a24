from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.engines import EngineSettings
from paceline.engines.rows import RowRules
from support import mlx
from support.packages import missing

# They read files, or simulate a GPU.
WITHOUT_MLX = {"test_mlx_dispatch.py", "test_mlx_load.py"}
collect_ignore = [
    path.name
    for path in Path(__file__).parent.glob("test_*.py")
    if missing("mlx") and path.name not in WITHOUT_MLX
]


@pytest.fixture(scope="module")
def checkpoint_of(tmp_path_factory: pytest.TempPathFactory) -> mlx.Checkpoints:
    known: dict[str, Path] = {}

    def checkpoint_of(family: str, **changes: Any) -> Path:
        key = f"{family} {changes}"
        if key not in known:
            folder = tmp_path_factory.mktemp(family)
            known[key] = mlx.checkpoint(folder / "checkpoint", family, **changes)
        return known[key]

    return checkpoint_of


@pytest.fixture(scope="module")
def opened(checkpoint_of: mlx.Checkpoints) -> mlx.Opened:
    from paceline_mlx.engine import MlxEngine

    any_rows = mlx.rules(1, 32)

    def opened(
        family: str, rules: RowRules | None = any_rows, taps: tuple[int, ...] = ()
    ) -> MlxEngine:
        settings = EngineSettings(cache_tokens=2048, taps=taps)
        return MlxEngine(checkpoint_of(family), mlx.CONTEXT, settings, rules=rules)

    return opened


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, int]]:
    """Numbers of model calls and of waits for the device."""
    import mlx.core as mx

    from paceline_mlx.model import LoadedModel

    counted = {"model": 0, "waits": 0}
    call, evaluate = LoadedModel.call, mx.eval

    def counting_call(*args: Any, **kwargs: Any) -> Any:
        counted["model"] += 1
        return call(*args, **kwargs)

    def counting_eval(*args: Any) -> None:
        counted["waits"] += 1
        evaluate(*args)

    monkeypatch.setattr(LoadedModel, "call", counting_call)
    monkeypatch.setattr(mx, "eval", counting_eval)
    yield counted
