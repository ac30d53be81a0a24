"""How the common kinds of option are declared: `typer.Option` with a parser and a metavar."""

from functools import partial
from pathlib import Path

from typer import Option

from paceline.cli import complete, numbers

count = partial(Option, parser=numbers.COUNT)
file = partial(Option, parser=Path, metavar="FILE")
folder = partial(Option, parser=Path, metavar="FOLDER")
several = partial(Option, default_factory=list, show_default=False)
drafters = partial(several, "--drafter", autocompletion=complete.drafters)
