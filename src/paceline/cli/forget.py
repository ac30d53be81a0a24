"""`paceline forget`: deletes answer history, learned drafters, and typed messages."""

from typing import Annotated, Any

from typer import Option

from paceline.cli.console import print_value
from paceline.cli.options import Output, command
from paceline.errors import InvalidRequest


@command(examples=("paceline forget --dry-run", "paceline forget"))
def forget(
    *,
    model: Annotated[
        str | None,
        Option("-m", "--model", help="limit to this model, by its name in `paceline models`"),
    ] = None,
    dry_run: Annotated[bool, Option("--dry-run", help="list them without deleting")] = False,
    output: Output,
) -> int:
    """Delete saved answers and learned drafters.

    This deletes saved answers of `generate`, `chat` and `serve`, learned drafters and their data;
    without --model, also the messages typed in chats.
    """
    from paceline.cli.chat.terminal import history_file
    from paceline.runtime.drafting import all_learned
    from paceline.runtime.kept import all_kept
    from paceline.storage.files import megabytes, remove, size_of

    stored = {"answers": all_kept(), "drafters": all_learned()}
    known = {one.model for of_models in stored.values() for one in of_models}
    if model is not None and model not in known:
        names = ", ".join(sorted(filter(None, known))) or "none"
        raise InvalidRequest(f"no saved answers or drafters for {model!r}; saved for: {names}")
    done, lines = "kept" if dry_run else "removed", list[str]()
    values: dict[str, list[dict[str, Any]]] = {what: [] for what in stored}
    for what, of_models in stored.items():
        for one in of_models:
            if model not in (None, one.model):
                continue
            place, size = one.paths[0], one.bytes
            name = one.model or f"an unknown model, in {place}"
            lines.append(f"{done}: {what} of {name}, {megabytes(size)}")
            values[what].append({"model": one.model, "folder": str(place), "bytes": size})
            if not dry_run:
                one.remove()
    typed, history_bytes = history_file().parent, 0
    if model is None and typed.is_dir():
        history_bytes = size_of(typed)
        lines.append(f"{done}: messages typed in chat, {megabytes(history_bytes)}")
        if not dry_run:
            remove(typed)
    learned = values["drafters"]
    value = {done: values["answers"], "learnt": learned, "history_bytes": history_bytes}
    print_value(output, value, "\n".join(lines) or "nothing is saved")
    return 0
