"""`paceline pull`."""

from typing import Annotated

from typer import Option

from paceline.cli.console import obey_offline, print_value, progress_of
from paceline.cli.options import ModelArgument, Offline, Output, Revision, command


@command(examples=("paceline pull qwen3-0.6b", "paceline pull Qwen/Qwen3-8B-GGUF:Q4_K_M --drafter"))
def pull(
    *,
    model: ModelArgument,
    drafter: Annotated[
        bool, Option("--drafter", help="also download the model's published drafter")
    ] = False,
    revision: Revision = None,
    offline: Offline = False,
    output: Output,
) -> int:
    """Download a model, or update it."""
    obey_offline(offline)
    from paceline.models import published
    from paceline.models import pull as fetch

    progress = progress_of(output)
    files = fetch(model, progress=progress, revision=revision)
    if drafter:
        published.fetch(files, progress)
    best = next(iter(published.published_for(files)), None)
    size, here = (None, False) if best is None else (best.size(), best.find() is not None)
    line = "" if best is None else f"\n{best.line(files.name, size)}"
    facts = {
        "name": files.name,
        "folder": str(files.folder),
        "source": files.source,
        "license": files.facts.license,
        "context_length": files.context_length,
        "drafter": best and {"name": best.name, "form": best.form, "bytes": size, "here": here},
    }
    print_value(output, facts, f"{files.name} is ready in {files.folder}{line}")
    return 0
