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
    """The commit of the checkout that this package runs from, marked if changed; None if it is not in one."""
    git = ["git", "-C", str(Path(__file__).parent)]
    # An installed package may lie inside somebody else's repository: ask for the file, not the folder.
    tracked = [*git, "ls-files", "--error-unmatch", Path(__file__).name]
    describe = [*git, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        subprocess.run(tracked, capture_output=True, check=True)
        return subprocess.run(describe, capture_output=True, check=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def cpu_model(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The processor's name as the system tells it."""
    try:
        named = re.search(r"^model name\s*:\s*(.+)$", cpuinfo.read_text(encoding="utf-8"), re.MULTILINE)
    except OSError:
        named = None
    return named[1].strip() if named else platform.processor() or platform.machine() or "unknown processor"
