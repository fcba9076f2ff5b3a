"""`python opencda.py -t PROFILE [--marl] …` = `opencda-marl run -t PROFILE …`."""

import sys

from opencda_marl.cli import main

if __name__ == "__main__":
    main(["run", *(argument for argument in sys.argv[1:] if argument != "--marl")])
