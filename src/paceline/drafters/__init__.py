"""Drafters, one file each. A drafter proposes tokens; the target alone decides.

`DrafterSpec` parses a name such as `ngram:min=2,max=5` or `suffix+table`, and `create` makes the
drafters.
"""

from paceline.drafters.factory import (
    DrafterPart,
    DrafterResources,
    DrafterSpec,
    RequestContext,
    create,
    drafter_names,
    shipped,
    slots,
    taps,
)
from paceline.drafters.guarded import Fault, GuardedDrafter
from paceline.drafters.heads import DraftKV, HeadFacts, load_kind, read_facts
from paceline.drafters.kept import KeptDrafter, KeptText
from paceline.drafters.model import DraftModel, ModelDrafter
from paceline.drafters.ngram import NgramDrafter
from paceline.drafters.prediction import PredictionDrafter
from paceline.drafters.probe import Probe
from paceline.drafters.sizes import Sizes, sizes_of
from paceline.drafters.suffix import AnswerHistory, SuffixDrafter
from paceline.drafters.table import Table, TableDrafter

__all__ = [
    "AnswerHistory",
    "DraftKV",
    "DraftModel",
    "DrafterPart",
    "DrafterResources",
    "DrafterSpec",
    "Fault",
    "GuardedDrafter",
    "HeadFacts",
    "KeptDrafter",
    "KeptText",
    "ModelDrafter",
    "NgramDrafter",
    "PredictionDrafter",
    "Probe",
    "RequestContext",
    "Sizes",
    "SuffixDrafter",
    "Table",
    "TableDrafter",
    "create",
    "drafter_names",
    "load_kind",
    "read_facts",
    "shipped",
    "sizes_of",
    "slots",
    "taps",
]
