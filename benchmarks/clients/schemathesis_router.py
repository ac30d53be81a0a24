"""schemathesis, as in schemathesis_fuzz.py, against a server of several models.

python benchmarks/clients/schemathesis_router.py
"""

from pathlib import Path

from schemathesis_fuzz import PACKAGES, work
from trial import main

if __name__ == "__main__":
    main(__doc__, PACKAGES, work, script=Path(__file__).with_name("routed_server.py"))
