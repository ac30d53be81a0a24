"""What of a Core ML artifact would leave the Neural Engine or fail there, read off its programs.

Nothing is run and no Mac is needed, nor torch. What stands behind a rule is what others measured on
Macs, named by each rule with how sure it is; a clean report is no proof of residency, which only
a plan on a Mac can show (`paceline coreml residency`).

The rule: only what is firm fails. What is contested, or seen once, warns.
"""

from paceline.tools.coreml.lint.judge import lint, report
from paceline.tools.coreml.lint.rules import Finding

__all__ = ["Finding", "lint", "report"]
