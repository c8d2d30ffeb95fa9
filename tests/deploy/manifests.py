"""What the deployment tests read: the documents of daemonset.yaml."""

from pathlib import Path
from typing import Any, Final

import yaml

REPOSITORY: Final = Path(__file__).parents[2]
DAEMONSET: Final = REPOSITORY / "daemonset.yaml"

Document = dict[str, Any]


def documents() -> list[Document]:
    """Every document of daemonset.yaml, in order."""
    return list(yaml.safe_load_all(DAEMONSET.read_text(encoding="utf-8")))


def the(kind: str) -> Document:
    """The only document of this kind."""
    (found,) = (document for document in documents() if document["kind"] == kind)
    return found


def pod_spec() -> Document:
    """The pod that the DaemonSet makes."""
    spec: Document = the("DaemonSet")["spec"]["template"]["spec"]
    return spec


def container() -> Document:
    """Its only container."""
    (only,) = pod_spec()["containers"]
    found: Document = only
    return found
