"""``python -m fenchel``: the command line."""

from fenchel.cli import app

if __name__ == "__main__":
    app(prog_name="fenchel")
