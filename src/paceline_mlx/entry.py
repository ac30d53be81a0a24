"""The engine as an entry point: without mlx-lm, importing it raises MissingExtra.

So it is an error before a model is fetched; all else here imports MLX as it is.
"""

import importlib.util

from paceline.errors import MissingExtra, pip_install

if importlib.util.find_spec("mlx_lm") is None:
    raise MissingExtra(f"the engine mlx needs mlx-lm; install it with `{pip_install('mlx')}`")

from paceline_mlx.engine import MlxEngine

__all__ = ["MlxEngine"]
