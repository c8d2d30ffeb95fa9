"""The table of all targets."""

from typing import Final

from tests.fuzz import config_targets, host_targets, kube_targets, record_targets
from tests.fuzz.engine import Target

TARGETS: Final[dict[str, Target]] = {
    target.name: target
    for target in (*host_targets.TARGETS, *config_targets.TARGETS, *kube_targets.TARGETS, *record_targets.TARGETS)
}
