"""The forms in which models write tool calls, and the choice of one by a chat template.

They are in `tool_forms.json`, in the order in which their signs are looked for: the fields of a
`ToolForm`, `like` the form that has the others, and the `models` that write so, by their published
templates. Invariant: a template of an unknown form gets none, so that what the model writes remains
text.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.constraints.call_form import Syntax, Tags, ToolForm

_LISTS = ("tokens", "optional", "label")


def _form(name: str, table: Mapping[str, Mapping[str, Any]]) -> ToolForm:
    entry = dict(table[name])
    while "like" in entry:
        entry = {**table[entry.pop("like")], **entry}
    del entry["models"]
    lists = {key: tuple(entry[key]) for key in _LISTS if key in entry}
    entry |= {"signs": tuple(map(re.compile, entry["signs"])), "syntax": Syntax[entry["syntax"]]}
    tags = Tags(**entry["tags"]) if "tags" in entry else None
    return ToolForm(name, **{**entry, **lists, "tags": tags})


def _forms() -> dict[str, ToolForm]:
    text = Path(__file__).with_name("tool_forms.json").read_text(encoding="utf-8")
    table = json.loads(text)
    return {name: _form(name, table) for name in table}


FORMS = _forms()
"""The first form whose signs are all in the template is the model's."""

HERMES = FORMS["hermes"]


def tool_form(template: str | None) -> ToolForm | None:
    """The form of a chat template; None: it has tools in no known form.

    Templates without tools get `HERMES`, which the prompt then describes; if they have calls as
    DeepSeek V3.1's, that form.
    """
    if template is None or "tools" not in template:
        form = FORMS["deepseek"]
        known = template is not None and all(sign.search(template) for sign in form.signs)
        return form if known and "```json" not in (template or "") else HERMES
    forms = FORMS.values()
    return next((form for form in forms if all(sign.search(template) for sign in form.signs)), None)
