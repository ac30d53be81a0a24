"""Runs Core ML packages without Core ML, to verify their graphs; see `model.py`."""

from paceline.engines.coreml.rehearsal.model import RehearsalModel, RehearsalState, Work
from paceline.engines.coreml.rehearsal.plan import OpWork

__all__ = ["OpWork", "RehearsalModel", "RehearsalState", "Work"]
