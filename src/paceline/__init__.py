"""A local runtime for language models whose speculative decoding never changes a token.

>>> import paceline
>>> model = paceline.load("smollm2-135m")                        # doctest: +SKIP
>>> model.generate("What is a paceline?", max_tokens=64).text    # doctest: +SKIP
"""

import os

TYPE_CHECKING = False  # typing takes half of the time before Ctrl-C is handled

# Nothing is reported to anyone, whatever is imported after this (docs/privacy.md).
# huggingface_hub would ask for a list of agents to say which one runs, and report its transfers.
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")

__version__ = "0.1.0"

__all__ = [
    "AsyncStream",
    "Conversation",
    "Decision",
    "Decisions",
    "Model",
    "Options",
    "Result",
    "Stats",
    "Stream",
    "load",
]

if TYPE_CHECKING:
    from typing import Any

    from paceline.options import Options
    from paceline.runtime.conversation import Conversation
    from paceline.runtime.decisions import Decision, Decisions
    from paceline.runtime.load import load
    from paceline.runtime.model import Model
    from paceline.runtime.result import Result, Stats
    from paceline.runtime.stream import AsyncStream, Stream

_MODULES = {
    "Model": "paceline.runtime.model",
    "load": "paceline.runtime.load",
    **dict.fromkeys(("Result", "Stats"), "paceline.runtime.result"),
    "Conversation": "paceline.runtime.conversation",
    **dict.fromkeys(("Decision", "Decisions"), "paceline.runtime.decisions"),
    "Options": "paceline.options",
    **dict.fromkeys(("AsyncStream", "Stream"), "paceline.runtime.stream"),
}


def __getattr__(name: str) -> "Any":
    """Import a public name when it is first used, so that `paceline --help` does not wait."""
    if name not in _MODULES:
        raise AttributeError(f"module 'paceline' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return [*__all__, *(name for name in globals() if name.startswith("__"))]
