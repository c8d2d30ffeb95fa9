"""A real cluster, named by NODEAGENT_E2E_KUBECONFIG, and a namespace of its own for each run."""

import os
from collections.abc import Iterator

import pytest

from nodeagent.kube.credentials import find_credentials
from nodeagent.kube.transport import connect
from tests.e2e.cluster import KUBECONFIG, WIPE, Cluster


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    kubeconfig = os.environ.get(KUBECONFIG, "")
    if not kubeconfig:
        pytest.skip(f"{KUBECONFIG} names no cluster")
    kubeconfig = os.path.expanduser(kubeconfig)
    cluster = Cluster(connect(find_credentials(kubeconfig), request_timeout_s=15.0), kubeconfig)
    if os.environ.get(WIPE):
        from tests.e2e.installation import remove_lost_runs
        from tests.e2e.this_node import wipe

        wipe(cluster)
        remove_lost_runs(cluster)
    try:
        cluster.make_namespace(cluster.namespace)
        yield cluster
    finally:
        cluster.delete(f"/api/v1/namespaces/{cluster.namespace}")
