"""A real cluster, named by NODEAGENT_E2E_KUBECONFIG, and a namespace of its own for each run."""

import os
from collections.abc import Iterator

import pytest

from nodeagent.kube.credentials import find_credentials
from nodeagent.kube.transport import connect
from tests.e2e.cluster import KUBECONFIG, WIPE, Cluster, has_service_account


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    kubeconfig = os.environ.get(KUBECONFIG, "")
    if not kubeconfig:
        pytest.skip(f"{KUBECONFIG} names no cluster")
    kubeconfig = os.path.expanduser(kubeconfig)
    cluster = Cluster(connect(find_credentials(kubeconfig), request_timeout_s=15.0), kubeconfig)
    if os.environ.get(WIPE):
        from tests.e2e.this_node import wipe

        wipe(cluster)
    namespaces = "/api/v1/namespaces"
    # Pods under load share the host's process ids (this_node.py), which the `baseline` level would refuse.
    labels = {"pod-security.kubernetes.io/enforce": "privileged"}
    metadata = {"name": cluster.namespace, "labels": labels}
    cluster.post(namespaces, {"apiVersion": "v1", "kind": "Namespace", "metadata": metadata})
    # Pods need their namespace's service account, which a controller makes.
    cluster.until(lambda: has_service_account(cluster, cluster.namespace), timeout_s=30)
    yield cluster
    cluster.delete(f"{namespaces}/{cluster.namespace}")
