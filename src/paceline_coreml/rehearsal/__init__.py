"""Runs Core ML packages without Core ML, to verify their graphs; see `model.py`."""

from paceline_coreml.rehearsal.model import RehearsalModel, RehearsalState, Work
from paceline_coreml.rehearsal.plan import OpWork

__all__ = ["OpWork", "RehearsalModel", "RehearsalState", "Work"]
