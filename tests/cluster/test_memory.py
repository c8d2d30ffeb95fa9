"""The pod cache does not grow with the number of events."""

import json
import socket
import subprocess
import sys
from pathlib import Path

from tests.apiserver import pod
from tests.rawserver import CHUNKED, RawServer, chunk, read_request, response

PODS = 110
EVENTS = 100_000
BATCH = 500

WATCHER = """
import sys, threading
from nodeagent.cluster.credentials import find_credentials
from nodeagent.cluster.pods import PodWatch
from nodeagent.cluster.transport import connect

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
