"""`paceline forget`: removes the answers that were kept to draft later ones."""

from typing import Annotated

from typer import Option

from paceline.cli.console import print_value
from paceline.cli.options import Output, command, group
from paceline.errors import InvalidRequest, PacelineError

app = group()


@command(app)
def forget(
    *,
    model: Annotated[
        str | None, Option(help="only those of this model, as `paceline models` names it")
    ] = None,
    dry_run: Annotated[bool, Option("--dry-run", help="list them, and remove nothing")] = False,
    output: Output,
) -> int:
    """Remove the answers that `generate`, `chat` and `serve` have kept with --keep."""
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
    value = [
        {"model": kept.model, "folder": str(kept.folder), "bytes": kept.bytes} for kept in chosen
    ]
    done = "kept" if dry_run else "removed"
    lines = [
        f"{done}: answers of {kept.model or f'an unknown model, in {kept.folder}'}, "
        f"{megabytes(kept.bytes)}"
        for kept in chosen
    ]
    print_value(output, {done: value}, "\n".join(lines) or "no answers are kept")
    return 0
