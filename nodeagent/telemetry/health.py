"""The verdicts of the probes: whether the agent must be restarted, and whether it can decide, each with all reasons.

`/healthz` fails if the loop is stuck, or if a worker has kept failing for five minutes (`workers.FAILED_S`): then a
restart helps. A worker that waits for a PID or hangs in the kernel is no reason, because a restart does not help it.
`/readyz` also fails if samples or pods are missing. A restart does not help then, so it must never be a liveness probe.
"""

from typing import Final

from nodeagent.config.schema import Config
from nodeagent.telemetry.metrics import Liveness

STUCK_SYNCS: Final = 3
SYNC_STUCK_S: Final = 10.0
"""The loop is stuck if the last sync is older than STUCK_SYNCS sampling intervals plus SYNC_STUCK_S. A sync takes some
milliseconds: this trades seconds of a stuck agent against restarts on a node that is slow under pressure."""


def not_alive(liveness: Liveness, *, now: float, config: Config) -> tuple[str, ...]:
    """Why the agent must be restarted; empty if it is alive."""
    limit_s = STUCK_SYNCS * config.sampling.interval_s + SYNC_STUCK_S
    age_s = now - liveness.synced_at
    stuck = (f"loop: last sync {age_s:.1f}s ago, at most {limit_s:g}s",) if age_s > limit_s else ()
    return (*stuck, *liveness.workers_failed)


def not_ready(liveness: Liveness, *, now: float, config: Config) -> tuple[str, ...]:
    """Why the agent cannot decide; empty if it can."""
    missing = list(not_alive(liveness, now=now, config=config))
    if liveness.sampled_at is None:
        missing.append("samples: none yet")
    elif (age_s := now - liveness.sampled_at) > config.sampling.stale_after_s:
        missing.append(f"samples: the last is {age_s:.1f}s old, at most {config.sampling.stale_after_s:g}s")
    elif not liveness.signals_known:
        missing.append("samples: no signal is readable")
    if liveness.pods_synced_at is None:
        missing.append("pods: never listed by the API server")
    elif (age_s := now - liveness.pods_synced_at) > config.cluster.pods_max_age_s:
        missing.append(f"pods: last current {age_s:.1f}s ago, at most {config.cluster.pods_max_age_s:g}s")
    return tuple(missing)
