"""Who verifies: one folder per runtime. `open_engine` opens one by name."""

from pathlib import Path

from paceline.engines.base import Engine, EngineSettings
from paceline.errors import InvalidRequest

ENGINES = ("openvino", "coreml", "mlx")

__all__ = ["ENGINES", "Engine", "EngineSettings", "open_engine"]


def open_engine(name: str, path: Path, context_length: int, settings: EngineSettings) -> Engine:
    """The engine `name` with the model in `path`: an OpenVINO graph, or the folder of another.

    Raises:
        InvalidRequest: no engine has that name, or a setting is out of range.
        ModelError: the engine cannot run this model.
        MissingExtra: it needs packages that are not installed.

    """
    if name == "openvino":
        from paceline.engines.openvino import OpenVinoEngine

        return OpenVinoEngine(path, context_length, settings)
    if name == "coreml":
        from paceline.engines.coreml.engine import CoreMlEngine

        return CoreMlEngine(path, settings)
    if name == "mlx":
        from paceline.engines.mlx.engine import MlxEngine

        return MlxEngine(path, context_length, settings)
    raise InvalidRequest(f"no engine is called {name!r}; expected {', '.join(ENGINES)}")
