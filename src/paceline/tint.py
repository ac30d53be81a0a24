"""An answer on a terminal, with what was guessed marked: underlined, and green where it may be.

Rich decides what a terminal may get: colours not with NO_COLOR, and nothing but the text where
standard output is no terminal, unless FORCE_COLOR is set.
"""

from collections.abc import Callable, Sequence

from paceline.decoding.generation import Step
from paceline.decoding.text import Decode
from paceline.pieces import Pieces

GUESSED = "green underline"


def tinted(decode: Decode, stops: Sequence[str] = ()) -> Callable[[Step], None]:
    """Prints the steps of one answer; `decode` and `stops` are those of the answer."""
    from rich.console import Console
    from rich.segment import Segment, Segments
    from rich.style import Style

    console = Console()
    guessed = Style.parse(GUESSED)
    pieces = Pieces(decode, stops)

    def show(step: Step) -> None:
        found = pieces.of(step)
        stood = "".join(found[: step.accepted])
        own = "".join(found[step.accepted :])
        # No wrapping and no tabs made spaces: the text as it is.
        console.print(Segments([Segment(stood, guessed), Segment(own)]), end="", crop=False)

    return show
