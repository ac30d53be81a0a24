"""Entry point of the engine. Importing it without mlx-lm raises MissingExtra.

The error thus comes before a model is downloaded; all other modules import MLX unchecked.
"""

import importlib.util

from paceline.errors import MissingExtra, pip_install

if importlib.util.find_spec("mlx_lm") is None:
    raise MissingExtra(f"the engine mlx needs mlx-lm; install it with `{pip_install('mlx')}`")

from paceline_mlx.engine import MlxEngine

__all__ = ["MlxEngine"]
