from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from paceline.decoding.generation import Step
from paceline.decoding.text import TextStream
from paceline.runtime.token_text import Pieces
from support.driver import decode

STOP = "stop"


def steps(tokens: Sequence[int], sizes: Sequence[int], stops: Sequence[str]) -> list[Step]:
    """An answer as a generation gives it, cut into steps of these sizes."""
    text = TextStream(decode, stops)
    found, at = [], 0
    for size in sizes:
        block = tokens[at : at + size]
        at += size
        if not block:
            break
        said = ""
        kept = []
        for token in block:
            kept.append(token)
            said += text.push(token)
            if text.stopped_by is not None:
                break
        if at >= len(tokens) or text.stopped_by is not None:
            said += text.finish()
        found.append(Step(len(kept), kept, said))
        if text.stopped_by is not None:
            break
    return found


@given(
    tokens=st.lists(st.integers(0, 39), min_size=1, max_size=60),
    sizes=st.lists(st.integers(1, 6), min_size=60, max_size=60),
    stops=st.sampled_from([(), ("the",), (".", "and"), ("é",)]),
)
def test_the_pieces_of_a_step_are_its_text(
    tokens: list[int], sizes: list[int], stops: Sequence[str]
):
    pieces = Pieces(decode, stops)
    for step in steps(tokens, sizes, stops):
        found = pieces.of(step)
        assert len(found) == len(step.tokens)
        assert "".join(found) == step.text


def test_a_character_of_several_tokens_is_its_last_ones():
    first, last = 31, 32  # the bytes of é
    pieces = Pieces(decode)
    assert decode([first, last]) == "é"
    assert pieces.of(Step(3, [0, first, last], "aé")) == ["a", "", "é"]


def test_what_was_held_back_until_the_end_is_the_last_ones():
    pieces = Pieces(decode, ["abc"])
    assert pieces.of(Step(1, [0], "")) == [""]
    assert pieces.of(Step(1, [1], "ab")) == ["ab"]


def test_a_token_that_ends_the_answer_has_no_text_even_where_it_could_have():
    pieces = Pieces(decode)
    assert pieces.of(Step(2, [0, 1], "a")) == ["a", ""]
