"""Core ML packages run without Core ML, to show that their graphs are right; see `model.py`."""

from paceline.engines.coreml.rehearsal.model import RehearsalModel, RehearsalState, Work
from paceline.engines.coreml.rehearsal.plan import OpWork

__all__ = ["OpWork", "RehearsalModel", "RehearsalState", "Work"]
