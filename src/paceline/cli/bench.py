"""`paceline bench`: measurements, which other packages add; the lab's are in this distribution."""

from paceline.cli.options import group

app = group("Measure speedups, and record them.")


@app.callback()
def _bench() -> None:
    """Measure and record; the group's help is shown."""
