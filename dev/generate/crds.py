"""The CRDs as the operator's own models describe them."""

import subprocess
import sys
import tempfile
from pathlib import Path


def render_crds(root: Path) -> dict[str, str]:
    """Text of each file of `crds/` by name, from ``rolloutfleet_operator.api.generate``.

    Raises:
        subprocess.CalledProcessError: the models could not be rendered; its reason is on stderr.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "rolloutfleet_operator.api.generate", "--output", folder]
        subprocess.run(command, cwd=root, check=True, stdout=subprocess.DEVNULL)
        return {path.name: path.read_text() for path in sorted(Path(folder).glob("*.yaml"))}
