"""kopf's settings, in one place."""

import kopf

from rolloutfleet.contract.names import GROUP
from rolloutfleet_operator import naming
from rolloutfleet_operator.config import Config

CHILD_KINDS: dict[str, tuple[str, str, str]] = {
    "ConfigMap": ("", "v1", "configmaps"),
    "Role": ("rbac.authorization.k8s.io", "v1", "roles"),
    "RoleBinding": ("rbac.authorization.k8s.io", "v1", "rolebindings"),
    "Service": ("", "v1", "services"),
    "ServiceAccount": ("", "v1", "serviceaccounts"),
}
"""Owned kinds whose content is compared, and how kopf selects them."""

PODS = ("", "v1", "pods")
JOBS = ("batch", "v1", "jobs")
NODES = ("", "v1", "nodes")
FLEETS = (GROUP, naming.VERSION, naming.FLEET_PLURAL)
WEIGHTSYNCS = (GROUP, naming.VERSION, naming.SYNC_PLURAL)

INSTANT_EXIT_SECONDS = 2.0
"""How long the deletion of an object waits for its daemon at once, so that a fleet deleted in the middle of a pass is gone promptly."""


def configure(settings: kopf.OperatorSettings, config: Config) -> None:
    """Sets what differs from kopf's defaults."""
    # Own names everywhere: two kopf operators with default names remove each other's finalizers for ever.
    settings.persistence.finalizer = naming.FINALIZER
    settings.persistence.progress_storage = kopf.AnnotationsProgressStorage(prefix=GROUP, v1=False)
    settings.persistence.diffbase_storage = kopf.AnnotationsDiffBaseStorage(prefix=GROUP, v1=False)
    settings.peering.standalone = True
    # Which kinds and namespaces there are is checked at start; watching for more would need rights over the whole cluster.
    settings.scanning.disabled = True
    settings.networking.request_timeout = config.request_timeout_seconds
    settings.watching.server_timeout = 600
    settings.watching.client_timeout = 660
    settings.watching.connect_timeout = config.request_timeout_seconds
    # Without it a daemon that is in the middle of a pass is looked at again only after its whole cancellation_backoff.
    settings.background.instant_exit_timeout = INSTANT_EXIT_SECONDS
    # A list of a thousand pods in one piece would be the peak of this process's memory.
    settings.watching.chunk_size = 100
    # A worker holds its object's last event until it ends: after a thousand pods at once, seconds of idling cost memory.
    settings.queueing.idle_timeout = 1.0
    # Filtered by the server: without it every pod of the cluster would be streamed here.
    for kind in (PODS, JOBS, *CHILD_KINDS.values()):
        settings.watching.label_selectors[kind] = naming.MANAGED_SELECTOR
    settings.posting.loggers = False
    settings.posting.reporting_component = naming.FIELD_MANAGER
    settings.posting.reporting_instance = config.identity
    settings.posting.event_name_prefix = f"{naming.NAME_VALUE}-"
    settings.process.ultimate_exiting_timeout = 30
