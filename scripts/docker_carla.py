"""`python scripts/docker_carla.py …` is `opencda-marl docker-carla …`."""

import sys

from opencda_marl.cli import main

if __name__ == "__main__":
    main(["docker-carla", *sys.argv[1:]])
