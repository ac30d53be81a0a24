"""Runs Core ML packages without Core ML, to verify their graphs; see `model.py`."""

from paceline_coreml.rehearsal.model import RehearsalModel, RehearsalState

__all__ = ["RehearsalModel", "RehearsalState"]
