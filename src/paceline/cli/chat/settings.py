"""Options of answers as they are set in a chat: `temperature 0.7`, `think off`.

Names and ranges are those of `paceline.options`.
"""

from typing import Any

from paceline import options
from paceline.cli.answers import SAME_NAME
from paceline.errors import InvalidRequest

NAMES = (*SAME_NAME, "think", "stop", "ignore_eos", "repetition_detection")
"""Options that can be set."""

DEFAULT = "default"
"""The value with which an option is left out again."""

_SWITCHES = {"on": True, "true": True, "yes": True, "off": False, "false": False, "no": False}
_FLAGS = ("think", "ignore_eos", "repetition_detection")


def changed(values: dict[str, Any], name: str, text: str) -> dict[str, Any]:
    """A copy of options with one set. Raises InvalidRequest if it cannot be."""
    from paceline.runtime.request import check

    name = name.replace("-", "_")
    if name not in NAMES:
        raise InvalidRequest(f"there is no option {name!r} to set; expected {', '.join(NAMES)}")
    others = {other: value for other, value in values.items() if other != name}
    if text == DEFAULT:
        return others
    result = {**others, name: _parsed(name, text)}
    check(result)  # type: ignore[arg-type]
    return result


def _parsed(name: str, text: str) -> Any:
    """The value of a text; a text that is no number or switch is left for `check` to refuse."""
    if name == "max_tokens" and text == "-1":
        return None
    if name == "stop":
        return [text]
    if name in _FLAGS:
        return _SWITCHES.get(text.lower(), text)
    limits = options.RANGES.get(name)
    if limits is None:
        return text
    try:
        return int(text) if isinstance(limits, options.Whole) else float(text)
    except ValueError:
        return text
