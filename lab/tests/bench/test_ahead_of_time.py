"""Every kernel for GPUs compiles for sm_90, in a process without Triton's interpreter."""

import os
import re
import subprocess
import sys
from pathlib import Path

import fenchel

LAB = Path(__file__).parents[2]
KERNELS = Path(fenchel.__file__).parent / "kernels" / "gpu"

_PROGRAM = """
import ahead_of_time, gpu_report
seen = {}
for name, call in gpu_report.launches(all_sizes=False):
    for kernel, args, options in ahead_of_time.record(call):
        if kernel.__name__ not in seen:
            seen[kernel.__name__] = ahead_of_time.compile_for("sm_90", kernel, args, options)
print(*sorted(seen))
programs = ("chain", "alignment")
assert all(each.spilled == 0 for name, each in seen.items() if not name.startswith(programs)), seen
"""


def test_every_kernel_compiles_for_sm_90() -> None:
    """All that are launched, or named as kernels are, in any file; those of rows and of attention without spills."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["FENCHEL_KERNELS"] = "triton"
    command = [sys.executable, "-c", _PROGRAM]
    done = subprocess.run(command, cwd=LAB, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    code = "\n".join(path.read_text() for path in KERNELS.glob("*.py"))
    written = {*re.findall(r"^def (\w+_kernel)\(", code, re.M), *re.findall(r"\blaunch\(\s*(\w+),", code)}
    assert len(written) >= 20
    assert set(done.stdout.split()) == written
