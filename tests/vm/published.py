"""What the agent published: on its port in the machine, and as the API server received it."""

from typing import Final

from tests.fake_kube import ApiServer
from tests.vm.machine import Machine

PORT: Final = 9655


def answer(machine: Machine, path: str) -> str:
    """The body of a 200 of the agent's port. By the machine's shell: a start of Python takes 5 s of CPU there."""
    request = f"GET {path} HTTP/1.1\\r\\nHost: 127.0.0.1:{PORT}\\r\\nConnection: close\\r\\n\\r\\n"
    words = f"exec 3<>/dev/tcp/127.0.0.1/{PORT}; printf '{request}' >&3; cat <&3"
    head, _, body = machine.run(["timeout", "60", "bash", "-c", words]).stdout.partition("\r\n\r\n")
    assert head.split(" ")[1:2] == ["200"], head
    return body


def raised(api: ApiServer, condition: str) -> list[float]:
    """When the condition was published as True."""
    return [
        request.at
        for request in api.sent("PATCH", "/status")
        for each in request.body.get("status", {}).get("conditions", ())
        if each["type"] == condition and each.get("status") == "True"
    ]


def raised_before_the_eviction(api: ApiServer, condition: str) -> bool:
    """Whether the condition was published as True before the first eviction was asked for."""
    [evicted] = api.sent("POST", "/eviction")
    return min(raised(api, condition), default=evicted.at) < evicted.at
