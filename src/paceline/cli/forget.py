"""`paceline forget`: removes what was kept and learnt for later drafts, and typed messages."""

from collections.abc import Iterator
from contextlib import contextmanager
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
        Option("-m", "--model", help="only what is of this model, as `paceline models` names it"),
    ] = None,
    dry_run: Annotated[bool, Option("--dry-run", help="list them, and remove nothing")] = False,
    output: Output,
) -> int:
    """Remove what --keep has kept, and what `learn` has learnt.

    Answers of `generate`, `chat` and `serve`, drafters and what they were made from; without
    --model also messages that were typed in a chat.
    """
    from paceline.cli.chat.history import history_file
    from paceline.runtime.kept import all_kept
    from paceline.runtime.kept import forget as remove
    from paceline.runtime.learnt import all_learnt
    from paceline.storage.files import megabytes

    models, learners = all_kept(), all_learnt()
    chosen = [kept for kept in models if model in (None, kept.model)]
    learnt = [learner for learner in learners if model in (None, learner.model)]
    if model is not None and not chosen and not learnt:
        known = {kept.model for kept in models} | {learner.model for learner in learners}
        names = ", ".join(sorted(filter(None, known))) or "none of any model"
        raise InvalidRequest(f"no answers of {model} are kept; here are {names}")
    sizes = [learner.bytes for learner in learnt]
    if not dry_run:
        for kept in chosen:
            with _removing(kept.folder):
                remove(kept)
        for learner in learnt:
            with _removing(learner.paths[0]):
                learner.remove()
    typed = history_file() if model is None else None
    history = None if typed is None or not typed.is_file() else typed.stat().st_size
    if typed is not None and history is not None and not dry_run:
        with _removing(typed):
            typed.unlink()
    value = [
        {"model": kept.model, "folder": str(kept.folder), "bytes": kept.bytes} for kept in chosen
    ]
    done = "kept" if dry_run else "removed"
    lines = [
        f"{done}: answers of {_name(kept.model, kept.folder)}, {megabytes(kept.bytes)}"
        for kept in chosen
    ]
    lines += [
        f"{done}: what was learnt of {_name(learner.model, learner.paths[0])}, {megabytes(size)}"
        for learner, size in zip(learnt, sizes, strict=True)
    ]
    if history is not None:
        lines.append(f"{done}: messages typed in chat, {megabytes(history)}")
    removed = [
        {"model": learner.model, "bytes": size} for learner, size in zip(learnt, sizes, strict=True)
    ]
    values = {done: value, "learnt": removed, "history_bytes": history or 0}
    print_value(output, values, "\n".join(lines) or "no answers are kept")
    return 0


def _name(model: str, place: Path) -> str:
    return model or f"an unknown model, in {place}"


@contextmanager
def _removing(path: Path) -> Iterator[None]:
    """Turn an OSError of the body into a line that names `path`."""
    try:
        yield
    except OSError as error:
        raise PacelineError(f"cannot remove {path}: {error.strerror}") from error
