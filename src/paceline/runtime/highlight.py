"""An answer on a terminal, with what was guessed marked: underlined, and green where it may be.

Rich decides what a terminal may get: colours not with NO_COLOR, and nothing but the text where
standard output is no terminal, unless FORCE_COLOR is set.
"""

from collections.abc import Callable, Sequence

from paceline.decoding.generation import Step
from paceline.decoding.reasoning import Thoughts
from paceline.decoding.text import Decode
from paceline.runtime.token_text import Pieces

GUESSED = "green underline"


def tinted(
    decode: Decode, stops: Sequence[str] = (), thoughts: Thoughts | None = None
) -> Callable[[Step], None]:
    """A function that prints the steps of one answer; the arguments are those of the answer."""
    from rich.console import Console
    from rich.segment import Segment, Segments
    from rich.style import Style

    console = Console()
    guessed = Style.parse(GUESSED)
    pieces = Pieces(decode, stops, thoughts)

    def show(step: Step) -> None:
        found = pieces.of(step)
        stood = "".join(found[: step.accepted])
        own = "".join(found[step.accepted :])
        # No wrapping and no tabs made spaces: the text as it is.
        console.print(Segments([Segment(stood, guessed), Segment(own)]), end="", crop=False)

    return show


def dim() -> Callable[[str], None]:
    """A function that prints text to standard error, dim where that is a terminal."""
    from rich.console import Console
    from rich.segment import Segment, Segments
    from rich.style import Style

    console = Console(stderr=True)
    style = Style(dim=True)
    return lambda text: console.print(Segments([Segment(text, style)]), end="", crop=False)
