"""Openings that a model continues to prompts, with varied topics, tasks and languages.

Without them, a small model writes a few kinds of questions again and again. A system message or
the first words of a question vary its topics. The prompt does not include the system message, but
includes the first words. Independent of engines.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.errors import ModelError
from paceline.models import ModelFiles

FREE, FOLLOW_UP = "free", "follow-up"

_FREE_SHARE = 3
"""The reciprocal of the share of openings that are empty user messages."""

_MARK = "\u2063paceline\u2063"

_SYSTEM = {
    "arithmetic": "You solve arithmetic and word problems step by step.",
    "programming": "You are a senior programmer who answers questions about code.",
    "science": "You explain physics, chemistry and biology to students.",
    "history": "You answer questions about history and geography.",
    "writing": "You write stories, poems and scenes as the user wishes.",
    "work": "You help with e-mails, reports and plans at work.",
    "data": "You extract facts from a text that the user gives, as a list or as JSON.",
    "role": "You play the role that the user describes.",
    "German": "Du hilfst auf Deutsch.",
    "Spanish": "Ayudas en español.",
    "French": "Tu aides en français.",
    "Chinese": "你用中文回答问题。",
}
"""Kind -> system message."""

_FIRST_WORDS = {
    "code": (
        *(
            "Write a Python function that",
            "Write a SQL query that",
            "What does this code do?\n\n```",
        ),
        *("Fix the bug in this JavaScript:\n\n```js\n", "Write a shell command to"),
        *("Write an HTML page with", "How do I read a file in"),
    ),
    "arithmetic": ("If a train", "A shop sells", "What is the sum of", "Solve the equation"),
    "rewriting": (
        *("Rewrite the following sentence", "Correct the grammar of", "Translate into German:"),
        *("Summarize the following text:", "Turn this list into a table:", "Shorten this e-mail:"),
    ),
    "explaining": (
        *("Explain the difference between", "What is the capital of", "Why does", "How does a"),
        *("Who was", "What happened in", "Compare", "What are the advantages of"),
    ),
    "writing": (
        *("Write a short story about", "Write a poem about", "Imagine that", "Write a dialogue"),
        *("Give me ten ideas for", "Describe a", "Write a letter to"),
    ),
    "advice": ("How can I", "Should I", "I want to", "My friend", "Make a plan for"),
    "cooking": ("How do I cook", "Give me a recipe for", "Which ingredients"),
    "health": ("What are the symptoms of", "Is it healthy to", "How can I sleep"),
    "extraction": ("Extract all names from this text:", "List the main points of"),
    "choosing": ("Which of these is correct?", "Classify the following", "True or false:"),
    "German": ("Was ist", "Schreibe", "Wie kann ich"),
    "Spanish": ("¿Qué es", "Escribe", "¿Cómo puedo"),
    "French": ("Qu'est-ce que", "Écris", "Comment"),
    "Chinese": ("什么是", "请写", "如何"),
    "Japanese": ("なぜ", "教えて"),
    "Russian": ("Что такое", "Напиши", "Как"),
}
"""Kind -> first words of questions of that kind, which the model continues."""


_TEXTS = (
    *("The", "In the", "A", "I", "It is", "We", "This", "When", "Once upon a time", "Chapter 1"),
    *("Question:", "Dear", "How to", "#", "1.", "Abstract", '{"', "import", "<html>", "def ", "- "),
)
"""First words of texts for a model without a chat template, in addition to those of questions."""


WAY_OUT = "give prompts of your own with --prompts FILE (JSON lines with prompt)"


@dataclass(frozen=True, slots=True)
class Opening:
    """Text that the model continues to a user message."""

    text: str
    """The chat template's text up to the message, and the message's first words."""
    kind: str = ""
    first_words: str = ""
    """First words of the message; no space at the end."""
    before: tuple[Mapping[str, str], ...] = ()
    """The messages before it: a question of the user and its answer."""
    is_text: bool = False
    """True for the beginning of a text, without a chat template: the prompt is its first tokens."""


def user_opening(files: ModelFiles, before: Sequence[Mapping[str, Any]] = ()) -> str:
    """Return the chat template's text before a user message, after the messages `before`.

    Raises ModelError without a chat template, or if it omits the user message.
    """
    text = files.template.render([*before, {"role": "user", "content": _MARK}])
    opening, mark, _ = text.partition(_MARK)
    if not mark:
        raise ModelError(f"the chat template of {files.name} omits the user message")
    return opening


def openings(files: ModelFiles) -> list[Opening]:
    """Return a model's openings, in the order of their use.

    A model without a chat template writes the beginnings of texts, and continues them later. Raises
    ModelError for a chat template without text before a user message.
    """
    free: Iterator[Opening]
    if files.chat_template is None:
        led = [Opening(words, kind, words, is_text=True) for kind, words in _by_turns(_FIRST_WORDS)]
        free = itertools.cycle([Opening(words, FREE, words, is_text=True) for words in _TEXTS])
    else:
        text = _free_opening(files)
        worded = [Opening(f"{text}{words}", kind, words) for kind, words in _by_turns(_FIRST_WORDS)]
        led = [
            Opening(user_opening(files, [{"role": "system", "content": system}]), kind)
            for kind, system in _SYSTEM.items()
        ]
        pairs = itertools.zip_longest(worded, led)
        led = [opening for pair in pairs for opening in pair if opening is not None]
        free = itertools.repeat(Opening(text, FREE))
    return [
        opening
        for place, other in enumerate(led)
        for opening in ([next(free), other] if place % (_FREE_SHARE - 1) == 0 else [other])
    ]


def follow_ups(files: ModelFiles, chats: Sequence[tuple[str, str]]) -> list[Opening]:
    """Return openings of second turns, one after each question and its answer."""
    chosen = []
    for question, answer in chats:
        before = (
            {"role": "user", "content": question},
            {"role": "assistant", "content": answer},
        )
        chosen.append(Opening(user_opening(files, before), FOLLOW_UP, before=before))
    return chosen


def mixed(first: Sequence[Opening], second: Sequence[Opening], share: int) -> list[Opening]:
    """Return `first`, repeated as needed, with one of `second` after each `share` of them."""
    if not second:
        return list(first)
    again = itertools.cycle(first)
    return [opening for other in second for opening in (*itertools.islice(again, share), other)]


def _free_opening(files: ModelFiles) -> str:
    try:
        text = user_opening(files)
    except ModelError as error:
        raise ModelError(f"{error}; {WAY_OUT}") from error
    if not text.strip():
        raise ModelError(
            f"the chat template of {files.name} has nothing before a user's message that it could "
            f"continue; {WAY_OUT}"
        )
    return text


def _by_turns(words: dict[str, tuple[str, ...]]) -> Iterator[tuple[str, str]]:
    """Yield (kind, first words), one of each kind before the second of any."""
    for row in itertools.zip_longest(*words.values()):
        for kind, first_words in zip(words, row, strict=True):
            if first_words is not None:
                yield kind, first_words
