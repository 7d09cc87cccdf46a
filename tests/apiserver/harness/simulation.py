"""Simulated nodes: KWOK keeps them Ready and runs their pods, by stages of our own.

KWOK's stock stages complete every pod of a Job at once; a sync job serves for ever. Ours keep it running, and leave an engine of
the image :data:`STUCK_IMAGE` up and not Ready, as one that loads its model is.
"""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from apiserver.harness.api import Cluster, RefusedError
from localcluster.apiclient import node_is_ready
from localcluster.kwok import ANNOTATION, render_node

IMAGE = "registry.example/worker:1"
STUCK_IMAGE = "registry.example/worker:stuck"
GPUS = 8
NODES = tuple(f"simulated-{index:03d}" for index in range(4))
OWNER = "apiserver-tier"
"""Value of KWOK's annotation on our nodes, so that no other KWOK touches them."""

_STAGES = f"""\
apiVersion: kwok.x-k8s.io/v1alpha1
kind: Stage
metadata:
  name: pod-start
spec:
  resourceRef: {{apiGroup: v1, kind: Pod}}
  selector:
    matchExpressions:
    - {{key: .metadata.deletionTimestamp, operator: DoesNotExist}}
    - {{key: .status.podIP, operator: DoesNotExist}}
  next:
    statusTemplate: |
      {{{{ $now := Now }}}}
      {{{{ $image := (index .spec.containers 0).image }}}}
      {{{{ $up := ne $image "{STUCK_IMAGE}" }}}}
      conditions:
      {{{{ range $type := (list "Initialized" "PodReadyToStartContainers") }}}}
      - lastTransitionTime: {{{{ $now | Quote }}}}
        status: "True"
        type: {{{{ $type }}}}
      {{{{ end }}}}
      {{{{ range $type := (list "Ready" "ContainersReady") }}}}
      - lastTransitionTime: {{{{ $now | Quote }}}}
        status: {{{{ if $up }}}}"True"{{{{ else }}}}"False"{{{{ end }}}}
        type: {{{{ $type }}}}
      {{{{ end }}}}
      containerStatuses:
      {{{{ range .spec.containers }}}}
      - image: {{{{ .image | Quote }}}}
        name: {{{{ .name | Quote }}}}
        ready: {{{{ $up }}}}
        started: {{{{ $up }}}}
        restartCount: 0
        state:
          running:
            startedAt: {{{{ $now | Quote }}}}
      {{{{ end }}}}
      hostIP: {{{{ NodeIPWith .spec.nodeName | Quote }}}}
      podIP: {{{{ PodIPWith .spec.nodeName false .metadata.uid .metadata.name .metadata.namespace | Quote }}}}
      phase: Running
      startTime: {{{{ $now | Quote }}}}
---
apiVersion: kwok.x-k8s.io/v1alpha1
kind: Stage
metadata:
  name: pod-delete
spec:
  resourceRef: {{apiGroup: v1, kind: Pod}}
  selector:
    matchExpressions:
    - {{key: .metadata.deletionTimestamp, operator: Exists}}
  next:
    finalizers: {{empty: true}}
    delete: true
"""


@contextmanager
def simulated_nodes(cluster: Cluster, program: str, folder: Path) -> Iterator[None]:
    """The nodes of :data:`NODES` are Ready inside the block."""
    stages = folder / "stages.yaml"
    stages.write_text(_STAGES)
    command = [
        program,
        f"--kubeconfig={cluster.kubeconfig}",
        f"--config={stages}",
        # Without leases KWOK writes a node's status too seldom, and the node counts as lost after a while.
        "--node-lease-duration-seconds=40",
        "--manage-all-nodes=false",
        f"--manage-nodes-with-annotation-selector={ANNOTATION}={OWNER}",
        "--cidr=10.200.0.0/16",
        "--node-ip=10.200.0.1",
    ]
    with (folder / "kwok.log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    try:
        for index in range(len(NODES)):
            _make(cluster, index)
        cluster.wait("nodes are Ready", "Node", "", lambda found: all(node_is_ready(found[name]) for name in NODES))
        yield
    finally:
        process.terminate()
        process.wait(10)
        for name in NODES:
            cluster.delete("Node", "", name)
            cluster.delete("Lease", "kube-node-lease", name)


def _make(cluster: Cluster, index: int) -> None:
    node = render_node("simulated", index, {}, GPUS, [])
    node["metadata"]["annotations"][ANNOTATION] = OWNER
    try:
        cluster.create(node)
    except RefusedError as refusal:
        if refusal.code != 409:
            raise
