"""Notes: what a reader of a report or of the log should know about a missing facility or a source that failed."""

import enum
from typing import NamedTuple


class NoteKind(enum.StrEnum):
    """The subject of a note. The value is the word that users read."""

    meaning: str

    def __new__(cls, value: str, meaning: str = "") -> "NoteKind":
        kind = str.__new__(cls, value)
        kind._value_ = value
        kind.meaning = meaning
        return kind

    AGENT = "agent", "Another agent acts on this node."
    API = "api", "The API server does not answer, or its answer is incomplete."
    BRAKE = "brake", "A cgroup that was throttled or frozen is not released, or cannot be braked."
    CGROUP = "cgroup", "The cgroup hierarchy is unusual."
    CONFIGURATION = "configuration", "The configuration has a warning, or a new one was rejected."
    COST = "cost", "The agent uses more CPU, memory or descriptors than its limits."
    CREDENTIALS = "credentials", "The credentials cannot be read or renewed."
    DISK_PRESSURE = "DiskPressure", "The kubelet also writes this condition."
    DISKS = "disks", "Disk usage of pods or directories is missing, incomplete or estimated."
    EVENTS = "events", "Kubernetes Events cannot be written."
    EVICTION_REQUESTS = "eviction requests", "How an EvictionRequest ended, or that the API server serves none."
    FORKS = "forks", "Fork rates are unknown, or pods fork very often."
    HOOKS = "hooks", "The program of a hook is missing, or other users can change it."
    HOST = "host", "The report is made from a recording."
    IDENTITY = "identity", "Requests for pods use the ServiceAccount's own rights, or the node's are incomplete."
    KUBELET = "kubelet", "The kubelet's configuration is unknown, or the kubelet acts first."
    LOOP = "loop", "A sync started late."
    MEMORY = "memory", "One figure of the available memory is unknown, or memory outside of pods grows."
    MEMORY_PRESSURE = "MemoryPressure", "The kubelet also writes this condition."
    NODE_CONDITIONS = "node conditions", "Conditions cannot be written."
    NODE_FIT = "node fit", "Whether another node takes a pod; or why that cannot be read."
    NODE_OBJECT = "node object", "The own Node object cannot be read."
    OOM_KILLS = "OOM kills", "The kernel ended processes because memory was short, or cannot be asked for it."
    OOM_SCORES = "OOM scores", "oom_score_adj of pods was raised, or cannot be written."
    OTHER_OOM_HANDLERS = "other OOM handlers", "Another program on this node kills processes when memory is short."
    OWNERS = "owners", "The replicas of a pod's owner cannot be read, or are no longer waited for."
    PDBS = "PDBs", "The PodDisruptionBudgets of a namespace are unknown."
    PID_PRESSURE = "PIDPressure", "The kubelet also writes this condition."
    POD = "pod", "One pod cannot be read, or only in part."
    PODS = "pods", "The pods of the node cannot be listed or named."
    PROFILES = "profiles", "The profiles of the configuration that apply to this node."
    PSI = "psi", "Pressure stall information is missing."
    RECLAIM = "reclaim", "The result of a reclaim action, or a program that is missing."
    RECORDER = "recorder", "Samples are not stored on disk."
    RELIEF = "relief", "Predicted and measured relief of a plan."
    REPORTING = "reporting", "A part of the agent that only reports has a defect."
    SELF_PROTECTION = (
        "self-protection",
        "The process cannot protect itself, uses its spare descriptors, or is confined by SELinux.",
    )
    SNAPSHOTS = "snapshots", "The newest snapshot file that the agent wrote by itself, or why there is none."
    TAINTS = "taints", "Taints cannot be written."
    VOLUMES = "volumes", "Claims or volumes cannot be looked up."
    WAKE_UPS = "wake-ups", "A kernel event source is missing; the timer still samples."
    WORKERS = "workers", "A thread is stuck."


class Note(NamedTuple):
    """One fact for the reader."""

    kind: NoteKind
    message: str
    about: str = ""
    """The pod or the namespace; empty if the kind says enough."""

    @property
    def subject(self) -> str:
        """The kind and what it is about, as the log and the report print them."""
        if not self.about:
            return self.kind.value
        return f"{self.kind.value} in {self.about}" if self.kind is NoteKind.PDBS else f"{self.kind.value} {self.about}"
