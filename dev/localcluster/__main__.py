"""Entry point of `python -m localcluster`."""

import sys

from localcluster.cli import main

sys.exit(main(sys.argv[1:]))
