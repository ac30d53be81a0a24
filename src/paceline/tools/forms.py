"""The tool call formats of model families; selects one by the model's chat template.

The formats are in `forms.json`, in the order of the search for their signs. Each entry has the
fields of a `ToolForm`, `like` (the format that has the others), and the `models` that use it, by
their published templates. `calls.py` reads and writes calls in a format; `constraints` makes its
grammar. Invariant: an unknown format is None, so that the model's output remains text.
"""

import json
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum, auto
from pathlib import Path
from typing import Any

from paceline.decoding.text import SIGN


class Syntax(StrEnum):
    """The notation of arguments."""

    JSON = auto()
    """{"city": "Paris"}"""
    TAGS = auto()
    """<parameter=city>Paris</parameter>: values between tags, strings without quotes"""
    PYTHON = auto()
    """city="Paris", days=[1, 2]: keyword arguments of a Python call"""
    BRACES = auto()
    """{city:<|"|>Paris<|"|>,days:[1,2]}: bare keys, and strings between tags"""


@dataclass(frozen=True, slots=True)
class Tags:
    """Parts of an argument in the syntax TAGS: `open`, its name, `middle`, its value, `close`."""

    open: str
    middle: str
    close: str
    after: str = "\n"
    """White space after an argument."""
    flagged: bool = False
    """True if a flag before `middle` marks a value as a string; others are JSON."""
    cdata: bool = False
    """True if a string with `<`, `&` or a line break is between `<![CDATA[` and `]]>`."""

    def head(self, *, is_text: bool) -> str:
        """Return the text between an argument's name and its value."""
        flag = str(is_text).lower()
        return f'" string="{flag}{self.middle}' if self.flagged else self.middle

    @property
    def name(self) -> re.Pattern[str]:
        """A pattern of argument names that can be written."""
        return re.compile(rf"[^{re.escape(self.middle[0])}\n]*")


@dataclass(frozen=True, slots=True)
class ToolForm:
    """The tool call format of a model family.

    A call is `before`, the function's name, `after`, the arguments, `end`. A group is `mark`,
    `lead`, its calls separated by `between`, and `close`; a response has groups separated by
    `separator`. In `HERMES`, each call has its own line:

        <tool_call>                                             mark, lead
        {"name": "add", "arguments": {"a": 1}}                  before add after {"a": 1} end
        </tool_call>                                            close
    """

    name: str
    signs: tuple[re.Pattern[str], ...]
    """Patterns that all occur in templates of this format."""
    mark: str
    """The text that begins a group."""
    lead: str
    """Text between the tag and the first call."""
    before: str
    after: str
    end: str
    close: str
    syntax: Syntax
    tags: Tags = Tags("", "", "")
    """Tags for the syntax TAGS."""
    between: str | None = None
    """None: a group has one call."""
    separator: str = ""
    quote: str = ""
    """The tag around strings, in the syntax BRACES."""
    optional: tuple[str, ...] = ()
    """Parts at the beginning of `after` that a model may omit."""
    label: tuple[str, str] | None = None
    """A tag and a regular expression for the call's number or id after the function's name."""
    bare: bool = False
    """True if a call begins a response, and needs no tag."""
    single: bool = False
    """True if the templates allow one call per response."""
    channels: bool = False
    """True if the tag also begins other messages (harmony)."""
    tokens: tuple[str, ...] = ()
    """Parts of these texts that are one token in the vocabularies of such models."""
    id_length: int | None = None
    """The length of a call's id, of letters and digits, if the templates require one."""

    @property
    def as_object(self) -> bool:
        """True if a call is a JSON object."""
        return self.before.startswith("{")

    @property
    def keyed(self) -> bool:
        """True if a call's object has the function's name as its only key."""
        return self.before == '{"'

    def signed(self) -> "ToolForm":
        """Return the format with a sign before each tag: the same letters without it are text."""
        return replace(self, mark=SIGN + self.mark)

    def new_id(self) -> str:
        """Return an id for a call, as the templates require."""
        length = self.id_length
        return secrets.token_hex(length)[:length] if length else f"call_{secrets.token_hex(12)}"


NAME = re.compile(r"[\w.:/\-]*")
"""A function's name in a call that is not a JSON object."""


def _form(name: str, table: Mapping[str, Mapping[str, Any]]) -> ToolForm:
    entry = dict(table[name])
    while "like" in entry:
        entry = {**table[entry.pop("like")], **entry}
    del entry["models"]
    for key in ("tokens", "optional", "label"):
        if key in entry:
            entry[key] = tuple(entry[key])
    entry["signs"] = tuple(map(re.compile, entry["signs"]))
    entry["syntax"] = Syntax(entry["syntax"])
    if "tags" in entry:
        entry["tags"] = Tags(**entry["tags"])
    return ToolForm(name, **entry)


_TABLE = json.loads(Path(__file__).with_name("forms.json").read_text(encoding="utf-8"))

FORMS = {name: _form(name, _TABLE) for name in _TABLE}
"""A model's format is the first whose signs are all in its template."""

HERMES = FORMS["hermes"]


def tool_form(template: str | None) -> ToolForm | None:
    """Return the format of a chat template, or None if its tools are in an unknown format.

    Templates without tools use `HERMES`, which the prompt then describes, unless they have calls
    like DeepSeek V3.1's.
    """
    if template is None:
        return HERMES
    known = [form for form in FORMS.values() if all(sign.search(template) for sign in form.signs)]
    if "tools" in template:
        return known[0] if known else None
    deepseek = FORMS["deepseek"]
    return deepseek if deepseek in known and "```json" not in template else HERMES
