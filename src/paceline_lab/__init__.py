"""The lab: measurements against other runtimes, of servers and of recordings; training of drafters.

Entry points in pyproject.toml add its commands to paceline, which knows no name of this package.
"""

import paceline  # noqa: F401  (turns off what other packages would report)
