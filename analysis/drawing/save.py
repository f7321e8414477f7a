"""Save figures whose labels contain names from a study.

Matplotlib takes the text between two dollar signs for a formula, and raises an error if it is none. An arm or a study
may have any name, also in a folder that comes from somebody else.
"""

from pathlib import Path
from typing import IO, Any

from matplotlib.axis import Axis
from matplotlib.category import StrCategoryFormatter
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.ticker import FixedFormatter, FuncFormatter

_NAME_FORMATTERS = (FixedFormatter, FuncFormatter, StrCategoryFormatter)
"""Formatters of tick labels that we give. The others make labels of numbers, on a logarithmic axis with formulas."""


def save_figure(figure: Figure, target: Path | IO[bytes], **options: Any) -> None:
    """Save a figure with `Figure.savefig`, with every dollar sign in a label as it is.

    The layout is computed once. `savefig` would compute it twice, and again for every other format of the figure.
    """
    artists = figure.findobj()
    axes_of_numbers = [axis for axis in artists if isinstance(axis, Axis) and _labels_numbers(axis)]
    number_labels = {id(label) for axis in axes_of_numbers for label in axis.get_ticklabels(which="both")}
    for text in artists:
        if isinstance(text, Text) and id(text) not in number_labels:
            text.set_parse_math(False)
    if figure.get_layout_engine() is not None:
        figure.draw_without_rendering()
        figure.set_layout_engine(None)  # the axes stay where they are
    figure.savefig(target, **options)


def _labels_numbers(axis: Any) -> bool:
    return not isinstance(axis.get_major_formatter(), _NAME_FORMATTERS)
