"""Core ML for paceline: an engine, the conversion of models for it, and checks of them.

Entry points in pyproject.toml add the engine and the commands to paceline, which knows no name of
this package.
"""

import logging

import paceline  # noqa: F401  (turns off what coremltools and others would report)

# coremltools logs what it lacks off a Mac, and versions of torch that it was not tested with.
logging.getLogger("coremltools").setLevel(logging.ERROR)
