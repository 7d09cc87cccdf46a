"""``python -m treecheck``: prints every fault of the checkout in the current folder and fails when there is one."""

import sys
from pathlib import Path

from treecheck.rules import find_faults

if __name__ == "__main__":
    faults = find_faults(Path.cwd())
    print("\n".join(faults) or "tree: nothing to mend")
    sys.exit(1 if faults else 0)
