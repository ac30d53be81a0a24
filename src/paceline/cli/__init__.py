"""The command line: one module a command, with its options, its call and what it prints."""

from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code: 0 done, 1 a check failed, 2 the user's mistake."""
    from paceline.cli.app import main as run

    return run(argv)
