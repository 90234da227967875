"""The command `fenchel`, also `python -m fenchel_lab`: shows that it has started while torch is loaded."""

import sys


def main() -> None:
    """Load the command line, which takes seconds on a fresh machine, behind a bar if the command is the tour."""
    if sys.argv[1:2] == ["tour"] and "--help" not in sys.argv:
        from fenchel_lab.terminal import progress_bars

        with progress_bars(transient=True) as bars:
            bars.add_task("Loading", total=None, note="torch and the chapters")
            from fenchel_lab.cli import app
    else:
        from fenchel_lab.cli import app
    app(prog_name="fenchel")


if __name__ == "__main__":
    main()
