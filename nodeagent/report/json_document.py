"""The report as one stable object, printed by `-o json` and `-o yaml` and described by `node_report.schema.json`.

Bytes, inodes and counts are integers, durations are seconds, and an unknown value is null with its reason beside it.
Within one apiVersion fields may be added, but none is renamed, removed or given another meaning. `docs/report.md`
explains them.
"""

from typing import Any, Final

from nodeagent.config import above_kubelet
from nodeagent.model import (
    MEMORY_SIGNALS,
    SIGNAL_TABLE,
    ConditionVerdict,
    ImageStoreUsage,
    MemoryFigures,
    MemoryModel,
    NodeMemory,
    Observation,
    OomKill,
    PodSource,
    PodUsage,
    RankedPod,
    Signal,
    SignalVerdict,
    Stall,
    Threshold,
    ThresholdVerdict,
    UnattributedDisk,
    ZombieCount,
)
from nodeagent.policy import headroom
from nodeagent.report import node_report, wording
from nodeagent.report.node_report import Report

REPORT_API_VERSION: Final = "nodeagent.io/v1alpha1"
REPORT_KIND: Final = "NodeReport"

JsonObject = dict[str, Any]


def to_json(report: Report) -> JsonObject:
    """`report` as lists, dictionaries, strings, numbers, booleans and None."""
    snapshot, plan = report.snapshot, report.plan
    shared = node_report.shared_file_systems(snapshot)
    return {
        "apiVersion": REPORT_API_VERSION,
        "kind": REPORT_KIND,
        "node": snapshot.node,
        "time": wording.rfc3339(snapshot.wall_time),
        "state": str(node_report.state(report)),
        "mode": report.mode,
        "configuration": report.config_source,
        "podsSource": report.pods_source,
        "recording": report.recording or None,
        "signals": [_signal(report, verdict, shared.get(verdict.signal)) for verdict in plan.signals],
        "conditions": [_condition(condition) for condition in plan.conditions],
        "memory": _memory(report),
        "pressure": [_stall(stall) for stall in snapshot.stalls],
        "diskLayout": str(snapshot.layout),
        "rankedFor": str(plan.ranked_for),
        "pods": [_pod(report, ranked) for ranked in plan.ranking],
        "victims": [
            {
                "namespace": victim.pod.namespace,
                "name": victim.pod.name,
                "uid": victim.pod.uid,
                "tier": str(victim.tier),
                "gracePeriodSeconds": victim.grace_period_s,
                "message": victim.message,
                **({"hook": victim.hook} if victim.hook else {}),
                "annotations": dict(victim.annotations),
            }
            for victim in plan.victims
        ],
        "refusals": [{"code": str(refusal.code), "message": refusal.message} for refusal in plan.refusals],
        "disks": [_unattributed_disk(report, disk) for disk in snapshot.unattributed_disks],
        "imageStore": _image_store(report.image_store) if report.image_store is not None else None,
        "cgroups": [
            {
                "path": cgroup.path,
                "memoryWorkingSetBytes": cgroup.memory_working_set,
                "processCount": cgroup.process_count,
            }
            for cgroup in snapshot.cgroups
        ],
        "memoryVolumes": [
            {
                "pod": pod,
                "podUid": volume.pod_uid,
                "volume": volume.name,
                "usedBytes": volume.used_bytes,
                "sizeLimitBytes": limit,
            }
            for pod, volume, limit in node_report.memory_volumes(report)
        ],
        "zombies": _zombies(report, snapshot.zombies) if snapshot.zombies is not None else None,
        "oomKills": [_oom_kill(kill) for kill in report.oom_kills],
        "kubelet": _kubelet(report),
        "notes": [{"subject": note.subject, "message": note.message} for note in report.notes],
    }


def _signal(report: Report, verdict: SignalVerdict, same_as: Signal | None) -> JsonObject:
    observation = verdict.observation
    leading = headroom.leading_threshold(report.snapshot, verdict)
    trend = verdict.trend
    return {
        "name": str(verdict.signal),
        "unit": str(SIGNAL_TABLE[verdict.signal].unit),
        "available": observation.available,
        "capacity": observation.capacity,
        "threshold": leading.value if leading else None,
        "headroom": headroom.threshold_headroom(report.snapshot, leading) if leading else None,
        "state": str(verdict.state),
        "reason": _state_reason(verdict, leading),
        "source": observation.source,
        "ageSeconds": _age(report, observation.read_at),
        "sameFileSystemAs": str(same_as) if same_as else None,
        "figures": _figures(verdict.figures) if verdict.figures is not None else None,
        "thresholds": [_threshold(report, each) for each in verdict.thresholds],
        "trend": {
            "ratePerSecond": trend.rate_per_s,
            "toThresholdSeconds": trend.to_threshold_s,
            "toExhaustionSeconds": trend.to_exhaustion_s,
            "confidence": trend.confidence,
        }
        if trend
        else None,
    }


def _figures(figures: MemoryFigures) -> JsonObject:
    """Both figures of a memory signal, and which one is lower."""
    working_set, by_kernel = figures
    lower = None
    if working_set is not None and by_kernel is not None:
        lower = MemoryModel.MEM_AVAILABLE if by_kernel <= working_set else MemoryModel.WORKING_SET
    return {
        "workingSetBytes": working_set,
        "memAvailableBytes": by_kernel,
        "lower": str(lower) if lower is not None else None,
    }


def _state_reason(verdict: SignalVerdict, leading: ThresholdVerdict | None) -> str | None:
    """The reason of the state, if the numbers do not show it."""
    if verdict.observation.available is None:
        return verdict.observation.reason or "could not be read"
    if not verdict.thresholds:
        return "no threshold"
    return (leading.not_due_reason or None) if leading else None


def _threshold(report: Report, verdict: ThresholdVerdict) -> JsonObject:
    threshold = verdict.threshold
    observation = report.snapshot.observations.get(threshold.signal)
    level = above_kubelet.leading_level(threshold, capacity=observation.capacity if observation is not None else None)
    return {
        **_threshold_text(threshold),
        "value": verdict.value,
        "raisedAbove": level.kubelet.text if level is not None else None,
        "configuredGracePeriodSeconds": threshold.configured_grace_s,
        "headroom": headroom.threshold_headroom(report.snapshot, verdict),
        "memoryModel": str(threshold.memory_model) if threshold.signal in MEMORY_SIGNALS else None,
        "met": verdict.met,
        "due": verdict.due,
        "notDueReason": verdict.not_due_reason or None,
        "notDueCode": str(verdict.not_due_code) if verdict.not_due_code else None,
        "activeSeconds": None if verdict.active_since is None else _age(report, verdict.active_since),
    }


def _threshold_text(threshold: Threshold) -> JsonObject:
    return {
        "tier": "hard" if threshold.hard else "soft",
        "configured": threshold.value.text,
        "gracePeriodSeconds": threshold.grace_period_s,
        "minimumReclaim": threshold.min_reclaim.text if threshold.min_reclaim else None,
    }


def _condition(condition: ConditionVerdict) -> JsonObject:
    return {
        "type": str(condition.type),
        "status": str(condition.status),
        "reason": condition.reason,
        "message": condition.message,
    }


def _memory(report: Report) -> JsonObject:
    """The memory models side by side, and the memory that neither contains."""
    memory = report.snapshot.memory
    working_set = report.snapshot.observe(Signal.MEMORY)
    by_kernel = report.snapshot.observe(Signal.MEMORY, MemoryModel.MEM_AVAILABLE)
    return {
        "capacityBytes": working_set.capacity,
        "workingSetModel": _model(working_set),
        "memAvailableModel": _model(by_kernel),
        "details": _meminfo(memory) if memory else None,
        "swap": _swap(memory) if memory else None,
        "hugePages": [
            {
                "pageSizeBytes": pool.page_size,
                "total": pool.total,
                "free": pool.free,
                "reserved": pool.reserved,
            }
            for pool in memory.hugepages
        ]
        if memory
        else [],
        "hugetlbBytes": memory.hugetlb if memory else None,
        "pageCache": {
            "reclaimableBytes": report.page_cache.amount,
            "pods": report.page_cache.pods,
            "blocked": report.page_cache.blocked or None,
        },
    }


def _swap(memory: NodeMemory) -> JsonObject:
    return {
        "totalBytes": memory.swap_total,
        "freeBytes": memory.swap_free,
        "devices": [
            {
                "path": device.path,
                "kind": device.kind,
                "sizeBytes": device.size,
                "usedBytes": device.used,
                "memoryBytes": device.memory,
            }
            for device in memory.swaps
        ],
    }


def _model(observation: Observation) -> JsonObject:
    return {
        "availableBytes": observation.available,
        "source": observation.source,
        "reason": observation.reason or None,
    }


def _meminfo(memory: NodeMemory) -> JsonObject:
    return {
        "freeBytes": memory.free,
        "buffersBytes": memory.buffers,
        "cachedBytes": memory.cached,
        "anonBytes": memory.anon,
        "shmemBytes": memory.shmem,
        "dirtyBytes": memory.dirty,
        "slabReclaimableBytes": memory.slab_reclaimable,
        "slabUnreclaimableBytes": memory.slab_unreclaimable,
        "kernelStackBytes": memory.kernel_stack,
        "pageTablesBytes": memory.page_tables,
    }


def _stall(stall: Stall) -> JsonObject:
    full = None
    if stall.full_avg10 is not None:
        full = {"avg10": stall.full_avg10, "avg60": stall.full_avg60, "totalMicroseconds": stall.full_total_us}
    return {
        "scope": str(stall.scope),
        "resource": stall.resource,
        "some": {"avg10": stall.some_avg10, "avg60": stall.some_avg60, "totalMicroseconds": stall.some_total_us},
        "full": full,
    }


def _pod(report: Report, ranked: RankedPod) -> JsonObject:
    pod, usage = ranked.view.pod, ranked.view.usage
    api = pod.source is PodSource.API
    request = node_report.memory_request(ranked.view)
    return {
        "namespace": pod.namespace,
        "name": pod.name,
        "uid": pod.uid,
        "qosClass": str(pod.qos_class),
        "priority": pod.priority,
        "phase": pod.phase or None,
        "terminating": pod.terminating,
        "owner": f"{pod.owner.kind}/{pod.owner.name}" if pod.owner else None,
        "rank": ranked.rank,
        "keys": [{"name": str(key.name), "value": key.value, "text": key.text} for key in ranked.keys],
        "usage": ranked.usage,
        "request": ranked.request,
        "relief": ranked.relief,
        "protectedBy": [{"code": str(refusal.code), "message": refusal.message} for refusal in ranked.refusals],
        "memoryWorkingSetBytes": usage.memory_working_set if usage else None,
        "memoryRequestBytes": request.value,
        "memoryLimitBytes": usage.memory_limit if usage else None,
        "memoryUnreclaimableBytes": usage.memory_unreclaimable if usage else None,
        "memorySwapBytes": usage.memory_swap if usage else None,
        "processCount": usage.process_count if usage else None,
        "threadCount": usage.thread_count if usage else None,
        "disk": _disk(report, usage) if usage else None,
        "containers": [
            {
                "id": container.container_id,
                "name": container.name,
                "memoryWorkingSetBytes": container.memory_working_set,
                "processCount": container.process_count,
            }
            for container in (usage.containers if usage else ())
        ],
        "cgroup": usage.cgroup if usage else None,
        "ageSeconds": _age(report, usage.read_at) if usage else None,
        "sources": {
            "name": ("api" if api else "host") if pod.name else None,
            "qosClass": "api" if api else "host",
            "priority": None if pod.priority is None else "api" if api else "host",
            "memoryRequestBytes": request.source or None,
            "memoryWorkingSetBytes": "host" if usage and usage.memory_working_set is not None else None,
            "processCount": "host" if usage and usage.process_count is not None else None,
        },
    }


def _disk(report: Report, usage: PodUsage) -> JsonObject:
    disk, quality, writing = usage.disk, usage.disk_usage_quality, usage.writing
    return {
        "rootfsBytes": disk.rootfs_bytes,
        "rootfsInodes": disk.rootfs_inodes,
        "logsBytes": disk.logs_bytes,
        "logsInodes": disk.logs_inodes,
        "volumesBytes": disk.volumes_bytes,
        "volumesInodes": disk.volumes_inodes,
        "otherBytes": disk.other_bytes,
        "otherInodes": disk.other_inodes,
        "deletedOpenBytes": quality.deleted_bytes if quality else None,
        "complete": quality.complete if quality else None,
        "unknown": list(quality.unknown) if quality else [],
        "ageSeconds": _age(report, quality.read_at) if quality else None,
        "writtenBytesPerSecond": writing.bytes_per_s if writing else None,
    }


def _unattributed_disk(report: Report, disk: UnattributedDisk) -> JsonObject:
    return {
        "signals": [str(signal) for signal in disk.signals],
        "usedBytes": disk.used_bytes,
        "usedInodes": disk.used_inodes,
        "podsBytes": disk.attributed_bytes,
        "podsInodes": disk.attributed_inodes,
        "unattributedBytes": disk.unattributed_bytes,
        "unattributedInodes": disk.unattributed_inodes,
        "largest": [
            {"path": each.path, "bytes": each.bytes, "inodes": each.inodes, "complete": each.complete}
            for each in disk.largest
        ],
        "ageSeconds": _age(report, disk.read_at),
    }


def _zombies(report: Report, count: ZombieCount) -> JsonObject:
    pods = {view.pod.cgroup_uid: view.pod for view in report.snapshot.pods}
    holders = []
    for each in count.holders:
        pod = pods.get(each.pod_uid)
        holders.append(
            {
                "zombies": each.zombies,
                "podUid": (pod.uid if pod is not None else each.pod_uid) or None,
                "namespace": pod.namespace if pod is not None else None,
                "name": pod.name if pod is not None else None,
                "unit": each.unit or None,
                "pid": each.pid,
                "command": each.command or None,
            }
        )
    return {"total": count.total, "complete": count.complete, "holders": holders}


def _image_store(store: ImageStoreUsage) -> JsonObject:
    return {
        "runtime": store.runtime,
        "path": store.path,
        "bytes": store.bytes,
        "inodes": store.inodes,
        "classes": [
            {
                "name": str(part.kind),
                "bytes": part.bytes,
                "inodes": part.inodes,
                "complete": part.complete,
                "items": [{"name": each.name, "bytes": each.bytes, "inodes": each.inodes} for each in part.items],
            }
            for part in store.parts
        ],
        "unknown": list(store.unknown),
    }


def _oom_kill(kill: OomKill) -> JsonObject:
    return {
        "pod": kill.pod or None,
        "container": kill.container or None,
        "cgroup": kill.place.path if kill.place is not None else None,
        "processes": kill.number,
        "cause": str(kill.cause),
        "wholeCgroup": kill.group,
    }


def _kubelet(report: Report) -> JsonObject | None:
    if report.kubelet is None:
        return None
    return {
        "configuration": report.kubelet.path,
        "assumed": bool(report.kubelet.unread),
        "reason": report.kubelet.unread or None,
        "thresholds": [
            {
                "signal": str(each.threshold.signal),
                **_threshold_text(each.threshold),
                "value": each.value,
                "ours": _own_threshold(each.answer),
                "oursSoft": _own_threshold(each.soft),
                "verdict": each.verdict,
            }
            for each in node_report.compare_with_kubelet(report)
        ],
    }


def _own_threshold(verdict: ThresholdVerdict | None) -> JsonObject | None:
    return {**_threshold_text(verdict.threshold), "value": verdict.value} if verdict else None


def _age(report: Report, instant: float) -> float:
    """Seconds from `instant` to the decision."""
    return round(max(0.0, report.plan.made_at - instant), 3)
