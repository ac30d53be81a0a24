"""`paceline launch`: a coding agent with a local model.

The agent gets its settings by environment variables and arguments, so the user's files do not
change. Invariant: a server that is started for the agent ends with this process, however that ends:
its standard input is a pipe of this process.
"""

import asyncio
import json
import os
import shlex
import shutil
import signal
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Annotated, Literal, NamedTuple

from typer import Argument, Option

from paceline.cli.console import print_status, print_value, progress_of
from paceline.cli.options import ModelName, Output, command
from paceline.cli.servers import key_for, registered_urls, served
from paceline.errors import InvalidRequest, PacelineError
from paceline.system.machine import direct_hosts

_SERVE = ("--prompt-cache", "10")
"""GB of prompts on disk: 20,000 tokens of a model with 4B parameters take 3."""

_ROOM = 1024
"""Minimum tokens of a context for the first message and its answer."""

_IDLE_MS = 3_600_000
"""Time that an agent waits for a first token, in place of its default of 5 minutes."""


class Endpoint(NamedTuple):
    """A model on a server: URL without `/v1`, and maximum tokens of prompt and answer."""

    root: str
    key: str
    model: str
    context: int


_CLOUDS = ("ANTHROPIC_AWS", "BEDROCK", "FOUNDRY", "GATEWAY", "MANTLE", "VERTEX")
"""Servers that Claude Code would use instead, if the user's settings choose one."""

Call = tuple[dict[str, str], list[str]]
"""Environment variables and arguments of an agent."""


def _claude(server: Endpoint) -> Call:
    names = [f"ANTHROPIC_DEFAULT_{name}_MODEL" for name in ("OPUS", "SONNET", "HAIKU")]
    names += ["ANTHROPIC_MODEL", "ANTHROPIC_SMALL_FAST_MODEL", "CLAUDE_CODE_SUBAGENT_MODEL"]
    settings = {
        **dict.fromkeys((f"CLAUDE_CODE_USE_{name}" for name in _CLOUDS), "0"),
        **dict.fromkeys(names, server.model),
        "ANTHROPIC_BASE_URL": server.root,
        "ANTHROPIC_AUTH_TOKEN": "none",
        "ANTHROPIC_API_KEY": "",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "CLAUDE_STREAM_IDLE_TIMEOUT_MS": str(_IDLE_MS),
    }
    # An argument, as the user's settings.json replaces variables. Other users of the machine can
    # read arguments, so the key is in a variable.
    environment = {**settings, "ANTHROPIC_CUSTOM_HEADERS": f"X-Api-Key: {server.key}"}
    return environment, ["--settings", json.dumps({"env": settings})]


def _codex(server: Endpoint) -> Call:
    provider = {
        "name": "paceline",
        "base_url": f"{server.root}/v1",
        "env_key": "PACELINE_API_KEY",
        "wire_api": "responses",
        "stream_idle_timeout_ms": _IDLE_MS,
    }
    settings: dict[str, object] = {"model": server.model, "model_context_window": server.context}
    settings |= {"model_provider": "paceline", "analytics.enabled": False}
    settings |= {f"model_providers.paceline.{name}": value for name, value in provider.items()}
    write = partial(json.dumps, ensure_ascii=False)  # JSON's surrogate pairs are not TOML
    words = [f"-c{name}={write(value)}" for name, value in settings.items()]
    return {"PACELINE_API_KEY": server.key}, words


def _opencode(server: Endpoint) -> Call:
    options = {"baseURL": f"{server.root}/v1", "apiKey": server.key}
    limit = {"context": server.context, "output": server.context // 4}
    models = {server.model: {"limit": limit}}
    provider = {"npm": "@ai-sdk/openai-compatible", "options": options, "models": models}
    name = f"paceline/{server.model}"
    # The user's settings for agents and providers must not select another server.
    agents = ("build", "plan", "general", "explore", "title", "summary", "compaction")
    settings = {"provider": {"paceline": provider}, "model": name, "small_model": name}
    settings |= {"agent": {agent: {"model": name} for agent in agents}}
    settings |= {"enabled_providers": ["paceline"]}
    return {"OPENCODE_CONFIG_CONTENT": json.dumps(settings)}, []


_AGENTS: dict[str, tuple[str, int, Callable[[Endpoint], Call]]] = {
    "claude": ("@anthropic-ai/claude-code", 22_704, _claude),
    "codex": ("@openai/codex", 11_272, _codex),
    "opencode": ("opencode-ai", 7_831, _opencode),
}
"""npm package, and tokens of an interactive session's first request, counted on 2026-11-28 with
the default model's tokenizer: Claude Code 2.1.197, Codex 0.171.0, opencode 1.18.33."""


@command(
    examples=(
        "paceline launch claude -m qwen3-4b",
        'paceline launch codex -m qwen3-4b -- exec "Write tests for app.py"',
    ),
)
def launch(
    *,
    agent: Annotated[Literal["claude", "codex", "opencode"], Argument(help="the program")],
    arguments: Annotated[
        list[str] | None, Argument(metavar="ARGS", help="arguments of the program, after --")
    ] = None,
    show: Annotated[
        bool, Option("--print", help="print the environment and the command without running it")
    ] = False,
    model: ModelName,
    output: Output,
) -> int:
    """Run Claude Code, Codex or opencode with a local model.

    This starts a server if none of yours serves the model; it ends with the agent.
    """
    from paceline.models import resolve

    package, _, _ = _AGENTS[agent]
    program = agent if show else shutil.which(agent)
    if program is None:
        raise PacelineError(f"{agent} is not installed; `npm install -g {package}` installs it")
    files = resolve(model, progress=progress_of(output))
    name, context = files.short_name, files.context_length
    running = _running(name, context)
    planned = running or Endpoint("http://127.0.0.1:8000", "none", name, context)
    call = partial(_call, agent, [program, *(arguments or ())])
    environment, words = call(planned)
    if not show:
        if running:
            return asyncio.run(_run(environment, words))
        note = (lambda _: None) if output.quiet else print_status
        return asyncio.run(_run_with_server(model, planned, call, note))
    serve = None if running else ["paceline", "serve", "--model", model, *_SERVE]
    lines = [f"# first, in another terminal: {shlex.join(serve)}"] if serve else []
    lines += [f"export {name}={shlex.quote(value)}" for name, value in environment.items()]
    value = {"serve": serve, "environment": environment, "command": words}
    print_value(output, value, "\n".join([*lines, shlex.join(words)]))
    return 0


def _running(model: str, context: int) -> Endpoint | None:
    """Return a model on a server of this user that needs no key, or accepts $PACELINE_API_KEY."""
    for url in registered_urls():
        with suppress(PacelineError):
            for entry in served(url):
                if entry["id"] == model:
                    key, root = key_for(url, None) or "none", url.removesuffix("/v1")
                    return Endpoint(root, key, model, entry["context"] or context)
    return None


def _call(agent: str, argv: Sequence[str], server: Endpoint) -> Call:
    """Return the environment variables and the command line of an agent.

    Raises InvalidRequest if its first request does not fit the context.
    """
    _, tokens, settings = _AGENTS[agent]
    if server.context < tokens + _ROOM:
        raise InvalidRequest(
            f"{agent} sends about {round(tokens, -3):,} tokens, but {server.model} holds "
            f"{server.context:,}; choose a model with a longer context from `paceline models`"
        )
    environment, words = settings(server)
    direct = direct_hosts()
    return {**environment, "NO_PROXY": direct, "no_proxy": direct}, [argv[0], *words, *argv[1:]]


async def _run_with_server(
    model: str, planned: Endpoint, call: Callable[[Endpoint], Call], note: Callable[[str], None]
) -> int:
    """Run an agent with its own server, which has its own key."""
    from paceline.server.router.child import Child

    note(f"starting a server of {planned.model}")
    child = await Child.start(model, _SERVE, note)
    child.on_line = lambda _: None  # the agent uses the terminal
    ended = asyncio.ensure_future(child.wait())
    try:
        contexts = [entry["context"] for entry in served(f"{child.url}/v1", child.key)]
        context = min([planned.context, *contexts])  # the KV cache may have fewer slots
        code = await _run(*call(Endpoint(child.url, child.key, planned.model, context)))
        if ended.done():
            print_status(f"the server of {planned.model} ended before the agent: {child.reason()}")
        return code
    finally:
        await child.stop(40.0)  # it may be writing a prompt to the disk


async def _run(environment: dict[str, str], argv: Sequence[str]) -> int:
    """Run an agent to its end; return its exit code, as shells do."""
    # The agent gets Ctrl-C from the terminal. Not SIG_IGN: children inherit that.
    handlers = {signal.SIGINT: signal.signal(signal.SIGINT, lambda *_: None)}
    try:
        agent = await asyncio.create_subprocess_exec(*argv, env={**os.environ, **environment})
        handlers[signal.SIGTERM] = signal.signal(signal.SIGTERM, lambda *_: agent.terminate())
        code = await agent.wait()
    except OSError as error:
        raise PacelineError(f"cannot start {argv[0]}: {error.strerror}") from error
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return code if code >= 0 else 128 - code
