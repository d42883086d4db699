"""The program `distmlp`, also as `python -m distmlp`.

Imports nothing but the policy on failures: an import that fails on one rank must end the whole job too.
"""

from typing import NoReturn

from distmlp.comm.policy import guarded


def main() -> NoReturn:
    """Run the command on the command line; ends the process with its exit code."""
    guarded(_run)


def _run() -> int:
    import sys

    from distmlp.cli import dispatch

    return dispatch(sys.argv[1:])


if __name__ == "__main__":
    main()
