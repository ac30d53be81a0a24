"""An answer on a terminal, with what was guessed marked: underlined, and green where it may be.

Rich decides what a terminal may get: colours not with NO_COLOR, and nothing but the text where
standard output is no terminal, unless FORCE_COLOR is set.
"""

from collections.abc import Callable

from paceline.decoding.step import Step

GUESSED = "green underline"


def tinted() -> Callable[[Step], None]:
    """A function that prints the steps of one answer."""
    from rich.console import Console
    from rich.segment import Segment, Segments
    from rich.style import Style

    console = Console()
    guessed = Style.parse(GUESSED)

    def show(step: Step) -> None:
        found = [piece.final for piece in step.pieces]
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
