"""`python -m fenchel_lab` is the command `fenchel`."""

from fenchel_lab.cli import app

if __name__ == "__main__":
    app(prog_name="fenchel")
