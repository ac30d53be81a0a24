"""Imports matplotlib, whose cache of fonts is in paceline's cache folder instead of the home."""

import os
from typing import Any

from paceline.models import cache_dir


def import_matplotlib() -> Any:
    """The package, with `figure`. Raises ImportError if it is not installed."""
    os.environ.setdefault("MPLCONFIGDIR", str(cache_dir() / "matplotlib"))
    import matplotlib.figure

    return matplotlib
