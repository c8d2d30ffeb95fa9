"""Facts about the kernel and the machine that explain its memory, for a snapshot file.

Only files that are listed here are read, and each is a number, a switch or a version. A fact that cannot be read is
left out. Kernel command line, host names and addresses are no facts.
"""

import os
import platform
from typing import Final

from nodeagent.sampling.hostfs import cgroups
from nodeagent.sampling.hostfs.host import Host, Unreadable

FILES: Final = (
    "/proc/sys/kernel/osrelease",
    "/proc/sys/kernel/pid_max",
    "/proc/sys/kernel/threads-max",
    "/proc/sys/vm/admin_reserve_kbytes",
    "/proc/sys/vm/dirty_background_ratio",
    "/proc/sys/vm/dirty_ratio",
    "/proc/sys/vm/min_free_kbytes",
    "/proc/sys/vm/oom_kill_allocating_task",
    "/proc/sys/vm/overcommit_memory",
    "/proc/sys/vm/overcommit_ratio",
    "/proc/sys/vm/panic_on_oom",
    "/proc/sys/vm/swappiness",
    "/proc/sys/vm/user_reserve_kbytes",
    "/proc/sys/vm/vfs_cache_pressure",
    "/proc/sys/vm/watermark_boost_factor",
    "/proc/sys/vm/watermark_scale_factor",
    "/proc/sys/vm/zone_reclaim_mode",
    "/proc/uptime",
    "/sys/kernel/mm/lru_gen/enabled",
    "/sys/kernel/mm/lru_gen/min_ttl_ms",
    "/sys/kernel/mm/swap/vma_ra_enabled",
    "/sys/kernel/mm/transparent_hugepage/enabled",
    "/sys/module/zswap/parameters/enabled",
    "/sys/module/zswap/parameters/max_pool_percent",
)
KEYED: Final = {"/proc/meminfo": ("MemTotal", "SwapTotal", "HugePages_Total", "Hugepagesize", "CommitLimit")}
"""Files of which only some lines are facts."""
PACKAGES: Final = ("kubernetes", "msgspec", "urllib3", "PyYAML")
MAX_FACT_CHARS: Final = 200


def read_facts(host: Host) -> dict[str, str]:
    """The facts by name, which is the path of a file or a word. Never raises."""
    facts = {"python": platform.python_version(), "machine": os.uname().machine}
    facts.update(_package_versions())
    facts.update(_system_name(host))
    facts["cgroups"] = _cgroups(host)
    for path in FILES:
        text = _read(host, path).strip()
        if text:
            facts[path] = text[:MAX_FACT_CHARS]
    for path, names in KEYED.items():
        for line in _read(host, path).splitlines():
            name, colon, value = line.partition(":")
            if colon and name in names:
                facts[name] = value.strip()[:MAX_FACT_CHARS]
    return facts


def _package_versions() -> dict[str, str]:
    from importlib import metadata  # loads zipfile and csv: 0.6 MiB that a running agent does not need

    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return versions


def _system_name(host: Host) -> dict[str, str]:
    """The name and the version of the distribution."""
    for line in _read(host, "/etc/os-release").splitlines():
        name, equals, value = line.partition("=")
        if equals and name == "PRETTY_NAME":
            return {"system": value.strip().strip('"')[:MAX_FACT_CHARS]}
    return {}


def _cgroups(host: Host) -> str:
    hierarchy = cgroups.detect_hierarchy(host)
    if hierarchy.unified is not None and hierarchy.unified == hierarchy.memory:
        return "v2"
    return "v1" if hierarchy.memory is not None else "none"


def _read(host: Host, path: str) -> str:
    try:
        return host.text(path)
    except Unreadable:
        return ""
