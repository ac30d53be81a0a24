"""`paceline serve`: runs `server.run`, or `server.router.run` with `--all`."""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from paceline.cli import declare
from paceline.cli.console import check_kept, load_model, obey_offline, print_status
from paceline.cli.options import GenerationConfig, ModelOptions, Output, Quiet, command
from paceline.errors import InvalidRequest, PacelineError
from paceline.options import IntRange

if TYPE_CHECKING:
    from paceline.models import ModelFiles
    from paceline.server.settings import Settings


_access = partial(Option, rich_help_panel="Access")
_load = partial(Option, rich_help_panel="Load")
_request = partial(declare.answer_option, rich_help_panel="Defaults of requests")
_all = partial(Option, rich_help_panel="Several models")

_OF_CHILDREN = (
    *(
        "queue",
        "max_concurrent",
        "timeout",
        "prompt_cache",
        "shutdown_timeout",
        "drafter",
        "policy",
        "max_block",
    ),
    *("think", "default_max_tokens", "parse_special", "parallel", "keep", "generation_config"),
    *("min_rows", "cache_tokens", "threads", "device", "kv_cache_type", "compute_units", "offline"),
)
"""Options that a router passes to each model's process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerArguments:
    """Command-line options for `Settings`."""

    host: Annotated[str, _access(help="address to listen on; a public one needs --api-key")] = (
        "127.0.0.1"
    )
    port: Annotated[
        int, _access(parser=IntRange(0, 2**16 - 1), help="port; 0 selects a free one")
    ] = 8000
    api_key: Annotated[
        list[str] | None,
        _access(
            help="API key that requests must send; may be repeated; default: $PACELINE_API_KEY"
        ),
    ] = None
    api_key_file: Annotated[
        Path | None,
        _access(
            parser=Path, metavar="FILE", help="file of API keys, one per line; # begins a comment"
        ),
    ] = None
    no_auth: Annotated[
        bool, _access("--no-auth", help="accept requests without a key, even on a public address")
    ] = False
    allow_host: Annotated[
        list[str] | None,
        _access(metavar="HOST", help="allowed value of the Host header; may be repeated"),
    ] = None
    origin: Annotated[
        list[str] | None,
        _access(help="scheme://host:port of a web page that may send requests; may be repeated"),
    ] = None
    root_path: Annotated[str, _access(help="path of the server behind a proxy, such as /m/x")] = ""
    name: Annotated[
        str | None, Option(help="the model's name in the API; default: its own name")
    ] = None
    alias: Annotated[
        list[str] | None, Option(help="another name of the model; may be repeated")
    ] = None
    queue: Annotated[int, _load(parser=declare.COUNT, help="maximum waiting requests")] = 256
    max_concurrent: Annotated[
        int, _load(parser=declare.COUNT, help="maximum concurrent requests")
    ] = 64
    connections: Annotated[
        int | None,
        _load(
            parser=declare.COUNT,
            help="connections at a time, as far as the limit on open files allows; "
            "default: 1024 more than may run and wait",
        ),
    ] = None
    timeout: Annotated[
        float | None,
        _load(parser=declare.TIMEOUT, help="maximum seconds per request, including the queue"),
    ] = None
    shutdown_timeout: Annotated[
        float, _load(parser=declare.SECONDS, help="seconds for running requests at shutdown")
    ] = 30.0
    prompt_cache: Annotated[
        float | None,
        _load(
            parser=declare.GIGABYTES,
            metavar="GB",
            help="maximum size of the prompt cache on disk; default: in memory only",
        ),
    ] = None
    parallel: Annotated[
        int,
        _load(
            parser=IntRange(1, 32),
            help="requests that share forward passes in llamacpp: 1 for one person or agent, "
            "more for many clients",
        ),
    ] = 1
    drafter: Annotated[str, _request("drafter")] = "auto"
    policy: Annotated[str, _request("policy")] = "auto"
    max_block: Annotated[int | None, _request("max_block")] = None
    think: Annotated[bool | None, _request("think")] = None
    default_max_tokens: Annotated[
        int | None,
        declare.count(
            rich_help_panel="Defaults of requests",
            help="tokens of an answer to a chat without max_tokens; "
            "default: 16384, or half the context if that is less",
        ),
    ] = None
    parse_special: Annotated[
        bool,
        Option(
            "--parse-special",
            help="names of special tokens in messages become the tokens; only for clients that "
            "you trust",
        ),
    ] = False
    keep: Annotated[
        bool,
        Option(
            "--keep",
            help="save the tokens of answers on this machine, to draft later ones of any client; "
            "except those of requests with a cache_salt",
        ),
    ] = False
    generation_config: GenerationConfig = "auto"

    def settings(self, *, behind_router: bool) -> "Settings":
        """Return the settings. Raises InvalidRequest if a key, a host or an origin is not valid."""
        from paceline.server.settings import Settings, api_keys

        given = asdict(self)
        return Settings(
            **{one.name: given[one.name] for one in fields(Settings) if one.name in given},
            aliases=tuple(self.alias or ()),
            api_keys=api_keys(self.api_key or (), self.api_key_file, os.environ),
            hosts=None if self.allow_host is None else tuple(self.allow_host),
            behind_router=behind_router,
            origins=tuple(self.origin or ()),
            max_waiting=self.queue,
            max_running=self.max_concurrent,
            max_connections=self.connections,
            request_seconds=self.timeout,
            prompt_cache_bytes=None if self.prompt_cache is None else int(self.prompt_cache * 1e9),
            grace_seconds=self.shutdown_timeout,
        )


@command(
    first=("model", "every", "host", "port", "api_key", "name", "quiet"),
    examples=(
        "paceline serve -m qwen3-0.6b  # http://127.0.0.1:8000/v1, and a page to chat",
        "paceline serve --all  # all installed models, loaded on first use",
    ),
)
def serve(
    *,
    server: ServerArguments,
    every: Annotated[
        bool, _all("--all", help="serve all installed models; load each on first use")
    ] = False,
    max_loaded_models: Annotated[
        int, _all(parser=declare.COUNT, help="maximum models in memory")
    ] = 1,
    memory: Annotated[
        float | None,
        _all(
            parser=declare.GIGABYTES,
            metavar="GB",
            help="maximum memory of the loaded models, as estimated; default: the machine's",
        ),
    ] = None,
    keep_alive: Annotated[
        float | None,
        _all(parser=declare.TIMEOUT, metavar="SECONDS", help="unload a model after this idle time"),
    ] = None,
    until_input_ends: Annotated[bool, Option("--until-input-ends", hidden=True)] = False,
    model: ModelOptions,
    quiet: Quiet = False,
) -> int:
    """Serve a model over HTTP, with OpenAI's API."""
    from paceline.runtime.request import check

    check({"drafter": server.drafter, "policy": server.policy, "max_block": server.max_block})
    check_kept([server.drafter], keep=server.keep)
    settings = server.settings(behind_router=until_input_ends)
    if not every and (max_loaded_models, memory, keep_alive) != (1, None, None):
        raise InvalidRequest(
            "--max-loaded-models, --memory and --keep-alive need --all; add it, or remove them"
        )
    if every:
        if server.name or server.alias or model.revision or model.engine != "auto":
            raise InvalidRequest("--name, --alias, --revision and --engine are not for --all")
        from paceline.server.router.pool import Limits
        from paceline.server.router.run import serve_all
        from paceline.system.machine import memory_bytes

        obey_offline(model.offline)
        max_bytes = memory_bytes() if memory is None else int(memory * 1e9)
        limits = Limits(max_loaded_models, max_bytes, keep_alive, settings.max_waiting)
        words = _child_words(asdict(server) | asdict(model))
        with _registered() as write:
            serve_all(
                model.model, words, settings=settings, limits=limits, on_line=write, quiet=quiet
            )
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
        parallel=server.parallel,
        generation_config=server.generation_config,
        keep=server.keep,
        embeddings=True,
        check=partial(_check, think=settings.think, quiet=quiet),
    )
    if until_input_ends:  # the router logs requests itself
        run(answering, settings)
    else:
        with _registered() as write:
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


@contextmanager
def _registered() -> Iterator[Callable[[str], None]]:
    """Yield a function that writes a server's lines, and registers it with the first."""
    from paceline.cli.servers import registration
    from paceline.server.run import print_line

    with registration() as register:

        def write(line: str) -> None:
            print_line(line)
            register(line)

        yield write


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
