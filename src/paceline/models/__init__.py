"""Finding, fetching and reading model files; tokenizer and chat template.

`resolve` turns what a user calls a model into `ModelFiles`, which an engine can open.
"""

from paceline.models.cache import cache_dir
from paceline.models.checkpoint import MLX_SUFFIX
from paceline.models.files import ModelFiles
from paceline.models.library import (
    CORE_ML_SUFFIX,
    Listed,
    check_models,
    convert,
    core_ml_folder,
    list_models,
    pull,
    resolve,
    resolve_drafter,
)
from paceline.models.progress import QUIET, Progress
from paceline.models.registry import DEFAULT_MODEL, settings_of
from paceline.models.source import Origin, open_origin
from paceline.models.template import ChatTemplate
from paceline.models.tokenizer import Tokenizer

__all__ = [
    "CORE_ML_SUFFIX",
    "DEFAULT_MODEL",
    "MLX_SUFFIX",
    "QUIET",
    "ChatTemplate",
    "Listed",
    "ModelFiles",
    "Origin",
    "Progress",
    "Tokenizer",
    "cache_dir",
    "check_models",
    "convert",
    "core_ml_folder",
    "list_models",
    "open_origin",
    "pull",
    "resolve",
    "resolve_drafter",
    "settings_of",
]
