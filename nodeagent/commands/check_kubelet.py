"""What the API server knows of the kubelet's thresholds, where the host does not show them."""

from nodeagent.kube import kubelet_configz, node_watch
from nodeagent.kube.api_errors import ApiError
from nodeagent.kube.transport import Transport
from nodeagent.sampling.hostfs import processes
from nodeagent.sampling.hostfs.host import Host
from nodeagent.sampling.node import kubelet_config
from nodeagent.sampling.node.kubelet_config import KubeletReading


def ask(reading: KubeletReading, host: Host, transport: Transport, *, node_name: str) -> KubeletReading:
    """The reading with the arguments of k3s from the Node, else with the kubelet's answer of /configz, else with why
    there is none."""
    process = processes.kubelet_process(host)
    try:
        if process is not None and process.k3s:
            node = node_watch.decode_node(transport.request("GET", f"/api/v1/nodes/{node_name}").body)
            reading = kubelet_config.read_thresholds(host, node.k3s_arguments)
        if reading.known is not None:
            return reading
        return kubelet_config.from_configz(kubelet_configz.fetch(transport, node_name))
    except (ApiError, ValueError, OverflowError) as error:
        return kubelet_config.not_known(reading, str(error))
