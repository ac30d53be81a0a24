"""Commands by the names that other programs have for them."""

from collections.abc import Sequence

_NAMES = {"list": "models", "ls": "models", "remove": "rm"}


def translated(words: Sequence[str]) -> list[str]:
    """The words of a command line, with our names; without any word, those for help.

    `run MODEL` is a chat with the model, `run MODEL PROMPT` one answer of it.
    """
    if not words:
        return ["--help"]
    name, *rest = words
    if name != "run":
        return [_NAMES.get(name, name), *rest]
    if not rest or rest[0].startswith("-"):
        return ["chat", *rest]
    model, *rest = rest
    command = "generate" if rest and not rest[0].startswith("-") else "chat"
    return [command, *rest, "--model", model]
