"""The labels of this node for a command that reads a configuration with profiles: from its option, else from the API
server, else those that the agent of this machine saw last."""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from nodeagent.config import load, show
from nodeagent.config.load import LoadedConfig
from nodeagent.config.schema import Config
from nodeagent.model import Note, NoteKind
from nodeagent.sampling.hostfs.host import Host, Unreadable


class FoundLabels(NamedTuple):
    """The labels of the node and their source."""

    labels: Mapping[str, str] | None
    """None: not known."""
    source: str
    """For people; why they are not known."""


def apply(
    loaded: LoadedConfig, host: Host, *, node_name: str, given: Mapping[str, str] | None, api: str = "auto"
) -> tuple[LoadedConfig, tuple[Note, ...]]:
    """The configuration of this node and which profiles apply. `api`: `auto`, `always` or `never`. Without profiles
    nothing is read."""
    if loaded.profiles is None:
        return loaded, ()
    found = FoundLabels(given, "by --node-labels") if given is not None else _find(loaded.config, host, node_name, api)
    result = load.for_node(loaded, found.labels)
    return result, (Note(NoteKind.PROFILES, f"{show.active_profiles(result)} ({found.source})"),)


def _find(config: Config, host: Host, node_name: str, api: str) -> FoundLabels:
    trouble = "a recording has no labels"
    if api == "always" or (api == "auto" and not host.recorded):
        found = _from_api(config, node_name)
        if found.labels is not None:
            return found
        trouble = found.source
    elif not host.recorded:
        trouble = "the API server was not asked"
    return FoundLabels(None, trouble) if host.recorded else _from_state(config, host, node_name, trouble)


def _from_api(config: Config, node_name: str) -> FoundLabels:
    from nodeagent.kube import api_errors, credentials, identity_probe, node_watch, transport, user_review

    found = credentials.find_credentials(config.cluster.kubeconfig)
    if not found.found:
        return FoundLabels(None, f"no API server: {found.reason}")
    try:
        connection = transport.connect(found, request_timeout_s=config.cluster.request_timeout_s)
        try:
            user = user_review.fetch_user(connection)
            identity_probe.act_unprobed(connection, user, node_name, config.cluster.identity)
            node = node_watch.decode_node(connection.request("GET", f"/api/v1/nodes/{node_name}").body)
        finally:
            connection.close()
    except (api_errors.ApiError, credentials.CredentialsError, ValueError, OverflowError) as error:
        return FoundLabels(None, f"the labels of node {node_name} could not be read: {error}")
    return FoundLabels(node.labels, f"by the labels of node {node_name}")


def _from_state(config: Config, host: Host, node_name: str, trouble: str) -> FoundLabels:
    from nodeagent.loop import assembly
    from nodeagent.loop.state_store import AgentState
    from nodeagent.records.state_file import StateFile, Trust

    try:
        boot_id = host.text("/proc/sys/kernel/random/boot_id").strip()
    except Unreadable:
        return FoundLabels(None, trouble)
    loaded = StateFile(Path(config.state_dir) / assembly.STATE_FILE, shape=AgentState, boot_id=boot_id).load()
    saved = loaded.value.node_labels if loaded.trust is Trust.RESTORED else None
    if saved is None or saved.node != node_name:
        return FoundLabels(None, trouble)
    return FoundLabels(saved.labels, f"by the labels that the agent saw last; {trouble}")
