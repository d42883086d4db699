"""How many tests a suite really ran: `python tests/count_run.py REPORT.xml [PART-OF-THE-NAME]`.

Reads a JUnit file of pytest. Prints the number of tests that were run, not skipped, and ends with 1 when it is none or
the file is not there: a suite that silently ran nothing must not pass.
"""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ElementTree


def count_run(report: str, part: str = "") -> tuple[int, int]:
    """(run, skipped) among the tests whose `module.name` contains `part`."""
    cases = [
        case
        for case in ElementTree.parse(report).iter("testcase")
        if part in f"{case.get('classname')}.{case.get('name')}"
    ]
    skipped = sum(case.find("skipped") is not None for case in cases)
    return len(cases) - skipped, skipped


def main() -> int:
    """Print the count; 1 when nothing ran."""
    try:
        run, skipped = count_run(*sys.argv[1:3])
    except (OSError, ElementTree.ParseError) as error:
        print(f"{sys.argv[1]}: no report of a test run: {error}", file=sys.stderr)
        return 1
    print(f"{' '.join(sys.argv[1:3])}: {run} tests run, {skipped} skipped")
    return 0 if run else 1


if __name__ == "__main__":
    sys.exit(main())
