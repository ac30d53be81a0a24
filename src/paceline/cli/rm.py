"""`paceline rm`: removes a model from this machine."""

from typing import Annotated

from typer import Argument, Option

from paceline.cli import complete
from paceline.cli.console import print_value
from paceline.cli.options import Output, command


@command(examples=("paceline rm qwen3-0.6b", "paceline rm qwen3-0.6b --dry-run"))
def rm(
    *,
    model: Annotated[
        str,
        Argument(autocompletion=complete.installed, help="the model's name in `paceline models`"),
    ],
    dry_run: Annotated[
        bool, Option("--dry-run", help="list the files without deleting them")
    ] = False,
    output: Output,
) -> int:
    """Remove a model from this machine.

    Your own files and those of other programs stay; only files derived from them are removed.
    """
    from paceline.models import find_removal
    from paceline.runtime.drafting import learned_of
    from paceline.runtime.load import packed_copies
    from paceline.storage.files import megabytes, size_of

    removal = find_removal(model).with_paths(packed_copies)
    removal = removal.with_paths(lambda _weights: learned_of(model))
    freed = removal.bytes
    if not dry_run:
        removal.remove()
    done = "to free" if dry_run else "freed"
    lines = [
        *map(str, removal.paths),
        f"{megabytes(freed)} {done}",
        *(
            f"{path} stays, {megabytes(size_of(path))}: it is not paceline's"
            for path in removal.stays
        ),
    ]
    value = {"model": model, "paths": [*map(str, removal.paths)], "bytes": freed}
    value["stays"] = [*map(str, removal.stays)]
    print_value(output, {**value, "removed": not dry_run}, "\n".join(lines))
    return 0
