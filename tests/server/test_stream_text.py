"""Tokens and text of a response that are sent, for any blocks and any end."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.decoding.reasoning import ReasoningMarks, answer_text
from paceline.decoding.types import FinishReason, Piece, Proposal, Step
from paceline.runtime.result import Result, Stats
from paceline.server.api.completions import prompt_pieces
from paceline.server.stream_text import Answer

END = 0
WORDS = [b"", b"a", b"b", b"ab", b"stop", b" ", "é".encode()]
WORDS += [bytes([byte]) for byte in "é😀".encode()]


def decode(tokens: Sequence[int]) -> str:
    return b"".join(WORDS[token] for token in tokens).decode(errors="replace")


def streamed_answer(
    tokens: list[int],
    sizes: list[int],
    stops: Sequence[str],
    end: FinishReason,
    thoughts: ReasoningMarks | None = None,
) -> Answer:
    """Return a response with these tokens in blocks of these sizes, as sent by the scheduler."""
    stream = answer_text(decode, stops, thoughts)
    answer = Answer([END])
    text, reasoning, kept = "", "", list[int]()
    at = 0
    while at < len(tokens):
        size = sizes[at % len(sizes)] if at else 1
        block, new = [], []
        for token in tokens[at : at + size]:
            block.append(token)
            kept.append(token)
            if token == END:
                new.append(stream.finish(Piece(token)))
                break
            new.append(stream.push(token))
            if stream.stopped_by is not None:
                break
        at += size
        over = stream.stopped_by is not None or kept[-1] == END
        if not over and at >= len(tokens):
            new[-1] = stream.finish(new[-1])
            over = True
        new[:-1] = [piece._replace(source="oracle") for piece in new[:-1]]
        step = Step(len(block), new, Proposal(block[:-1], "oracle"), stream.reasoning_tokens)
        text += step.text
        reasoning += step.reasoning
        answer.progress(step)
        if over:
            break
    ended = stream.stopped_by is not None or kept[-1] == END
    result = Result(
        text=text,
        token_ids=kept,
        finish_reason=FinishReason.STOP if ended else end,
        stats=Stats(),
        prompt_tokens=1,
        model="m",
        engine="e",
        drafter="d",
        policy="p",
        exact=True,
        seed=0,
        reasoning=reasoning,
        reasoning_tokens=stream.reasoning_tokens,
    )
    answer.finish(result)
    return answer


MARKED = ReasoningMarks(("b",), (" ",), {2: "b", 5: " "})
"""Two of the words as the marks of thoughts."""


@given(
    st.lists(st.integers(0, len(WORDS) - 1), min_size=1, max_size=30),
    st.lists(st.integers(1, 5), min_size=1, max_size=4),
    st.lists(st.sampled_from(["stop", "ab", "a b", "é", "bb"]), max_size=2),
    st.sampled_from([None, MARKED, replace(MARKED, inside=True)]),
)
def test_sent_tokens_match_the_sent_text(
    tokens: list[int], sizes: list[int], stops: list[str], thoughts: ReasoningMarks | None
):
    answer = streamed_answer(tokens, sizes, stops, FinishReason.LENGTH, thoughts)
    assert (answer.text, answer.reasoning) == (answer.done.text, answer.done.reasoning)
    ids = [piece.token for piece in answer.pieces]
    assert ids == answer.done.token_ids[: len(ids)]
    assert END not in ids
    text, reasoning = ("".join(getattr(p, n) for p in answer.pieces) for n in ("text", "reasoning"))
    assert text.rstrip("\ufffd") == answer.text.rstrip("\ufffd")
    assert reasoning.rstrip("\ufffd") == answer.reasoning.rstrip("\ufffd")
    assert answer.reasoning_tokens <= answer.tokens
    if answer.done.finish_reason == FinishReason.LENGTH:
        assert ids == tokens
        assert answer.reasoning_tokens == answer.done.reasoning_tokens


@pytest.mark.parametrize(
    ("tokens", "stop", "text", "sent"),
    [
        ([1, 4, 1], "stop", "a", [1]),  # the whole token is the stop string
        ([1, 2, END, 1], "stop", "ab", [1, 2]),
        ([END], "stop", "", []),
        ([5, 5, 1], "stop", "  a", [5, 5, 1]),
        ([1, 3, 1], "ba", "aa", [1, 3]),  # a|ab|a: the second is sent with its part
    ],
)
def test_the_stop_token_or_string_is_not_sent(
    tokens: list[int], stop: str, text: str, sent: list[int]
):
    answer = streamed_answer(tokens, [2], [stop], FinishReason.LENGTH)
    assert answer.text == "".join(piece.text for piece in answer.pieces) == text
    assert [piece.token for piece in answer.pieces] == sent


def test_tokens_are_not_sent_before_their_text():
    answer = Answer([END])
    # "b" is held back: it may begin a stop string.
    assert answer.progress(Step(1, [Piece(1, "a", "a")])).pieces[0].token == 1
    assert answer.progress(Step(1, [Piece(2, "b", "")])).pieces == []
    part = answer.progress(Step(1, [Piece(1, "a", "ba")]))
    assert (part.text, [piece.token for piece in part.pieces]) == ("ba", [2, 1])


def test_prompt_tokens_have_their_text():
    assert [piece[:2] for piece in prompt_pieces(decode, [1, 6, 7])] == [
        (1, "a"),
        (6, "é"),
        (7, "\ufffd"),
    ]
