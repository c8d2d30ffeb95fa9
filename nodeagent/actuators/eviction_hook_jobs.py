"""What a hook before an eviction does: one program without a shell, or one HTTP request.

Promises:

1. It ends by its deadline, and the loop never waits for it: the jobs run in a `ReclaimRunner`.
2. A pod decides nothing but the values that name it. They are passed as data (JSON, variables), never as a part of a
   command line or an address, and only if they are names that Kubernetes allows: otherwise no hook runs.
3. Nothing of the agent is passed on: a command has no variable of the agent but `_INHERITED`, no descriptor and no
   credential; a request has no credential, follows no redirect and uses no proxy.
4. An address is checked again right before the call (`hook_url`).
"""

import json
import os
import re
import time
import urllib.parse
from collections.abc import Callable, Mapping
from http.client import HTTPConnection, HTTPException
from typing import Any, Final

from nodeagent.actuators import reclaim_runner
from nodeagent.actuators.reclaim_runner import JobResult, ReclaimJob
from nodeagent.config import hook_url
from nodeagent.config.schema import BeforeEvictionHook
from nodeagent.kube import deadline_http
from nodeagent.kube.deadline_http import RequestLimits
from nodeagent.model import (
    SIGNAL_TABLE,
    HookOrder,
    HookOutcome,
    HookResult,
    Note,
    NoteKind,
    ReclaimOutcome,
    ReclaimResult,
    Tier,
)
from nodeagent.runtime import clock

NAME: Final = "hooks.beforeEviction"
_INHERITED: Final = ("PATH", "LANG", "LC_ALL", "TZ")
"""Variables of the agent that a command gets. Others may hold secrets."""
_DNS_NAME: Final = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
"""Names of pods and namespaces (RFC 1123)."""
_UID: Final = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9]{0,126}[A-Za-z0-9])?")
_CGROUP: Final = re.compile(r"(/[-A-Za-z0-9_.:]+)*")
"""Cgroup names of every known driver."""


def build_job(
    hook: BeforeEvictionHook,
    order: HookOrder,
    *,
    plan_id: str,
    node: str,
    deadline_s: float,
    stop: Callable[[], bool] = lambda: False,
) -> ReclaimJob:
    """The job of this order. `stop` returns True if it must end early."""
    if trouble := _hostile(order):
        return lambda _: JobResult(ReclaimResult.FAILED, trouble)
    content = document(order, plan_id=plan_id, node=node, deadline_s=deadline_s)
    if hook.url:
        return lambda until: _post(hook.url, content, until)
    return lambda until: _run(hook.command, content, until, stop)


def outcome(ended: ReclaimOutcome) -> HookOutcome:
    """The end of a job, which has the UID of the pod for its name, as that of a hook."""
    return HookOutcome(ended.plan_id, ended.name, HookResult(ended.result.value), ended.message, ended.at)


def notes(hook: BeforeEvictionHook) -> tuple[Note, ...]:
    """A note if the program is missing on this machine, or can be changed by other users."""
    note = reclaim_runner.program_note(NoteKind.HOOKS, NAME, hook.command[0]) if hook.command else None
    return () if note is None else (note,)


def document(order: HookOrder, *, plan_id: str, node: str, deadline_s: float) -> Mapping[str, Any]:
    """What a hook learns, with the names of its JSON."""
    return {
        "apiVersion": "nodeagent.io/v1alpha1",
        "kind": "BeforeEviction",
        "plan": plan_id,
        "node": node,
        "tier": Tier.SOFT.value,
        "signal": order.signal.value,
        "resource": SIGNAL_TABLE[order.signal].resource,
        "deficit": order.deficit,
        "available": order.available,
        "deadlineSeconds": deadline_s,
        "pod": {"namespace": order.namespace, "name": order.name, "uid": order.pod_uid, "cgroup": order.cgroup},
    }


def environment(content: Mapping[str, Any]) -> dict[str, str]:
    """The same as variables, with `_INHERITED`."""
    pod = content["pod"]
    return {
        **{name: os.environ[name] for name in _INHERITED if name in os.environ},
        "NODEAGENT_PLAN": content["plan"],
        "NODEAGENT_NODE": content["node"],
        "NODEAGENT_TIER": content["tier"],
        "NODEAGENT_SIGNAL": content["signal"],
        "NODEAGENT_RESOURCE": content["resource"],
        "NODEAGENT_DEFICIT": str(content["deficit"]),
        "NODEAGENT_AVAILABLE": str(content["available"]),
        "NODEAGENT_DEADLINE_SECONDS": f"{content['deadlineSeconds']:g}",
        "NODEAGENT_POD_NAMESPACE": pod["namespace"],
        "NODEAGENT_POD_NAME": pod["name"],
        "NODEAGENT_POD_UID": pod["uid"],
        "NODEAGENT_POD_CGROUP": pod["cgroup"],
    }


def _hostile(order: HookOrder) -> str:
    """Why no hook runs for this pod; empty if it may. The API server refuses such names; this agent may talk to
    another program."""
    for what, text, allowed in (
        ("namespace", order.namespace, _DNS_NAME),
        ("name", order.name, _DNS_NAME),
        ("UID", order.pod_uid, _UID),
        ("cgroup", order.cgroup, _CGROUP),
    ):
        if not allowed.fullmatch(text):
            return f"not run: the pod's {what} is none that Kubernetes allows"
    return ""


def _run(words: tuple[str, ...], content: Mapping[str, Any], until: float, stop: Callable[[], bool]) -> JobResult:
    # A file in memory, not a pipe: a program that does not read it blocks nobody.
    fd = os.memfd_create("hook")
    try:
        os.write(fd, json.dumps(content).encode() + b"\n")
        os.lseek(fd, 0, os.SEEK_SET)
        return reclaim_runner.run_command(words, environment(content), until=until, stop=stop, stdin=fd)
    finally:
        os.close(fd)


def _post(url: str, content: Mapping[str, Any], until: float) -> JobResult:
    """One request. The answer's body is not read: it decides nothing, and might be without end."""
    if trouble := hook_url.refusal(url):
        return JobResult(ReclaimResult.FAILED, f"{url}: {trouble}")
    parts = urllib.parse.urlsplit(url)
    left_s = until - time.monotonic()
    if left_s <= 0:
        return JobResult(ReclaimResult.TIMED_OUT, "the deadline had passed before the request")
    deadline_http.current.limits = RequestLimits(deadline=clock.boottime() + left_s, idle_s=left_s)
    connection = _connection(parts, left_s)
    path = urllib.parse.urlunsplit(("", "", parts.path or "/", parts.query, ""))
    try:
        connection.request(
            "POST",
            path,
            body=json.dumps(content).encode(),
            headers={"Content-Type": "application/json", "User-Agent": "nodeagent", "Connection": "close"},
        )
        status = connection.getresponse().status
    except TimeoutError:
        return JobResult(ReclaimResult.TIMED_OUT, f"{parts.netloc} has not answered in time")
    except (OSError, HTTPException, ValueError) as error:
        return JobResult(ReclaimResult.FAILED, f"{parts.netloc}: {str(error) or type(error).__name__}")
    finally:
        connection.close()
    return JobResult(ReclaimResult.DONE if 200 <= status < 300 else ReclaimResult.FAILED, f"HTTP {status}")


def _connection(parts: urllib.parse.SplitResult, timeout_s: float) -> Any:
    host = parts.hostname or ""
    if parts.scheme == "http":
        return deadline_http.with_deadline(HTTPConnection)(host, parts.port, timeout=timeout_s)
    import ssl
    from http.client import HTTPSConnection

    context = ssl.create_default_context()
    return deadline_http.with_deadline(HTTPSConnection)(host, parts.port, timeout=timeout_s, context=context)
