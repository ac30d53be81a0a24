"""Arrays whose elements are the row that they belong to."""

import numpy as np

from paceline_coreml.lint.row_layout import Layout


def marked(layout: Layout, rows: int) -> np.ndarray:
    """An array of the layout whose elements are their rows; 0 without rows."""
    shape = [axis.before * (rows if axis.rows else 1) * axis.after for axis in layout.axes]
    result = np.zeros(shape, np.int64)
    for number, axis in enumerate(layout.axes):
        if axis.rows:
            along = np.arange(shape[number]) // axis.after % rows
            result += along.reshape([-1 if n == number else 1 for n in range(len(shape))])
    return result
