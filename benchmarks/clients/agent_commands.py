"""Agents of the command line write a file: Claude Code, Codex and opencode, from npm.

    python benchmarks/clients/agent_commands.py

The model is scripted, so this is a test of the server's forms: /v1/messages, /v1/responses and
/v1/chat/completions, with the agents' own prompts and tools. It needs npm and Node.js.
"""

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

from scripted_server import ANSWER, CONTENT, FILE
from trial import Trial, main

PACKAGES = ("@anthropic-ai/claude-code@2.1", "@openai/codex@0.169", "opencode-ai@1.18")
TASK = f"Write {FILE}."
Done = subprocess.CompletedProcess[str]


def claude(trial: Trial) -> Done:
    """Claude Code asks for messages."""
    return trial.run(
        "claude",
        *("-p", TASK, "--allowedTools", "Bash"),
        ANTHROPIC_BASE_URL=trial.server.root,
        ANTHROPIC_API_KEY="none",
        ANTHROPIC_MODEL="scripted",
        ANTHROPIC_SMALL_FAST_MODEL="scripted",
        CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1",
        DISABLE_AUTOUPDATER="1",
    )


def codex(trial: Trial) -> Done:
    """Codex asks for responses."""
    provider = {"name": "paceline", "base_url": trial.server.url, "wire_api": "responses"}
    lines = [f"{name} = {json.dumps(value)}" for name, value in provider.items()]
    settings = ['model = "scripted"', 'model_provider = "paceline"']
    home = trial.folder / ".codex"
    home.mkdir(exist_ok=True)
    (home / "config.toml").write_text(
        "\n".join([*settings, "[model_providers.paceline]", *lines, ""]), encoding="utf-8"
    )
    options = ("--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox")
    return trial.run("codex", "exec", *options, TASK)


def opencode(trial: Trial) -> Done:
    """Opencode asks for chats."""
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": trial.server.url, "apiKey": "none"},
        "models": {"scripted": {}},
    }
    settings = {
        "provider": {"paceline": provider},
        "model": "paceline/scripted",
        "small_model": "paceline/scripted",
        "autoupdate": False,
    }
    (trial.folder / "opencode.json").write_text(json.dumps(settings), encoding="utf-8")
    return trial.run("opencode", "run", TASK)


AGENTS: tuple[Callable[[Trial], Done], ...] = (claude, codex, opencode)


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
    trial.commands = folder / "node_modules" / ".bin"
    for agent in AGENTS:
        written = trial.folder / FILE
        written.unlink(missing_ok=True)
        done = agent(trial)
        name = agent.__name__
        trial.check(ANSWER in done.stdout, f"{name} answers from the tool's result")
        found = written.read_text() if written.exists() else None
        trial.equal(found, CONTENT, f"{name} has written the file")


if __name__ == "__main__":
    main(__doc__, [], work, script=Path(__file__).parent / "scripted_server.py")
