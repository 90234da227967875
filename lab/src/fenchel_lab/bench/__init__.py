"""Side by side with peers: ratios of medians in one interleaved run, and whether they are what we promise.

Machines are shared and noisy, so a time means nothing alone. Every workload runs all its contestants in turns, in one
process, and reports each as a ratio to its first.
"""

from fenchel_lab.bench.machine import Machine, machine
from fenchel_lab.bench.measure import Timing, take_turns
from fenchel_lab.bench.report import BEGIN, END, OUTPUT, Report, Sheet, insert, sheet, state
from fenchel_lab.bench.run import Measured, Outcome, run
from fenchel_lab.bench.workload import Case, Contestant, Goal, Workload
from fenchel_lab.bench.workloads import UnknownWorkloadError, find, workloads

__all__ = [
    "BEGIN",
    "END",
    "OUTPUT",
    "Case",
    "Contestant",
    "Goal",
    "Machine",
    "Measured",
    "Outcome",
    "Report",
    "Sheet",
    "Timing",
    "UnknownWorkloadError",
    "Workload",
    "find",
    "insert",
    "machine",
    "run",
    "sheet",
    "state",
    "take_turns",
    "workloads",
]
