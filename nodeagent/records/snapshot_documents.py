"""The documents of a snapshot file that do not come from the recording: configuration, kubelet, facts."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from nodeagent import __version__
from nodeagent.config import kubelet_excerpt, load, show
from nodeagent.model.recording import header_at
from nodeagent.records.recording import Recording
from nodeagent.sampling.hostfs.host import Host
from nodeagent.sampling.node import facts, kubelet_config


class Documents(NamedTuple):
    """The members beside samples and records."""

    config: str = ""
    kubelet: Mapping[str, Any] = {}
    facts: Mapping[str, Any] = {}


def read_documents(
    host: Host, loaded: load.LoadedConfig, recorded: Recording | None, *, at: float | None = None
) -> Documents:
    """The configuration that the agent ran with at a time (epoch seconds; None: last), or else `loaded`; the kubelet's
    settings; facts. Never raises."""
    headers = recorded.headers if recorded is not None else ()
    header = header_at(headers, at)
    config = header.configuration if header is not None else ""
    config = config or show.show(show.without_secrets(loaded))
    found: dict[str, Any] = {"now": {"nodeagent": __version__, **facts.read_facts(host)}}
    if recorded is not None:
        found["recorded"] = {
            header.instance or str(place): {"nodeagent": header.version, "kernel": header.kernel, **header.facts}
            for place, header in enumerate(headers)
        }
    return Documents(config, _kubelet(host), found)


def _kubelet(host: Host) -> dict[str, Any]:
    sources = kubelet_config.read_sources(host)
    if sources is None:
        return {}
    files = [(sources.path, sources.text)] if sources.text else []
    return {
        "place": sources.place,
        "refusal": sources.refusal,
        **kubelet_excerpt.excerpt([*files, *sources.drop_ins], sources.flags),
    }
