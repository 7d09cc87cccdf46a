"""``python -m rolloutfleet``: the ``rolloutfleet`` command where only the package is on the path."""

import sys

from rolloutfleet.cli import main

if __name__ == "__main__":
    sys.exit(main())
