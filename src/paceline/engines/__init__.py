"""Engines run the target model: one folder per runtime. `open_engine` opens one by name."""

from pathlib import Path

from paceline.engines.base import Engine, EngineSettings
from paceline.errors import InvalidRequest

ENGINES = ("openvino", "llamacpp", "coreml", "mlx")

__all__ = ["ENGINES", "Engine", "EngineSettings", "check_settings", "open_engine"]


def check_settings(name: str, settings: EngineSettings) -> None:
    """Raise InvalidRequest for a setting that the engine `name` does not have."""
    if settings.compute_units is not None and name != "coreml":
        raise InvalidRequest(
            f"compute_units is {settings.compute_units!r}, and only the engine coreml has compute "
            f"units; leave it out, or use a Core ML model (this one is for {name})"
        )


def open_engine(name: str, path: Path, context_length: int, settings: EngineSettings) -> Engine:
    """Open the engine `name` with the model in `path`: a graph, a GGUF file, or else a folder.

    Raises:
        InvalidRequest: no engine has that name, or a setting is out of range.
        ModelError: the engine cannot run this model.
        MissingExtra: its packages are not installed.

    """
    check_settings(name, settings)
    if name == "openvino":
        from paceline.engines.openvino import OpenVinoEngine

        return OpenVinoEngine(path, context_length, settings)
    if name == "llamacpp":
        from paceline.engines.llamacpp.engine import LlamaCppEngine

        return LlamaCppEngine(path, context_length, settings)
    if name == "coreml":
        from paceline.engines.coreml.engine import CoreMlEngine
        from paceline.engines.coreml.packages import DEFAULT_UNITS

        return CoreMlEngine(path, settings, units=settings.compute_units or DEFAULT_UNITS)
    if name == "mlx":
        from paceline.engines.mlx.engine import MlxEngine

        return MlxEngine(path, context_length, settings)
    raise InvalidRequest(f"no engine is called {name!r}; expected {', '.join(ENGINES)}")
