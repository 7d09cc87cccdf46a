"""``rolloutfleet release``."""

from rolloutfleet.cli.failure import Failure
from rolloutfleet.cli.mending_arguments import ReleaseOptions
from rolloutfleet.connecting import connect
from rolloutfleet.errors import RolloutFleetError


def release_engines(options: ReleaseOptions) -> None:
    """Has held engines serve, and says since when they did not; Failure when nothing is held, or the sync job cannot be asked."""
    try:
        with connect(options.fleet, namespace=options.namespace, token_file=options.token_file) as fleet:
            held = fleet.view().held
            name = f"{fleet.namespace}/{fleet.name}"
            if not held:
                raise Failure(
                    f"fleet {name} holds no engine back, so there is nothing to release; engines are held after a refit that failed "
                    "where spec.refit.onFailure is Hold"
                )
            view = fleet.release()
    except (RolloutFleetError, ValueError) as error:
        raise Failure(str(error)) from error
    if view.held:
        raise Failure(f"fleet {name} is held again: {view.held}")
    print(f"released {name}: its whole engines serve version {view.version} again within seconds (held since {held})")
