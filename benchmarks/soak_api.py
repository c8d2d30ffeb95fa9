"""The API server of `benchmarks.soak`: the double in a process of its own, so that the agent's memory is the agent's.

One command a line on stdin (JSON: a name and its arguments), one line on stdout for each accepted eviction. It keeps
neither old requests nor more of its history than a watch could still need.
"""

import json
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from tests.fake_kube import ApiServer, Json, pod
from tests.fake_kube.messages import rfc3339

NODE: Final = "soak-node"
KEPT_CHANGES: Final = 2000
NAMESPACE: Final = "default"


def main() -> None:
    writing = threading.Lock()

    def report(line: str) -> None:
        with writing:
            print(line, flush=True)

    with ApiServer(node=NODE, linger_s=None) as api:
        api.on_eviction = lambda evicted, _: report(f"evicted {evicted['metadata']['name']}")
        api.kubeconfig(Path(sys.argv[1]))
        report("ready")
        commands: dict[str, Callable[..., object]] = {
            "add": lambda name, uid: api.add_pod(_pod(name, uid)),
            "delete": lambda name: api.delete_pod(NAMESPACE, name),
            "down": api.go_down,
            "up": api.come_back,
        }
        for line in sys.stdin:
            name, *arguments = json.loads(line)
            commands[name](*arguments)
            _drop_old(api)


def _pod(name: str, uid: str) -> Json:
    started = rfc3339(time.time() - 3600.0)
    return pod(
        name,
        namespace=NAMESPACE,
        node=NODE,
        uid=uid,
        owner=("ReplicaSet", name),
        labels={"app": name},
        requests={"memory": "100Mi"},
        created=started,
        status={"startTime": started},
    )


def _drop_old(api: ApiServer) -> None:
    store = api.store
    with store.changed:
        api.requests.clear()
        if len(store.history) > 2 * KEPT_CHANGES:
            del store.history[:-KEPT_CHANGES]
            store.oldest = store.history[0][0]
            events = store.objects["events"]
            for key in list(events)[:-KEPT_CHANGES]:
                del events[key]


if __name__ == "__main__":
    main()
