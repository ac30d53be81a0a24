"""Static checks of a Core ML artifact for operations that leave the Neural Engine, or fail there.

They read programs but run nothing, and need neither a Mac nor torch. Rules come from published
measurements on Macs, and have a source and a confidence. A clean report does not prove residency,
which needs a plan on a Mac (`paceline coreml residency`).

Invariant: only well-established rules fail. Contested or single observations warn.
"""

from paceline_coreml.lint.rules import Finding
from paceline_coreml.lint.run_rules import lint, report

__all__ = ["Finding", "lint", "report"]
