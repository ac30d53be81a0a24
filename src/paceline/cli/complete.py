"""Values for shell completion; typer selects those with the typed prefix. Nothing is downloaded."""

from collections.abc import Iterable

from paceline import plugins


def models() -> Iterable[str]:
    from paceline.models import list_models  # late, as its package imports numpy

    return (model.name for model in list_models())


def installed() -> Iterable[str]:
    from paceline.models import list_drafters, list_models

    return (one.name for one in (*list_models(), *list_drafters()) if one.here)


def drafters(incomplete: str) -> Iterable[str]:
    """Return the values that may follow the last + of a drafter."""
    from paceline.drafters import drafter_names

    before, plus, _ = incomplete.rpartition("+")
    return (f"{before}{plus}{name}" for name in drafter_names())


def engines() -> Iterable[str]:
    return ("auto", "llamacpp", *plugins.names(plugins.ENGINES))
