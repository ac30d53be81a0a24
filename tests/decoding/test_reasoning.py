"""Separation of reasoning from the response, for any tokenization."""

from collections.abc import Sequence
from typing import NamedTuple

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from paceline.decoding.reasoning import ReasoningMarks, ReasoningStream

TAGS = ReasoningMarks(("<think>",), ("</think>",), {})
OPENED = ReasoningMarks(("<think>",), ("</think>",), {}, inside=True)
WRAPPED = ReasoningMarks(("<think>",), ("</think>",), {}, wrap=("<response>", "</response>"))
GRANITE = ReasoningMarks(
    ("Here is my thought process:", "Here's my thought process:"),
    ("Here is my response:", "Here's my response:"),
    {},
)
HIDDEN = {100: "<think>", 101: "</think>"}
TOKENS = ReasoningMarks(("<think>",), ("</think>",), HIDDEN)
GEMMA = ReasoningMarks(
    ("<|channel>",), ("<channel|>",), {100: "<|channel>", 101: "<channel|>"}, label="thought\n"
)
HARMONY_MARKS = {200: "<|start|>", 201: "<|channel|>", 202: "<|message|>", 203: "<|end|>"}
HARMONY = ReasoningMarks(
    ("<|start|>", "<|channel|>", "<|message|>"), ("<|end|>",), HARMONY_MARKS, channels=True
)


class ParsedResponse(NamedTuple):
    text: str
    reasoning: str
    reasoning_tokens: int
    texts: list[str]
    thoughts: list[str]


def read(
    pieces: Sequence[str | int], thoughts: ReasoningMarks, stops: Sequence[str] = ()
) -> ParsedResponse:
    """Read a response with these tokens: texts, and ids of tokens without text."""
    words = dict(enumerate(piece for piece in pieces if isinstance(piece, str)))
    place = iter(words)
    tokens = [piece if isinstance(piece, int) else next(place) for piece in pieces]
    shown = {1000: "<think>"}  # a mark that decoding keeps
    stream = ReasoningStream(
        lambda ids: "".join(words.get(i, shown.get(i, "")) for i in ids), stops, thoughts
    )
    results = []
    for token in tokens:
        results.append(stream.push(token))
        if stream.stopped_by is not None:
            break
    else:
        results.append(stream.finish())
    texts, told = [item.final for item in results], [item.reasoning for item in results]
    return ParsedResponse("".join(texts), "".join(told), stream.reasoning_tokens, texts, told)


FORMS = [
    (TAGS, "<think>\nlet me see\n</think>\n\nIt is 4.", "let me see", "It is 4."),
    (TAGS, "It is 4.", "", "It is 4."),
    (TAGS, "\n It is 4.\n", "", "\n It is 4.\n"),
    (TAGS, "<think></think>It is 4.", "", "It is 4."),
    (TAGS, "\n\n<think>\n\n</think>\n\nIt is 4.", "", "It is 4."),
    (TAGS, "It is <think>not</think> 4.", "", "It is <think>not</think> 4."),
    (TAGS, "</think>It is 4.", "", "</think>It is 4."),
    (TAGS, "<thin air", "", "<thin air"),
    (TAGS, "<think>a < b </thin> c </think>d", "a < b </thin> c", "d"),
    (TAGS, "<think>never ends ", "never ends", ""),
    (TAGS, "<think>one</think> <think>two</think> 4.", "one\n\ntwo", "4."),
    (TAGS, "<think>é</think>é", "é", "é"),
    (TAGS, "", "", ""),
    (TAGS, " ", "", " "),
    (OPENED, "let me see\n</think>\n\nIt is 4.", "let me see", "It is 4."),
    (OPENED, "It is 4.", "It is 4.", ""),
    (OPENED, "</think>It is 4.", "", "It is 4."),
    (WRAPPED, "<think>hm</think><response>It is 4.</response>", "hm", "It is 4."),
    (WRAPPED, "<think>hm</think>\n<response>\nIt is\n4.\n</response>\n", "hm", "It is\n4.\n"),
    (WRAPPED, "<think>hm</think><response>It is 4.\n ", "hm", "It is 4.\n "),
    (WRAPPED, "<think>hm</think>\nIt is <response>", "hm", "It is <response>"),
    (WRAPPED, "<think>hm</think><response>It is </resp", "hm", "It is </resp"),
    (WRAPPED, "<response>It is 4.</response>", "", "<response>It is 4.</response>"),
    (GRANITE, "Here is my thought process: hm Here is my response: 4.", "hm", "4."),
    (GRANITE, "Here's my thought process: hm Here's my response: 4.", "hm", "4."),
    (GRANITE, "Here is my answer: 4.", "", "Here is my answer: 4."),
]


@pytest.mark.parametrize(("thoughts", "whole", "reasoning", "text"), FORMS)
@settings(max_examples=20)
@given(at=st.lists(st.integers(0, 80), max_size=12))
@example(at=[])
@example(at=[*range(80)])
def test_text_delimiters_separate_reasoning_in_any_tokenization(
    thoughts: ReasoningMarks, whole: str, reasoning: str, text: str, at: list[int]
):
    ends = sorted(place % (len(whole) + 1) for place in at)
    pieces = [whole[i:j] for i, j in zip([0, *ends], [*ends, len(whole)], strict=True)]
    result = read(pieces, thoughts)
    assert (result.text, result.reasoning) == (text, reasoning)
    # Emitted text never changes: at each step it is a prefix of the whole.
    for shown, final in ((result.texts, text), (result.thoughts, reasoning)):
        for end in range(len(shown) + 1):
            assert final.startswith("".join(shown[:end]))


SHOWN = {1000: "<think>", 101: "</think>"}
SEEN = ReasoningMarks(("<think>",), ("</think>",), SHOWN)
SEEN_OPENED = ReasoningMarks(("<think>",), ("</think>",), SHOWN, inside=True)
FINAL = [203, 200, "assistant", 201, "final", 202, "It is 4."]
CALL = [203, 200, "assistant", 201, "commentary to=functions.now ", "json", 202, "{}"]

BY_TOKENS: list[tuple[ReasoningMarks, list[str | int], str, str, int | None]] = [
    (TOKENS, [100, "so", " 4", 101, "\n\n", "It", " is", " 4."], "so 4", "It is 4.", 4),
    (TOKENS, ["<", "think", ">", "no", "</think>"], "", "<think>no</think>", 0),
    (SEEN, ["It", " is ", 1000, " 4.", 101], "", "It is <think> 4.", None),
    (SEEN_OPENED, ["\n", 1000, "so", 101, "4."], "so", "4.", 4),  # the prompt also opened it
    (TAGS, [" ", "<th", "ink>", "a", "b", "</th", "ink>", "c"], "ab", "c", 7),
    (TAGS, [" ", "<th", "ere"], "", " <there", 0),
    (OPENED, ["a", "</think>", "\n", "b"], "a", "b", 2),
    (GEMMA, [100, "thought\n", "let me see", 101, "It is 4."], "let me see", "It is 4.", None),
    (GEMMA, [100, "thou", "ght", "\n", "hm", 101, "It is 4."], "hm", "It is 4.", None),
    (GEMMA, [100, "let me see", 101, "It is 4."], "let me see", "It is 4.", None),
    (GEMMA, [100, "thou", " art", 101, "4."], "thou art", "4.", None),
    (HARMONY, [201, "analysis", 202, "let", " me", *FINAL], "let me", "It is 4.", 6),
    # Calls of functions stay in the text.
    (
        HARMONY,
        [201, "analysis", 202, "hm", *CALL],
        "hm",
        "commentary to=functions.now json{}",
        None,
    ),
    (
        HARMONY,
        [200, "assistant to=functions.now", 201, "commentary", 202, "{}"],
        *("", "assistant to=functions.now commentary{}", None),
    ),
    (
        HARMONY,
        [201, "analysis to=functions.now", 202, "{}"],
        *("", "analysis to=functions.now{}", None),
    ),
    (HARMONY, [201, "commentary", 202, "I will look.", 203], "", "I will look.", None),
]


@pytest.mark.parametrize(("marks", "pieces", "reasoning", "text", "tokens"), BY_TOKENS)
def test_token_delimiters_are_matched_by_id_and_reasoning_tokens_counted(
    marks: ReasoningMarks, pieces: list[str | int], reasoning: str, text: str, tokens: int | None
):
    result = read(pieces, marks)
    assert (result.reasoning, result.text) == (reasoning, text)
    assert tokens in (None, result.reasoning_tokens)


@pytest.mark.parametrize("stop", ["see", "\n", "<", "think"])
def test_a_stop_string_ends_the_response_but_not_reasoning(stop: str):
    whole = f"<think>let me see\nit</think>It is {stop} 4."
    for pieces in ([*whole], [whole[:4], whole[4:20], whole[20:]]):
        result = read(pieces, TAGS, [stop])
        assert (result.text, result.reasoning) == ("It is ", "let me see\nit")
