"""The lab: measurements of drafters, other runtimes and recordings, and tables that are learnt.

Entry points in pyproject.toml add its commands to paceline, which knows no name of this package.
"""

import paceline  # noqa: F401  (turns off what other packages would report)
