"""The lab: measures drafters and other runtimes, replays recordings, and learns tables.

Entry points in pyproject.toml add its commands to paceline, which never names this package.
"""

import paceline  # noqa: F401  (disables the telemetry of other packages)
