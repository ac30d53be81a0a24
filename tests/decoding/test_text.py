from collections.abc import Callable, Sequence

from hypothesis import example, given
from hypothesis import strategies as st

from paceline.decoding.text import TextStream
from support.errors import raises

BROKEN = "\ufffd"


def bytewise(pieces: Sequence[bytes]) -> Callable[[Sequence[int]], str]:
    return lambda ids: b"".join(pieces[i] for i in ids).decode("utf-8", "replace")


def pushed(stream: TextStream, count: int) -> list[str]:
    """Final text of tokens 0, 1, ... until a stop string, and of the end."""
    pieces = []
    for token in range(count):
        pieces.append(stream.push(token).final)
        if stream.stopped_by is not None:
            return pieces
    return [*pieces, stream.finish().final]


def cut(data: bytes, at: Sequence[int]) -> list[bytes]:
    ends = sorted(place % (len(data) + 1) for place in at)
    return [data[i:j] for i, j in zip([0, *ends], [*ends, len(data)], strict=True)]


cuts = st.lists(st.integers(0, 999), max_size=60)

# A few letters of one to four bytes, so that stop strings occur.
scripts = st.text(st.sampled_from("abcé漢😀\u0301\n"), max_size=60)


@given(text=st.text(max_size=60) | scripts, at=cuts)
def test_the_last_token_of_a_character_emits_it(text: str, at: list[int]):
    tokens = cut(text.encode(), at)
    stream = TextStream(bytewise(tokens))
    shown, run = "", b""
    for token, piece in enumerate(tokens):
        shown += stream.push(token).final
        run += piece
        assert shown == run.decode("utf-8", "ignore")
    assert shown + stream.finish().final == text


@given(data=st.binary(max_size=60), at=cuts)
# A broken character at the end, and then nothing but tokens without text (special ones).
@example(data=b"a\xf0\x9f", at=[3] * 40)
@example(data=b"a\xf0\x9f b", at=[3] * 40)
def test_invalid_bytes_become_the_decoders_replacement(data: bytes, at: list[int]):
    tokens = cut(data, at)
    pieces = pushed(TextStream(bytewise(tokens)), len(tokens))
    assert "".join(pieces) == data.decode("utf-8", "replace")


@given(
    text=scripts,
    at=cuts,
    stops=st.lists(st.text("abcé漢😀\n", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_text_ends_before_the_earliest_stop_string_without_any_part_of_it(
    text: str, at: list[int], stops: list[str]
):
    tokens = cut(text.encode(), at)
    # Reference: search the whole text after every token.
    expected, count = text, len(tokens)
    for end in range(1, len(tokens) + 1):
        known = b"".join(tokens[:end]).decode("utf-8", "ignore")
        met = [known.index(stop) for stop in stops if stop in known]
        if met:
            expected, count = known[: min(met)], end
            break
    stream = TextStream(bytewise(tokens), stops)
    pieces = pushed(stream, len(tokens))
    assert "".join(pieces) == expected
    if stream.stopped_by is not None:
        assert len(pieces) == count, "it stops with the token that completes the string"
        assert text[len(expected) :].startswith(stream.stopped_by)
        assert stream.stopped_by in stops
    else:
        assert not any(stop in text for stop in stops)
    # No emitted text can become part of a stop string.
    shown = ""
    for end, piece in enumerate(pieces[: count - 1], start=1):
        shown += piece
        known = b"".join(tokens[:end]).decode("utf-8", "ignore")
        open_ends = [known[i:] for i in range(len(shown))]
        assert not any(stop.startswith(rest) for stop in stops for rest in open_ends), shown


@given(text=scripts, at=cuts, stop=st.text("abc", min_size=1, max_size=3))
def test_only_a_possible_stop_string_prefix_is_held_back(text: str, at: list[int], stop: str):
    tokens = cut(text.encode(), at)
    stream = TextStream(bytewise(tokens), [stop])
    shown, run = "", b""
    for token, piece in enumerate(tokens):
        shown += stream.push(token).final
        run += piece
        if stream.stopped_by is not None:
            break
        held = run.decode("utf-8", "ignore")[len(shown) :]
        assert stop.startswith(held)
        assert len(held) < len(stop)


def stream_of(tokens: Sequence[str | bytes], *stops: str) -> TextStream:
    pieces = [token.encode() if isinstance(token, str) else token for token in tokens]
    return TextStream(bytewise(pieces), stops)


def test_the_final_text_may_complete_a_stop_string():
    # A broken character is final only at the end.
    stream = stream_of(["ab", b"\xf0\x9f"], f"b{BROKEN}")
    assert [stream.push(0).final, stream.push(1).final] == ["a", ""]
    assert stream.stopped_by is None
    assert stream.finish().final == ""
    assert stream.stopped_by == f"b{BROKEN}"


def test_a_tokenizer_that_strips_the_first_space_keeps_inner_spaces():
    # As in sentencepiece: tokens decode differently at the start of a text.
    words = [" the", " road", " goes", " ever", " on"] * 8
    stream = TextStream(lambda ids: "".join(words[i] for i in ids).removeprefix(" "))
    assert "".join(pushed(stream, 40)) == "".join(words).removeprefix(" ")


def test_decoding_work_per_token_does_not_grow_with_the_response():
    lengths: list[int] = []

    def decode(ids: Sequence[int]) -> str:
        lengths.append(len(ids))
        return "ab" * len(ids)

    stream = TextStream(decode)
    for token in range(500):
        stream.push(token)
    assert max(lengths) < 25


def test_an_empty_stop_string_is_rejected():
    for stops in ([""], ["a", ""]):
        with raises(ValueError, "empty"):
            stream_of(["a"], *stops)
