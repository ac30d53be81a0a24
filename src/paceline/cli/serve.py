"""`paceline serve`: the command over `paceline.server.run`."""

import os
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from typer import Option

from paceline.cli import numbers
from paceline.cli.console import load_model
from paceline.cli.options import GenerationConfig, ModelOptions, Output, command, group

app = group()

_access = partial(Option, rich_help_panel="Access")
_load = partial(Option, rich_help_panel="Load")
_default = partial(Option, rich_help_panel="Defaults of requests")


@command(app)
def serve(
    *,
    host: Annotated[
        str, _access(help="address; one that others can reach needs --api-key")
    ] = "127.0.0.1",
    port: Annotated[int, _access(parser=numbers.PORT, help="0 takes a free one")] = 8000,
    api_key: Annotated[
        list[str] | None,
        _access(help="a key that requests must send; may be repeated; default: $PACELINE_API_KEY"),
    ] = None,
    api_key_file: Annotated[
        Path | None,
        _access(parser=Path, metavar="FILE", help="keys, one a line; # begins a comment"),
    ] = None,
    anyone: Annotated[
        bool, _access("--anyone", help="require no key, although others can reach the server")
    ] = False,
    allow_host: Annotated[
        list[str] | None,
        _access(metavar="HOST", help="a value that the Host header may have; may be repeated"),
    ] = None,
    origin: Annotated[
        list[str] | None,
        _access(help="scheme://host:port of a web page that may send requests; may be repeated"),
    ] = None,
    name: Annotated[
        str | None, Option(help="the model's name in the API; default: its own name")
    ] = None,
    alias: Annotated[
        list[str] | None, Option(help="another name of the model; may be repeated")
    ] = None,
    queue: Annotated[int, _load(parser=numbers.COUNT, help="requests that may wait")] = 256,
    at_once: Annotated[int, _load(parser=numbers.COUNT, help="requests that run at once")] = 64,
    timeout: Annotated[
        float | None,
        _load(parser=numbers.TIMEOUT, help="maximum seconds of a request, waiting included"),
    ] = None,
    grace: Annotated[
        float, _load(parser=numbers.SECONDS, help="seconds that requests may still run at shutdown")
    ] = 30.0,
    drafter: Annotated[str, _default(help="auto, none, or parts joined by +")] = "auto",
    policy: Annotated[str, _default(help="auto, fixed, adaptive or kelly")] = "auto",
    max_block: Annotated[
        int | None, _default(parser=numbers.BLOCK, help="maximum rows of a block, 2 to 32")
    ] = None,
    think: Annotated[
        bool | None,
        _default(
            "--think/--no-think",
            help="turn thinking on or off; default: as the chat template has it",
        ),
    ] = None,
    generation_config: GenerationConfig = "auto",
    model: ModelOptions,
    output: Output,
) -> int:
    """Serve a model over HTTP, with OpenAI's API."""
    from paceline.runtime.options import check
    from paceline.server.api_keys import api_keys
    from paceline.server.run import CONTEXTS
    from paceline.server.run import serve as run
    from paceline.server.settings import Settings

    speculation: Any = {"drafter": drafter, "policy": policy}
    if max_block is not None:
        speculation["max_block"] = max_block
    check(speculation)  # before the model is loaded
    settings = Settings(
        name=name,
        aliases=tuple(alias or ()),
        api_keys=api_keys(api_key or (), api_key_file, os.environ),
        hosts=None if allow_host is None else tuple(allow_host),
        anyone=anyone,
        think=think,
        origins=tuple(origin or ()),
        max_waiting=queue,
        max_running=at_once,
        request_seconds=timeout,
        grace_seconds=grace,
        **speculation,
    )
    loaded = load_model(
        model,
        output,
        drafters=[drafter or "auto"],
        contexts=CONTEXTS,
        generation_config=generation_config,
    )
    run(loaded, host, port, settings)
    return 0
