"""What a result was computed with: the version of the package, the commit of its checkout, the processor."""

from __future__ import annotations

import importlib.metadata
import platform
import re
import subprocess
from pathlib import Path


def version() -> str:
    """The version of the installed package."""
    return importlib.metadata.version("fenchel")


def commit() -> str | None:
    """The commit of the checkout that this package runs from, marked if changed; None if it is not in one.

    Changed results do not count: a study that goes on from its records has changed them itself.
    """
    git = ["git", "-C", str(Path(__file__).parent)]
    # An installed package may lie inside somebody else's repository: ask for the file, not the folder.
    tracked = [*git, "ls-files", "--error-unmatch", Path(__file__).name]
    head = [*git, "rev-parse", "HEAD"]
    changed = [*git, "status", "--porcelain", "--untracked-files=no", "--", ":/", ":(top,exclude)docs/results"]
    try:
        subprocess.run(tracked, capture_output=True, check=True)
        found, more = (
            subprocess.run(each, capture_output=True, check=True, text=True).stdout for each in (head, changed)
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return found.strip() + ("-dirty" if more else "")


def cpu_model(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The processor's name as the system tells it."""
    try:
        named = re.search(r"^model name\s*:\s*(.+)$", cpuinfo.read_text(encoding="utf-8"), re.MULTILINE)
    except OSError:
        named = None
    return named[1].strip() if named else platform.processor() or platform.machine() or "unknown processor"
