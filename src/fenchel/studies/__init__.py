"""One module = one figure or table of a paper: a function that returns a Result, and a decorator that registers it.

A chapter is complete in itself; the command line, the report and the tests find it by its module:

    @study("What is shown", source="Who (year), figure 1", order=50)
    def my_chapter(context: Context) -> Result:
        drawing, (axes,) = style.panels(1, 1)
        axes.plot(...)
        return Result("What it means.", figures=[Figure(drawing, caption="…", alt="…", paper="…")])
"""

from fenchel.studies.registry import Context, Study, UnknownStudyError, find, studies, study
from fenchel.studies.result import Figure, Result, Table
from fenchel.studies.runs import Run, run

__all__ = [
    "Context",
    "Figure",
    "Result",
    "Run",
    "Study",
    "Table",
    "UnknownStudyError",
    "find",
    "run",
    "studies",
    "study",
]
