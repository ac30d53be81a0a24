"""Model names, files and metadata; tokenizers and chat templates.

`resolve` turns a model's name into `ModelFiles`, which an engine can open. This is the only entry
point: other packages import nothing from the modules inside.
"""

from paceline.models.checkpoints import read_facts
from paceline.models.files import ModelFiles, open_folder
from paceline.models.gguf.support import memory_needed
from paceline.models.hub import go_offline
from paceline.models.installed import (
    ModelEntry,
    check_models,
    find_removal,
    list_drafters,
    list_models,
    removal_of,
)
from paceline.models.manifest import GENERATION, TEMPLATE, TOKENIZER, Facts, Pooling, read_manifest
from paceline.models.names import CORE_ML_SUFFIX, DEFAULT_MODEL, settings_of
from paceline.models.prepare import core_ml_folder
from paceline.models.resolver import cached_drafter, open_origin, pull, resolve, resolve_drafter
from paceline.models.templates import ChatTemplate, start_templates
from paceline.models.templates.marks import Thinking, infill_of
from paceline.models.templates.tokenizer import TokenBytes, Tokenizer, check_unicode
from paceline.storage.progress import QUIET, Progress
from paceline.system.machine import cache_dir
