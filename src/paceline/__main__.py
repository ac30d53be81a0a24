"""The command `paceline`, and `python -m paceline`."""

from paceline.cli.interrupt import stop_at_once


def main() -> int:
    """Run one command; returns the exit code."""
    stop_at_once()
    from paceline.cli.app import main as run

    try:
        return run()
    finally:
        stop_at_once()


if __name__ == "__main__":
    raise SystemExit(main())
