"""`python scripts/experiments/launch_matrix.py …` is `opencda-marl matrix run …`."""

import sys

from opencda_marl.cli import main

if __name__ == "__main__":
    main(["matrix", "run", *sys.argv[1:]])
