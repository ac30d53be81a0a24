"""Engines run the target model: one folder per runtime. `open_engine` opens one by name.

Other packages add engines by entry point (`paceline.plugins`).
"""

from dataclasses import replace
from pathlib import Path

from paceline import plugins
from paceline.engines.base import Engine, EngineSettings
from paceline.errors import InvalidRequest
from paceline.storage.processes import use_native_threads
from paceline.storage.shards import shards_beside

ENGINES = ("llamacpp",)
"""Names of the engines in this folder."""

__all__ = ["ENGINES", "Engine", "EngineSettings", "check_engine", "check_settings", "open_engine"]


def check_engine(name: str) -> None:
    """Raise InvalidRequest unless an engine has this name, MissingExtra without its packages."""
    if name in ENGINES:
        return
    if name not in (others := plugins.names(plugins.ENGINES)):
        raise InvalidRequest(
            f"no engine is called {name!r}; expected auto, {', '.join((*ENGINES, *others))}"
        )
    plugins.load(plugins.ENGINES, name)


def check_settings(name: str, settings: EngineSettings) -> None:
    """Raise InvalidRequest for a setting that the engine `name` does not have."""
    if settings.compute_units is not None and name != "coreml":
        raise InvalidRequest(
            f"compute_units is {settings.compute_units!r}, and only the engine coreml has compute "
            f"units; leave it out, or use a Core ML model (this one is for {name})"
        )
    if settings.kv is not None and name != "llamacpp":
        raise InvalidRequest(
            f"kv is {settings.kv!r}, and only the engine llamacpp has keys and values in another "
            f"type; leave it out, or use a GGUF file (this model is for {name})"
        )


def open_engine(name: str, path: Path, context_length: int, settings: EngineSettings) -> Engine:
    """Open the engine `name` with the model in `path`: a graph, a GGUF file, or else a folder.

    Raises:
        InvalidRequest: no engine has that name, or a setting is out of range.
        ModelError: the engine cannot run this model.
        MissingExtra: its packages are not installed.
        PluginError: another package's engine cannot be imported.
        PacelineError: this is a forked child of a process that has opened one.

    """
    check_engine(name)
    check_settings(name, settings)
    use_native_threads()
    if name == "llamacpp":
        from paceline.engines.llamacpp.engine import LlamaCppEngine

        if len(shards_beside(path)) > 1:  # files of that size leave no room for a packed copy
            settings = replace(settings, packed=None)
        return LlamaCppEngine(path, context_length, settings)
    engine: Engine = plugins.load(plugins.ENGINES, name)(path, context_length, settings)
    return engine
