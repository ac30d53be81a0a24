"""Agents of the command line write a file, read a picture and call a function of an MCP server.

They are Claude Code, Codex and opencode, from npm.

    python benchmarks/clients/agent_commands.py

The model is scripted, so this is a test of the server's forms: /v1/messages, /v1/responses and
/v1/chat/completions, with the agents' own prompts and tools. It needs npm and Node.js.
"""

import base64
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from scripted_server import (
    ANSWER,
    CONTENT,
    FILE,
    KNOWN,
    LOOK,
    LOOKED,
    ORACLE,
    ORACLE_SAYS,
    PICTURE,
)
from trial import Trial, main

PACKAGES = ("@anthropic-ai/claude-code@2.1", "@openai/codex@0.171", "opencode-ai@1.18")
TASK = f"Write {FILE}."
COMMAND = [sys.executable, str(Path(__file__).parent / "programs" / "mcp_oracle.py")]
"""The MCP server."""
PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAgAAAAICAIAAABLbSncAAAAEklEQVR4nGP4z8CAFWEXHbQSACj/P8Fu7N9hAAAAAElF"
    "TkSuQmCC"
)
"""8 red pixels in 8 rows."""
Done = subprocess.CompletedProcess[str]


def launch(trial: Trial, agent: str, *arguments: str) -> Done:
    """Run an agent with the settings that `paceline launch` gives it."""
    cache = os.environ["PACELINE_CACHE"]
    command = ("-P", "-m", "paceline", "launch", agent, "-m", f"{cache}/scripted.gguf", "--")
    return trial.run(sys.executable, *command, *arguments, PACELINE_CACHE=cache)


def claude(trial: Trial, task: str) -> Done:
    """Claude Code asks for messages."""
    oracle = {"mcpServers": {"oracle": {"command": COMMAND[0], "args": COMMAND[1:]}}}
    options = ("--strict-mcp-config", "--mcp-config", json.dumps(oracle))
    tools = "Bash,Read,mcp__oracle__ask"
    return launch(trial, "claude", "-p", task, "--allowedTools", tools, *options)


def codex(trial: Trial, task: str, **more: object) -> Done:
    """Codex asks for responses, and has the functions of an MCP server in a namespace."""
    oracle = {"command": COMMAND[0], "args": COMMAND[1:]}
    settings = {f"mcp_servers.oracle.{name}": value for name, value in oracle.items()}
    words = [f"{name}={json.dumps(value)}" for name, value in {**settings, **more}.items()]
    options = [word for setting in words for word in ("-c", setting)]
    options += ["--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
    return launch(trial, "codex", "exec", *options, task)


def codex_with_custom_tools(trial: Trial, task: str) -> Done:
    """Codex has custom tools for models that it knows, and patches files with one."""
    return codex(trial, task, model=KNOWN)


def opencode(trial: Trial, task: str) -> Done:
    """Opencode asks for chats."""
    settings = {"autoupdate": False, "mcp": {"oracle": {"type": "local", "command": COMMAND}}}
    (trial.folder / "opencode.json").write_text(json.dumps(settings), encoding="utf-8")
    return launch(trial, "opencode", "run", task)


AGENTS: tuple[Callable[[Trial, str], Done], ...] = (
    claude,
    codex,
    codex_with_custom_tools,
    opencode,
)


def work(trial: Trial) -> None:
    """Install the agents, and run each."""
    folder = trial.folder / "node"
    npm = shutil.which("npm")
    if npm is None:
        raise SystemExit("npm is not here; install Node.js")
    if not folder.exists():
        install = [npm, "install", "--silent", "--no-audit", "--no-fund", "--prefix", folder]
        folder.mkdir()
        subprocess.run([*install, *PACKAGES], check=True)
    (trial.folder / PICTURE).write_bytes(PNG)
    trial.commands = folder / "node_modules" / ".bin"
    for agent in AGENTS:
        written = trial.folder / FILE
        written.unlink(missing_ok=True)
        done = agent(trial, TASK)
        name = agent.__name__
        trial.check(ANSWER in done.stdout, f"{name} answers from the tool's result")
        found = written.read_text() if written.exists() else None
        trial.equal(found, CONTENT, f"{name} has written the file")
        done = agent(trial, LOOK)
        trial.check(LOOKED in done.stdout, f"{name} answers after a picture")
        if agent is codex_with_custom_tools:
            continue  # it finds the functions of MCP servers with `tool_search` alone
        done = agent(trial, ORACLE)
        trial.check(ORACLE_SAYS in done.stdout, f"{name} answers from an MCP server's function")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as cache:
        os.environ["PACELINE_CACHE"] = cache
        main(__doc__, [], work, script=Path(__file__).parent / "scripted_server.py")
