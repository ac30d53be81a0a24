"""A chat as the text of a prompt, and the form of the thoughts that its answer may have.

Joins `models/thinking.py`, which knows templates, with `decoding/reasoning.py`, which divides an
answer.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from paceline.decoding.reasoning import ReasoningMarks
from paceline.models import ModelFiles


class Rendered(NamedTuple):
    """A prompt that the chat template made."""

    text: str
    thoughts: ReasoningMarks | None
    """The form of the answer's thoughts; None: no known one."""


def rendered(
    files: ModelFiles,
    messages: Sequence[Mapping[str, Any]],
    variables: Mapping[str, Any],
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> Rendered:
    """The prompt for an answer to `messages`; `variables` and `tools` are for the template.

    Raises:
        InvalidRequest: the template refuses the messages.
        ModelError: there is no template, or it fails.
    """
    template, thinking = files.template(), files.thinking()
    text = template.render(messages, tools=tools, **variables)
    form = thinking.form
    if form is None:
        return Rendered(text, None)

    def bare() -> str:
        return template.render(messages, tools=tools, **variables, add_generation_prompt=False)

    thoughts = ReasoningMarks(
        form.opens,
        form.closes,
        thinking.tokens_of(form),
        label=form.label,
        wrap=thinking.wrap,
        inside=thinking.inside(text, bare),
        channels=form.channels,
    )
    return Rendered(text, thoughts)
