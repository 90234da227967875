"""Side by side with peers: ratios of medians in one interleaved run, and whether they are what we promise.

Machines are shared and noisy, so a time means nothing alone. Every workload runs all its contestants in turns, in one
process, and reports each as a ratio to its first. A ratio holds for one instruction set, so a machine with AVX-512
measures everything twice: as it is, and compiled for AVX2 in another process.
"""

from fenchel_lab.bench.machine import Machine, machine
from fenchel_lab.bench.measure import Measured, Timing, take_turns
from fenchel_lab.bench.report import BEGIN, END, FRONT, OUTPUT, SHORT, Report, Sheet, insert, read, sheet, state
from fenchel_lab.bench.run import Outcome, run, run_for
from fenchel_lab.bench.targets import CHOICES, Target, chosen
from fenchel_lab.bench.workload import Case, Contestant, Goal, Workload
from fenchel_lab.bench.workloads import UnknownWorkloadError, find, workloads

__all__ = [
    "BEGIN",
    "CHOICES",
    "END",
    "FRONT",
    "OUTPUT",
    "SHORT",
    "Case",
    "Contestant",
    "Goal",
    "Machine",
    "Measured",
    "Outcome",
    "Report",
    "Sheet",
    "Target",
    "Timing",
    "UnknownWorkloadError",
    "Workload",
    "chosen",
    "find",
    "insert",
    "machine",
    "read",
    "run",
    "run_for",
    "sheet",
    "state",
    "take_turns",
    "workloads",
]
