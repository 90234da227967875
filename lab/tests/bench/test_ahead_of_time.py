"""Every kernel that is registered for GPUs compiles for sm_90, in a process without Triton's interpreter."""

import os
import subprocess
import sys
from pathlib import Path

LAB = Path(__file__).parents[2]

_PROGRAM = """
import ahead_of_time, gpu_report
seen = {}
for name, call in gpu_report.launches(all_sizes=False):
    for kernel, args, options in ahead_of_time.record(call):
        if kernel.__name__ not in seen:
            seen[kernel.__name__] = ahead_of_time.compile_for("sm_90", kernel, args, options)
print(*sorted(seen))
light = {"rows_kernel", "product_kernel", "project_kernel", "attend_kernel", "queries_kernel", "keys_kernel"}
assert all(each.spilled == 0 for name, each in seen.items() if name in light), seen
"""


def test_every_kernel_compiles_for_sm_90() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["FENCHEL_KERNELS"] = "triton"
    command = [sys.executable, "-c", _PROGRAM]
    done = subprocess.run(command, cwd=LAB, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    maps = {"rows_kernel", "product_kernel", "wide_kernel", "wide_product_kernel", "spill_kernel"}
    maps |= {"spill_product_kernel", "project_kernel", "wide_project_kernel", "spill_project_kernel"}
    programs = {f"{name}{part}_kernel" for name in ("chain", "alignment") for part in ("", "_gradient", "_hessian")}
    attention = {"attend_kernel", "queries_kernel", "keys_kernel", "decode_scores_kernel", "decode_values_kernel"}
    assert set(done.stdout.split()) == maps | programs | attention
