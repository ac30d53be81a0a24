"""The `coreml` engine: Core ML programs, on the Apple Neural Engine or in the emulator."""

from pathlib import Path

from paceline.engines.base import Engine, EngineSettings


def open_engine(path: Path, context_length: int, settings: EngineSettings) -> Engine:
    """Open the artifact in the folder `path`, which has its own context length.

    Raises:
        ModelError: the artifact is corrupt or a token classifier, or a shard cannot be loaded.
        InvalidRequest: a setting is out of range.
    """
    from paceline_coreml.engine.engine import CoreMlEngine
    from paceline_coreml.engine.packages import DEFAULT_UNITS

    del context_length
    return CoreMlEngine(path, settings, units=settings.compute_units or DEFAULT_UNITS)
