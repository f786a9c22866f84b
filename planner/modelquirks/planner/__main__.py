"""``python -m modelquirks.planner`` is the command ``modelquirks``."""

import sys

from modelquirks.planner.cli.command import main

if __name__ == "__main__":
    sys.exit(main())
