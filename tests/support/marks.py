"""Arrays that say of every number which row of a call it belongs to."""

import numpy as np

from paceline.tools.coreml.lint.layout import Layout


def marked(layout: Layout, rows: int) -> np.ndarray:
    """An array laid out so, in which every number is the row it belongs to; 0 without rows."""
    shape = [axis.before * (rows if axis.rows else 1) * axis.after for axis in layout.axes]
    found = np.zeros(shape, np.int64)
    for number, axis in enumerate(layout.axes):
        if axis.rows:
            along = np.arange(shape[number]) // axis.after % rows
            found += along.reshape([-1 if n == number else 1 for n in range(len(shape))])
    return found
