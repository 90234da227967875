"""What a study is: a function that returns a Result, a decorator that registers it, its record, the report.

A chapter is a module of `fenchel_lab.chapters`; the command line, the report and the tests find it there:

    @study("What is shown", source="Who (year), figure 1", order=50)
    def my_chapter(context: Context) -> Result:
        drawing, (axes,) = style.panels(1, 1)
        axes.plot(...)
        return Result("What it means.", figures=[Figure(drawing, caption="…", alt="…", paper="…")])
"""

from fenchel_lab.report.registry import Context, Study, UnknownStudyError, find, studies, study
from fenchel_lab.report.result import Claim, Figure, Result, Table
from fenchel_lab.report.runs import Run, run

__all__ = [
    "Claim",
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
