"""docs/placement.svg: the example's plan, drawn as `rolloutfleet plan -o svg` draws it."""

from pathlib import Path

from rolloutfleet_operator.offline import build_parser, plan_files
from rolloutfleet_operator.render.placement_picture import render_picture


def render_placement_example(root: Path) -> str:
    """The picture of the plan of examples/placement."""
    folder = root / "examples" / "placement"
    files = [str(folder / name) for name in ("fleet.yaml", "nodes.yaml", "pods.yaml")]
    options = build_parser().parse_args(["-f", files[0], "--nodes", files[1], "--pods", files[2]])
    return render_picture(plan_files(options))
