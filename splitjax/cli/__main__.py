"""`python -m splitjax.cli`: the same as the console script."""

from splitjax.cli import script

if __name__ == "__main__":
    script()
