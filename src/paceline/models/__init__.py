"""Finds, fetches and reads model files; tokenizer and chat template.

`resolve` turns a model's name into `ModelFiles`, which an engine can open.
"""

from paceline.models.files import ModelFiles
from paceline.models.installed import Listed, check_models, list_models
from paceline.models.names import CORE_ML_SUFFIX, MLX_SUFFIX
from paceline.models.names.registry import DEFAULT_MODEL, settings_of
from paceline.models.prepare import convert, core_ml_folder
from paceline.models.progress import QUIET, Progress
from paceline.models.resolver import pull, resolve, resolve_drafter
from paceline.models.source import Origin, open_origin
from paceline.models.templates import ChatTemplate
from paceline.models.templates.tokenizer import Tokenizer
from paceline.storage.system import cache_dir

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
