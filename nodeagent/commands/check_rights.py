"""`nodeagent check --rights`: compare the rights that the configuration uses with those that the credentials have."""

import os
from collections.abc import Mapping
from typing import Final

from nodeagent.commands import exit_codes, host_names, node_labels, printing
from nodeagent.commands.check import CheckError
from nodeagent.config import load
from nodeagent.config.problems import ConfigError
from nodeagent.kube import credentials, rights_review
from nodeagent.kube.rights_review import RightsReview, RightsState
from nodeagent.report import rights_report
from nodeagent.report.progress import ProgressLine
from nodeagent.sampling.hostfs import host as hostfs
from nodeagent.sampling.hostfs.host import Unreadable

EXIT_CODES: Final = {
    RightsState.OK: exit_codes.OK,
    RightsState.WARNING: exit_codes.WARNING,
    RightsState.CRITICAL: exit_codes.CRITICAL,
    RightsState.UNKNOWN: exit_codes.UNKNOWN,
}


def show(
    *,
    config_file: str | None,
    host_root: str,
    node_name: str | None,
    kubeconfig: str | None,
    labels: Mapping[str, str] | None,
    output: str,
    color: str,
) -> int:
    """Print the report and return its exit code. Raises CheckError if none can be made."""
    review = make_review(
        config_file=config_file, host_root=host_root, node_name=node_name, kubeconfig=kubeconfig, labels=labels
    )
    printing.show(
        rights_report.report_sections(review), lambda: rights_report.to_json(review), output=output, color=color
    )
    return EXIT_CODES[review.state]


def make_review(
    *,
    config_file: str | None,
    host_root: str,
    node_name: str | None,
    kubeconfig: str | None,
    labels: Mapping[str, str] | None = None,
) -> RightsReview:
    """`labels`: of the node, for profiles; None: those of the API server or of the agent's state. Raises CheckError
    without credentials, without an answer, and for an invalid configuration."""
    from nodeagent.kube import transport as transports
    from nodeagent.kube.api_errors import ApiError

    overrides = load.overrides_from(os.environ, node_name=node_name, kubeconfig=kubeconfig)
    try:
        loaded = load.load(config_file, overrides=overrides)
    except ConfigError as error:
        raise CheckError(str(error), exit_codes.CONFIG) from error
    try:
        host = hostfs.open_host(host_root)
        host_name = host_names.host_name(host)
    except Unreadable as error:
        raise CheckError(f"--host-root: {error}", exit_codes.USAGE) from error
    name = loaded.config.node_name or host_name
    config = node_labels.apply(loaded, host, node_name=name, given=labels)[0].config
    found = credentials.find_credentials(config.cluster.kubeconfig)
    if not found.found:
        raise CheckError(f"UNKNOWN: no API server: {found.reason}")
    try:
        transport = transports.connect(found, request_timeout_s=config.cluster.request_timeout_s)
        line = ProgressLine()
        try:
            return rights_review.review(transport, config, host_name=host_name, on_progress=line.show)
        finally:
            line.clear()
            transport.close()
    except (ApiError, credentials.CredentialsError) as error:
        raise CheckError(f"UNKNOWN: the API server did not answer: {error}") from error
