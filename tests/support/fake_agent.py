"""A fake agent: finds its model through the same variables and arguments as a real one.

    fake_agent.py claude|codex|opencode [ARGUMENTS] [ask TASK | wait]

It prints its settings as JSON, and exits with 7. `ask` sends a request, and `wait` waits until its
input ends. SIGINT is the exit code 5, and SIGTERM 6.
"""

import json
import os
import signal
import sys
import tomllib
from typing import Any

import httpx

SYSTEM = "You are an agent. " + " ".join(f"Rule {number}: be brief." for number in range(40))
PARAMETERS = {"type": "object", "properties": {"path": {"type": "string"}}}


def claude(words: list[str]) -> dict[str, Any]:
    """Read variables, which those of `--settings` replace, like Claude Code."""
    position = words.index("--settings")
    settings = json.loads(words[position + 1])["env"]
    del words[position : position + 2]
    variables = {**os.environ, **settings}
    assert variables["CLAUDE_CODE_USE_BEDROCK"] == "0"
    name, _, key = variables["ANTHROPIC_CUSTOM_HEADERS"].partition(": ")
    tool = {"name": "read", "description": "Reads a file.", "input_schema": PARAMETERS}
    return {
        "url": f"{variables['ANTHROPIC_BASE_URL']}/v1/messages",
        "key": key,
        "headers": {name: key, "Authorization": f"Bearer {variables['ANTHROPIC_AUTH_TOKEN']}"},
        "model": variables["ANTHROPIC_MODEL"],
        "body": {"system": SYSTEM, "tools": [tool], "max_tokens": 1},
        "usage": lambda usage: (usage["cache_read_input_tokens"], usage["input_tokens"]),
    }


def codex(words: list[str]) -> dict[str, Any]:
    """Read settings in TOML, each after `-c`, like Codex."""
    lines = [word.removeprefix("-c") for word in words if word.startswith("-c")]
    words[:] = [word for word in words if not word.startswith("-c")]
    settings = tomllib.loads("\n".join(lines))
    provider = settings["model_providers"][settings["model_provider"]]
    key = os.environ[provider["env_key"]]
    tool = {"type": "function", "name": "read", "parameters": PARAMETERS}
    return {
        "url": f"{provider['base_url']}/{provider['wire_api']}",
        "key": key,
        "headers": {"Authorization": f"Bearer {key}"},
        "model": settings["model"],
        "body": {"instructions": SYSTEM, "tools": [tool], "max_output_tokens": 1},
        "usage": lambda usage: with_rest(usage["input_tokens"], usage["input_tokens_details"]),
    }


def opencode(_: list[str]) -> dict[str, Any]:
    """Read the whole configuration from a variable, like opencode."""
    settings = json.loads(os.environ["OPENCODE_CONFIG_CONTENT"])
    provider, _, model = settings["model"].partition("/")
    assert settings["enabled_providers"] == [provider]
    assert settings["agent"]["build"]["model"] == settings["model"]
    options = settings["provider"][provider]["options"]
    assert settings["provider"][provider]["models"][model]["limit"]["context"] > 0
    tool = {"type": "function", "function": {"name": "read", "parameters": PARAMETERS}}
    return {
        "url": f"{options['baseURL']}/chat/completions",
        "key": options["apiKey"],
        "headers": {"Authorization": f"Bearer {options['apiKey']}"},
        "model": model,
        "body": {"tools": [tool], "max_tokens": 1},
        "usage": lambda usage: with_rest(usage["prompt_tokens"], usage["prompt_tokens_details"]),
    }


def with_rest(tokens: int, details: dict[str, int]) -> tuple[int, int]:
    """Return the cached tokens of a prompt, and the others."""
    return details["cached_tokens"], tokens - details["cached_tokens"]


def ask(settings: dict[str, Any], task: str) -> tuple[int, int]:
    """Return the cached tokens of the prompt, and the others."""
    user = {"role": "user", "content": task}
    body = {"model": settings["model"], **settings["body"]}
    if "instructions" in body:
        body["input"] = [user]
    elif "system" in body:
        body["messages"] = [user]
    else:
        body["messages"] = [{"role": "system", "content": SYSTEM}, user]
    reply = httpx.post(settings["url"], headers=settings["headers"], json=body, timeout=100.0)
    assert reply.is_success, reply.text
    usage: tuple[int, int] = settings["usage"](reply.json()["usage"])
    return usage


def main() -> int:
    """Return the exit code."""
    signal.signal(signal.SIGINT, lambda *_: os._exit(5))
    signal.signal(signal.SIGTERM, lambda *_: os._exit(6))
    name, *words = sys.argv[1:]
    settings = {"claude": claude, "codex": codex, "opencode": opencode}[name](words)
    found = {"arguments": words, **{name: settings[name] for name in ("url", "key", "model")}}
    if "ask" in words:
        found["cached"], found["computed"] = ask(settings, words[words.index("ask") + 1])
    sys.stdout.write(f"{json.dumps(found)}\n")
    sys.stdout.flush()
    if "wait" in words:
        sys.stdin.read()
    return 7


if __name__ == "__main__":
    sys.exit(main())
