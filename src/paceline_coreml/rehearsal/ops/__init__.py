"""MIL's operations in numpy, as small functions; `OPS` maps names to them (`table.py`)."""

from paceline_coreml.rehearsal.ops import constants, elementwise, products, reductions, shapes
from paceline_coreml.rehearsal.ops.table import OPS, Entry

__all__ = ["OPS", "Entry", "constants", "elementwise", "products", "reductions", "shapes"]
