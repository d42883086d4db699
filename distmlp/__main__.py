"""`python -m distmlp`."""

from distmlp.cli import main

if __name__ == "__main__":
    main()
