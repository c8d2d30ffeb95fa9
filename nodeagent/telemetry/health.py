"""What the probes say: whether the agent lives, and whether it can do its work, each with everything that is missing.

`/healthz` fails when the loop stands still, or when a worker has failed again and again for five minutes
(`workers.FAILED_S`): whoever restarts the agent then mends something. A worker that waits for a PID or hangs in the
kernel is no reason, because a restart would not help it. `/readyz` also fails when the agent could not decide for want
of facts: a restart would mend nothing, so it must never be a liveness probe.
"""

from typing import Final

from nodeagent.config.schema import Config
from nodeagent.telemetry.metrics import Liveness

STUCK_SYNCS: Final = 3
STUCK_S: Final = 10.0
"""The loop is stuck when it has not turned for so many sampling intervals and this: a turn over 500 pods takes
milliseconds, so this trades seconds of a stuck agent against restarts of a node that only crawls under pressure."""


def not_alive(vitals: Liveness, *, now: float, config: Config) -> tuple[str, ...]:
    """Why the agent must be restarted; empty when it lives."""
    limit_s = STUCK_SYNCS * config.sampling.interval_s + STUCK_S
    stood_s = now - vitals.turned_at
    stands = (f"loop: has not turned for {stood_s:.1f}s, at most {limit_s:g}s",) if stood_s > limit_s else ()
    return (*stands, *vitals.workers_failed)


def not_ready(vitals: Liveness, *, now: float, config: Config) -> tuple[str, ...]:
    """Everything that keeps the agent from deciding; empty when it can."""
    missing = list(not_alive(vitals, now=now, config=config))
    if vitals.sampled_at is None:
        missing.append("samples: none yet")
    elif (age_s := now - vitals.sampled_at) > config.sampling.stale_after_s:
        missing.append(f"samples: the last one is {age_s:.1f}s old, at most {config.sampling.stale_after_s:g}s")
    elif not vitals.signals_known:
        missing.append("samples: no signal could be read")
    if vitals.pods_synced_at is None:
        missing.append("pods: the API has not told which pods run here")
    elif (age_s := now - vitals.pods_synced_at) > config.cluster.pods_max_age_s:
        missing.append(f"pods: the API's view is {age_s:.1f}s old, at most {config.cluster.pods_max_age_s:g}s")
    return tuple(missing)
