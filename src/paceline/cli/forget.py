"""`paceline forget`: removes the answers that were kept to draft later ones, and typed messages."""

from pathlib import Path
from typing import Annotated

from typer import Option

from paceline.cli.console import print_value
from paceline.cli.options import Output, command, group
from paceline.errors import InvalidRequest, PacelineError

app = group()


@command(app, examples=("paceline forget --dry-run", "paceline forget"))
def forget(
    *,
    model: Annotated[
        str | None,
        Option("-m", "--model", help="only answers of this model, as `paceline models` names it"),
    ] = None,
    dry_run: Annotated[bool, Option("--dry-run", help="list them, and remove nothing")] = False,
    output: Output,
) -> int:
    """Remove what --keep has kept.

    Answers of `generate`, `chat` and `serve`; without --model also messages that were typed in a
    chat.
    """
    from paceline.cli.chat.history import history_file
    from paceline.runtime.kept import all_kept
    from paceline.runtime.kept import forget as remove
    from paceline.storage.files import megabytes

    models = all_kept()
    chosen = [kept for kept in models if model in (None, kept.model)]
    if model is not None and not chosen:
        names = ", ".join(kept.model for kept in models if kept.model) or "none of any model"
        raise InvalidRequest(f"no answers of {model} are kept; here are {names}")
    for kept in chosen if not dry_run else ():
        try:
            remove(kept)
        except OSError as error:
            raise PacelineError(f"cannot remove {kept.folder}: {error.strerror}") from error
    typed = history_file() if model is None else None
    history = None if typed is None or not typed.is_file() else typed.stat().st_size
    if typed is not None and history is not None and not dry_run:
        _remove(typed)
    value = [
        {"model": kept.model, "folder": str(kept.folder), "bytes": kept.bytes} for kept in chosen
    ]
    done = "kept" if dry_run else "removed"
    lines = [
        f"{done}: answers of {kept.model or f'an unknown model, in {kept.folder}'}, "
        f"{megabytes(kept.bytes)}"
        for kept in chosen
    ]
    if history is not None:
        lines.append(f"{done}: messages typed in chat, {megabytes(history)}")
    values = {done: value, "history_bytes": history or 0}
    print_value(output, values, "\n".join(lines) or "no answers are kept")
    return 0


def _remove(path: Path) -> None:
    try:
        path.unlink()
    except OSError as error:
        raise PacelineError(f"cannot remove {path}: {error.strerror}") from error
