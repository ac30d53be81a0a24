"""Core ML for paceline: an engine, model conversion, and checks of converted models.

Entry points in pyproject.toml add the engine and commands to paceline, which never imports this
package by name.
"""

import logging

import paceline  # noqa: F401  (disables the telemetry of imported libraries)

# Off a Mac, coremltools warns of missing libraries, and of versions of torch that it does not test.
logging.getLogger("coremltools").setLevel(logging.ERROR)
