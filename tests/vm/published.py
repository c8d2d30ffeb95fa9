"""What the agent published, as the API server received it."""

from tests.fake_kube import ApiServer


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
