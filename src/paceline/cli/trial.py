"""The notice before the default model is fetched: it is a trial, and which one is for real work."""

from paceline.cli.options import MODEL_VARIABLE

_SHARE = 3
"""1 / this of memory is what the weights of a suggested model take at most."""


def trial_notice(name: str) -> str | None:
    """Two lines for the first use of the default model; None: it is another, or is here already."""
    from paceline.models import DEFAULT_MODEL, cache_dir, list_models
    from paceline.storage.files import megabytes
    from paceline.storage.system import memory_bytes

    if name != DEFAULT_MODEL or any((cache_dir() / "models").glob(f"{DEFAULT_MODEL}*")):
        return None
    notice = f"{name} is a small model to try paceline with."
    models = [model for model in list_models() if model.to_fetch * _SHARE <= memory_bytes()]
    best = max(models, key=lambda model: model.to_fetch, default=None)
    if best is None or best.name == name:
        return notice
    return (
        f"{notice} A better one that fits this memory is {best.name}: `paceline pull {best.name}` "
        f"({megabytes(best.to_fetch)}), then -m {best.name} or {MODEL_VARIABLE}={best.name}."
    )
