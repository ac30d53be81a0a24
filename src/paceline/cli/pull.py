"""`paceline pull`."""

from typing import Annotated

from typer import Argument

from paceline.cli.console import obey_offline, print_value, progress_of
from paceline.cli.options import Offline, Output, Revision, command, default_model, group

app = group()


@command(
    app,
    examples=("paceline pull qwen3-0.6b", "paceline pull Qwen/Qwen3-0.6B-GGUF:Q8_0"),
)
def pull(
    *,
    model: Annotated[
        str,
        Argument(default_factory=default_model, show_default=False, help="name, path or hub name"),
    ],
    revision: Revision = None,
    offline: Offline = False,
    output: Output,
) -> int:
    """Fetch a model, or bring it up to date."""
    obey_offline(offline)
    from paceline.models import pull as fetch

    files = fetch(model, progress=progress_of(output), revision=revision)
    facts = {
        "name": files.name,
        "folder": str(files.folder),
        "source": files.source,
        "license": files.facts.license,
        "context_length": files.context_length,
    }
    print_value(output, facts, f"{files.name} is ready in {files.folder}")
    return 0
