"""A server whose model writes what a script says, for clients that work with tools.

    python benchmarks/clients/scripted_server.py

It calls the first tool of `CALLS` that the prompt describes, to write a file, and answers when the
prompt has a tool's result; asked for the oracle it calls the function of an MCP server. So a test
with it is of the server and of its client, not of a model.
"""

import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[2] / "tests"))
from paceline.cli.servers import registration
from paceline.server.run import print_line, serve
from paceline.server.settings import Settings
from support.scripted import Rule, ScriptedEngine, always, called, scripted_model, when

FILE, CONTENT = "hello.txt", "Hello, world!\n"
ANSWER = f"Done: {FILE} is written."
PLAIN = "Hello."
THOUGHT = "I write the file."
COMMAND = f"printf 'Hello, world!\\n' > {FILE}"
PATCH = f"*** Begin Patch\n*** Add File: {FILE}\n+{CONTENT}*** End Patch\n"
CALLS: Mapping[str, dict[str, Any]] = {
    "apply_patch": {"input": PATCH},  # Codex's custom tool, for models that it knows
    "write_file": {"path": FILE, "content": CONTENT},
    "disk__write_file": {"path": FILE, "content": CONTENT},  # in a namespace
    "exec_command": {"cmd": COMMAND},  # Codex
    "shell_command": {"command": COMMAND},  # Codex, with other settings
    "shell": {"command": ["bash", "-c", COMMAND]},  # Codex before 0.60
    "Bash": {"command": COMMAND, "description": "Writes a file"},  # Claude Code
    "bash": {"command": COMMAND, "description": "Writes a file"},  # opencode
}
"""Tool -> the arguments of its call."""

PICTURE = "red.png"
LOOK = f"Look at {PICTURE}."
LOOKED = "I read text, no pictures."
READERS = {"Read": "file_path", "view_image": "path", "read": "filePath"}
"""Tool that sends a picture to the model -> the argument with the file's name."""

KNOWN = "gpt-5.5"
"""A model that Codex knows, for which it has tools of other types."""

ORACLE = "Ask the oracle."
ORACLE_NAMES = ("mcp__oracle__ask", "oracle_ask")
"""As Claude Code and Codex name the function `ask` of the MCP server `oracle`, and opencode."""
ORACLE_SAYS = "the oracle says: 4711."

CONTEXT = 2**18
"""Tokens: prompts of agents have a hundred thousand letters, and here a token has one or two."""


def rules() -> list[Rule]:
    """The rules of the model, in their order."""
    calls = [
        when(f'"name": "{name}"', f"<think>\n{THOUGHT}\n</think>\n\n{called(name, arguments)}")
        for name, arguments in CALLS.items()
    ]
    return [
        when(ORACLE_SAYS, f"I know that {ORACLE_SAYS}"),
        asks_the_oracle,
        looks,
        when("<tool_response>", ANSWER),
        *calls,
        always(PLAIN),
    ]


def asks_the_oracle(prompt: str) -> str | None:
    """A call of the oracle, if the user wants it and the prompt describes it."""
    names = [name for name in ORACLE_NAMES if f'"name": "{name}"' in prompt]
    return called(names[0], {"question": "How much?"}) if names and ORACLE in prompt else None


def looks(prompt: str) -> str | None:
    """A call that reads the picture, if the user wants it, and then the answer."""
    if LOOK not in prompt or "<tool_response>" in prompt:
        return LOOKED if LOOK in prompt else None
    names = [name for name in READERS if f'"name": "{name}"' in prompt]
    return called(names[0], {READERS[names[0]]: PICTURE}) if names else None


def main() -> None:
    """Serve on a free port until SIGTERM; `launch` finds it in $PACELINE_CACHE."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(os.environ.setdefault("PACELINE_CACHE", made))
        model = scripted_model(folder, folder, CONTEXT)
        assert isinstance(model.engine, ScriptedEngine)
        model.engine.rules = rules()
        with registration() as register:

            def say(line: str) -> None:
                register(line)
                print_line(line)

            serve(model, Settings(aliases=(KNOWN,)), on_line=say)


if __name__ == "__main__":
    main()
