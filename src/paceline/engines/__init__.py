"""Engines run the target model: one folder per runtime. `open_engine` opens one by name.

Other packages add engines by entry point (`paceline.plugins`).
"""

from dataclasses import replace
from pathlib import Path

from paceline import plugins
from paceline.engines.base import Engine, EngineSettings
from paceline.errors import InvalidRequest
from paceline.storage.shards import shards_beside
from paceline.system.processes import use_native_threads

ENGINES = ("llamacpp",)
"""Names of the engines in this folder."""

_OF_ONE_ENGINE = {
    "compute_units": ("coreml", "a Core ML model"),
    "device": ("llamacpp", "a GGUF file"),
    "kv_cache_type": ("llamacpp", "a GGUF file"),
}
"""Setting -> the engine that has it, and the engine's models."""


def check_engine(name: str) -> None:
    """Raise InvalidRequest for an unknown engine, MissingExtra if its packages are missing."""
    if name in ENGINES:
        return
    if name not in (others := plugins.names(plugins.ENGINES)):
        raise InvalidRequest(
            f"unknown engine {name!r}; expected auto, {', '.join((*ENGINES, *others))}"
        )
    plugins.load(plugins.ENGINES, name)


def check_settings(name: str, settings: EngineSettings) -> None:
    """Raise InvalidRequest for a setting that the engine `name` does not have."""
    for setting, (engine, models) in _OF_ONE_ENGINE.items():
        value = getattr(settings, setting)
        if value not in (None, "auto") and name != engine:
            raise InvalidRequest(
                f"{setting} is {value!r}, and only the engine {engine} has that setting; remove "
                f"it, or use {models} (this model runs with {name})"
            )


def open_engine(name: str, path: Path, context_length: int, settings: EngineSettings) -> Engine:
    """Open the engine `name` with the model in `path`: a graph, a GGUF file, or a folder.

    Raises:
        InvalidRequest: the engine is unknown, or a setting is out of range.
        ModelError: the engine cannot run this model.
        MissingExtra: its packages are not installed.
        PluginError: another package's engine cannot be imported.
        PacelineError: this is a forked child of a process that has opened one.

    """
    check_engine(name)
    check_settings(name, settings)
    use_native_threads()
    if name == "llamacpp":
        from paceline.engines.llamacpp.engine import open_llamacpp

        if len(shards_beside(path)) > 1:  # files of that size leave no room for a packed copy
            settings = replace(settings, packed=None)
        return open_llamacpp(path, context_length, settings)
    engine: Engine = plugins.load(plugins.ENGINES, name)(path, context_length, settings)
    return engine
