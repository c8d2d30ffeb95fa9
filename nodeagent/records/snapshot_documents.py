"""The documents of a snapshot file that do not come from the recording: configuration, kubelet, facts."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from nodeagent import __version__
from nodeagent.config import kubelet_excerpt, load, show
from nodeagent.records.recording import Recording
from nodeagent.sampling.hostfs.host import Host
from nodeagent.sampling.node import facts, kubelet_config


class Documents(NamedTuple):
    """The members beside samples and records."""

    config: str = ""
    kubelet: Mapping[str, Any] = {}
    facts: Mapping[str, Any] = {}


def read_documents(host: Host, loaded: load.LoadedConfig, recorded: Recording | None) -> Documents:
    """The configuration that the agent ran with, or else `loaded`; the kubelet's settings; facts. Never raises."""
    last = recorded.headers[-1] if recorded is not None and recorded.headers else None
    config = last.configuration if last is not None and last.configuration else show.show(show.without_secrets(loaded))
    found: dict[str, Any] = {"now": {"nodeagent": __version__, **facts.read_facts(host)}}
    if recorded is not None:
        found["recorded"] = {
            header.instance or str(place): {"nodeagent": header.version, "kernel": header.kernel, **header.facts}
            for place, header in enumerate(recorded.headers)
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
