"""`paceline bench`: measurements, which other packages add; the lab's are in this distribution."""

from paceline.cli.options import group

app = group()


@app.callback()
def _bench() -> None:
    """Measure."""
