"""`paceline serve`: runs `server.run`, or `server.router.run` with `--all`."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from paceline.cli.console import check_kept, load_model, obey_offline, print_status
from paceline.cli.options import GenerationConfig, ModelOptions, Output, Quiet, command
from paceline.cli.servers import registration
from paceline.errors import InvalidRequest, PacelineError
from paceline.options import About, IntRange
from paceline.server.settings import Settings, api_keys

if TYPE_CHECKING:
    from paceline.models import ModelFiles

_access = partial(About, "Access")

_OF_CHILDREN = (
    *("queue", "max_concurrent", "timeout", "prompt_cache", "shutdown_timeout"),
    *("drafter", "policy", "max_block", "think", "default_max_tokens", "parse_special"),
    *("parallel", "keep", "generation_config", "min_rows", "cache_tokens", "threads", "device"),
    *("kv_cache_type", "compute_units", "offline"),
)
"""Options that a router passes to each model's process."""


@command(
    first=("model", "every", "host", "port", "api_key", "name", "quiet"),
    examples=(
        "paceline serve -m qwen3-0.6b  # http://127.0.0.1:8000/v1, and a page to chat",
        "paceline serve --all  # all installed models, loaded on first use",
    ),
)
def serve(
    *,
    server: Settings,
    port: Annotated[int, IntRange(0, 2**16 - 1), _access("port; 0 selects a free one")] = 8000,
    api_key: Annotated[
        Sequence[str],
        _access("API key that requests must send; may be repeated; default: $PACELINE_API_KEY"),
    ],
    api_key_file: Annotated[
        Path | None, Path, _access("file of API keys, one per line; # begins a comment", "", "FILE")
    ] = None,
    parallel: Annotated[
        int,
        IntRange(1, 32),
        About(
            "Load",
            "requests that share forward passes in llamacpp: 1 for one person or agent, more for "
            "many clients",
        ),
    ] = 1,
    keep: Annotated[
        bool,
        About(
            "Options",
            "save the tokens of answers on this machine, to draft later ones of any client; except "
            "those of requests with a cache_salt",
        ),
    ] = False,
    generation_config: GenerationConfig = "auto",
    every: Annotated[
        bool,
        About("Several models", "serve all installed models; load each on first use", "--all"),
    ] = False,
    until_input_ends: Annotated[bool, Option("--until-input-ends", hidden=True)] = False,
    model: ModelOptions,
    quiet: Quiet = False,
) -> int:
    """Serve a model over HTTP, with OpenAI's API."""
    from paceline.runtime.request import check

    check({"drafter": server.drafter, "policy": server.policy, "max_block": server.max_block})
    check_kept([server.drafter], keep=keep)
    keys = api_keys(api_key, api_key_file, os.environ)
    settings = replace(server, port=port, api_keys=keys, behind_router=until_input_ends)
    several = settings.max_loaded_models, settings.memory, settings.keep_alive
    if not every and several != (1, None, None):
        raise InvalidRequest(
            "--max-loaded-models, --memory and --keep-alive need --all; add it, or remove them"
        )
    if every:
        if server.name or server.aliases or model.revision or model.engine != "auto":
            raise InvalidRequest("--name, --alias, --revision and --engine are not for --all")
        from paceline.server.router.run import serve_all

        obey_offline(model.offline)
        others = {"parallel": parallel, "keep": keep, "generation_config": generation_config}
        words = _child_words(asdict(settings) | asdict(model) | others)
        with registration() as write:
            serve_all(model.model, words, settings=settings, on_line=write, quiet=quiet)
        return 0
    from paceline.cli.crash import report_crashes
    from paceline.server.run import CONTEXTS, bound, end_with_input
    from paceline.server.run import serve as run

    if until_input_ends:  # also while the model loads
        end_with_input()
    bound(settings).close()  # report an unusable address before a model is loaded
    report_crashes()
    answering = load_model(
        model,
        Output(quiet=quiet),
        drafters=[settings.drafter],
        contexts=CONTEXTS,
        parallel=parallel,
        generation_config=generation_config,
        keep=keep,
        embeddings=True,
        check=partial(_check, think=settings.think, quiet=quiet),
    )
    if until_input_ends:  # the router logs requests itself
        run(answering, settings)
    else:
        with registration() as write:
            run(answering, settings, on_line=write, quiet=quiet)
    answering.flush()
    return 0


def _check(files: "ModelFiles", *, think: bool | None, quiet: bool) -> None:
    """Print a warning if a chat template fails, as other requests can still be answered.

    Raises InvalidRequest if the template does not support the value of `think`.
    """
    if think is not None:
        files.thinking.switch(think)
    try:
        if files.chat_template is not None:
            files.template.render([{"role": "user", "content": "Hello"}])
    except PacelineError as error:
        if not quiet:
            print_status(f"chats are refused: {error}")


def _child_words(options: Mapping[str, Any]) -> list[str]:
    """Return the options of each model's process, from those of the router."""
    words = []
    for name in _OF_CHILDREN:
        word, value = f"--{name.replace('_', '-')}", options[name]
        if value is False and name == "think":
            words.append("--no-think")
        elif value is not None and value is not False:
            words.append(word if value is True else f"{word}={value}")
    return words
