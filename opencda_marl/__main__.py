"""`python -m opencda_marl`: the program, where its command is not on the path."""

from opencda_marl.cli import main

__all__: list[str] = []

if __name__ == "__main__":
    main()
