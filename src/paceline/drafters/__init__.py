"""Drafters, one file each. A drafter proposes tokens; the target alone decides.

`DrafterSpec` parses a name such as `ngram:min=2,max=5` or `suffix+table`, and `create` makes the
drafters.
"""

from paceline.drafters.factory import (
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
from paceline.drafters.heads import DraftKV, HeadFacts, Sizes, load_kind, read_facts, sizes_of
from paceline.drafters.kept import KeptText
from paceline.drafters.model import DraftModel
from paceline.drafters.probe import Probe
from paceline.drafters.suffix import AnswerHistory
from paceline.drafters.table import Table
