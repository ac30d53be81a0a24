"""Highlights accepted draft tokens on a terminal: underlined, and green if colours are on.

Rich decides what the terminal supports: no colours with NO_COLOR, and plain text where standard
output is no terminal, unless FORCE_COLOR is set.
"""

from collections.abc import Callable

from paceline.decoding.types import Step

ACCEPTED_STYLE = "green underline"


def highlighter() -> Callable[[Step], None]:
    """Return a function that prints a step with its accepted draft tokens highlighted."""
    from rich.console import Console
    from rich.segment import Segment, Segments
    from rich.style import Style

    console = Console()
    accepted_style = Style.parse(ACCEPTED_STYLE)

    def show(step: Step) -> None:
        texts = [piece.final for piece in step.pieces]
        accepted = "".join(texts[: step.accepted])
        bonus = "".join(texts[step.accepted :])
        # crop=False: lines are not wrapped, and tabs stay tabs.
        console.print(
            Segments([Segment(accepted, accepted_style), Segment(bonus)]), end="", crop=False
        )

    return show


def dim() -> Callable[[str], None]:
    """Return a function that prints text to standard error, dim if that is a terminal."""
    from rich.console import Console
    from rich.segment import Segment, Segments
    from rich.style import Style

    console = Console(stderr=True)
    style = Style(dim=True)
    return lambda text: console.print(Segments([Segment(text, style)]), end="", crop=False)
