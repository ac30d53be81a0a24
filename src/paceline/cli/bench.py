"""`paceline bench`: measurements, which other packages add; the lab's are in this distribution."""

from paceline.cli.options import group

app = group("Measure speed-ups, and keep records of them.")


@app.callback()
def _bench() -> None:
    """Measure and record; the group's help is shown."""
