"""How much memory this machine has."""

import os


def memory_bytes() -> int:
    """Memory of this machine, in bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
