"""The pod cache does not grow with the number of events."""

import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.fake_kube import Answer, ApiServer, Request, pod
from tests.support.rawserver import CHUNKED, RawServer, chunk, read_request, response

PODS = 110
MOST_KIB = 32 << 10
EVENTS = 100_000
BATCH = 500

WATCHER = """
import sys, threading
from nodeagent.kube.credentials import find_credentials
from nodeagent.kube.pod_watch import PodWatch
from nodeagent.kube.transport import connect

def rss_kib():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmRSS"))

seen, done = 0, threading.Event()
def wake():
    global seen
    seen += 1
    if seen in (10_000, 100_000):
        print(rss_kib(), len(watch.view().pods), flush=True)
    if seen >= 100_000:
        done.set()

watch = PodWatch(connect(find_credentials(sys.argv[1])), "lab-node", wake=wake)
watch.start()
assert done.wait(100), seen
"""

LISTER = """
import sys, threading
from nodeagent.kube.credentials import find_credentials
from nodeagent.kube.pod_watch import PodWatch
from nodeagent.kube.transport import connect

def kib(what):
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith(what))

transport = connect(find_credentials(sys.argv[1]))
changed = threading.Event()
watch = PodWatch(transport, "lab-node", wake=changed.set)
before = kib("VmHWM")
watch.start()
while len(watch.view().pods) < int(sys.argv[2]):
    assert not watch.view().notes, watch.view().notes
    changed.wait(60)
    changed.clear()
print(kib("VmHWM") - before, flush=True)
sys.stdin.readline()
print(kib("VmHWM") - before, watch.relists, len(watch.view().notes))
"""
BULK = 1_200_000
EMPTY: dict[str, object] = {}
BULKY: dict[str, dict[str, Any]] = {
    "environment": {"spec": {"containers": [{"name": "c", "env": [{"name": "A", "value": "x" * BULK}]}]}},
    "markup": {"spec": {"containers": [{"name": "c", "args": ["<" * (BULK // 4)]}]}},
    "labels": {"labels": {f"{n:0>63}": "v" * 63 for n in range(BULK // 130)}},
    "containers": {"spec": {"containers": [{"name": f"c{n}", "image": "x"} for n in range(BULK // 40)]}},
    "volumes": {"spec": {"volumes": [{"name": f"v{n}", "emptyDir": EMPTY} for n in range(BULK // 40)]}},
    "preferences": {"annotations": {f"nodeagent.io/{n}": "x" * 100 for n in range(2000)}},
}


class GoServer(ApiServer):
    """Writes `<` as the API server does, in six bytes."""

    def answer(self, request: Request) -> Any:
        answer = super().answer(request)
        if isinstance(answer, Answer):
            return answer._replace(body=json.dumps(answer.body, separators=(",", ":")).replace("<", "\\u003c").encode())
        return (line and line.replace(b"<", b"\\u003c") for line in answer)


@pytest.mark.parametrize("bulk", BULKY)
def test_thirty_pods_of_more_than_a_megabyte_cost_hardly_more_memory_than_one(bulk: str, tmp_path: Path) -> None:
    """A list of 34 MiB and more: in a quarter of the manifest's limit."""
    pods = [pod(f"p{n}", **BULKY[bulk]) for n in range(30)]
    with GoServer(node="lab-node", pods=pods) as api:
        kubeconfig = api.kubeconfig(tmp_path / "kubeconfig")
        command = [sys.executable, "-c", LISTER, str(kubeconfig), "30"]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as watcher:
            assert watcher.stdout is not None
            assert watcher.stdin is not None
            listed_kib = int(watcher.stdout.readline())
            assert api.wait_for(lambda: api.watched("/api/v1/pods"))
            for n in range(5):
                api.modify_pod("default", f"p{n}", lambda entry: entry["metadata"].update(generation=2))
            api.compact()  # and once more, by pages
            api.end_watches()
            assert api.wait_for(lambda: len([r for r in api.requests if "limit" in r.query]) > 1)
            version = api.store.version
            assert api.wait_for(lambda: any(int(r.query.get("resourceVersion") or 0) >= version for r in api.requests))
            watcher.stdin.close()
            figures = watcher.stdout.read().split()
    assert listed_kib < MOST_KIB
    assert int(figures[0]) < MOST_KIB, figures
    assert int(figures[1]) > 1
    assert figures[2] == "0"


def test_memory_is_flat_over_a_hundred_thousand_watch_events(tmp_path: Path) -> None:
    pods = [pod(f"p{n}", labels={"app": f"a{n}"}, requests={"memory": "10Mi"}) for n in range(PODS)]

    def events(connection: socket.socket, number: int) -> None:
        while request := read_request(connection):
            if b"watch=1" not in request:
                listed = {"metadata": {"resourceVersion": "1"}, "items": pods}
                connection.sendall(response(json.dumps(listed).encode()))
                continue
            connection.sendall(CHUNKED)
            version = 2
            while version < EVENTS + 1000:
                lines = []
                for _ in range(BATCH):
                    # Every event has a new version and a new annotation; every tenth pod is replaced by a successor.
                    entry = pods[version % PODS]
                    entry["metadata"]["resourceVersion"] = str(version)
                    entry["metadata"]["annotations"] = {"last": f"change {version}", "nodeagent.io/n": str(version)}
                    kind = "MODIFIED"
                    if version % 10 == 0:
                        kind = "DELETED" if version % 20 else "ADDED"
                    lines.append(json.dumps({"type": kind, "object": entry}))
                    version += 1
                connection.sendall(chunk(("\n".join(lines) + "\n").encode()))
            server.over.wait()

    with RawServer(events) as server:
        kubeconfig = server.kubeconfig(tmp_path / "kubeconfig")
        output = subprocess.run(
            [sys.executable, "-c", WATCHER, str(kubeconfig)], check=True, capture_output=True, text=True, timeout=110
        ).stdout
    (early_kib, early_pods), (late_kib, late_pods) = (map(int, line.split()) for line in output.splitlines())
    assert 0 < early_pods <= PODS
    assert 0 < late_pods <= PODS
    # 90,000 events later: a leak of as little as 30 bytes each would show.
    assert late_kib - early_kib < 2048, f"{early_kib} -> {late_kib} KiB"
