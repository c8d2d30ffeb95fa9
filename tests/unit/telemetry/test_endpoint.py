"""Who may see the live page, and with which headers."""

from typing import Final

import pytest

from nodeagent.config.schema import Config, MetricsConfig, PageAccess
from nodeagent.telemetry import endpoint
from nodeagent.telemetry.http_server import Page, Request
from nodeagent.telemetry.metrics import Metrics
from nodeagent.telemetry.runtime_counters import RuntimeCounters
from tests.support import nodes

LOCAL: Final = Request(peer="127.0.0.1", host="127.0.0.1:9655")


def get(request: Request, access: PageAccess) -> Page:
    config: Config = nodes.config()._replace(metrics=MetricsConfig(page=access))
    pages = endpoint.build_pages(
        Metrics(config, boottime=lambda: 0.0, runtime_counters=RuntimeCounters),
        config=lambda: config,
        boottime=lambda: 0.0,
        live_page=lambda query: (f"<!DOCTYPE html>{query}".encode(), "default-src 'none'"),
    )
    return pages["/"](request)


@pytest.mark.parametrize(
    ("peer", "host"),
    [
        ("127.0.0.1", "127.0.0.1:9655"),
        ("127.3.2.1", "localhost:9655"),
        ("::1", "[::1]:9655"),
        ("::ffff:127.0.0.1", "LOCALHOST"),
        ("127.0.0.1", ""),
    ],
)
def test_a_client_of_this_host_sees_the_page(peer: str, host: str) -> None:
    assert get(Request(peer=peer, host=host), PageAccess.LOOPBACK).status == 200


@pytest.mark.parametrize("peer", ["10.0.0.7", "::ffff:10.0.0.7", "fe80::1%eth0", "169.254.1.1", "", "nonsense"])
def test_a_client_elsewhere_sees_no_name_of_a_pod(peer: str) -> None:
    page = get(Request(peer=peer, host="127.0.0.1:9655"), PageAccess.LOOPBACK)
    assert page.status == 403
    assert b"DOCTYPE" not in page.body


@pytest.mark.parametrize(
    "host", ["evil.example:9655", "127.0.0.1.evil.example", "localhost.evil.example:80", "10.0.0.7:1"]
)
def test_a_web_site_that_resolves_to_this_host_does_not_reach_the_page(host: str) -> None:
    assert get(Request(peer="127.0.0.1", host=host), PageAccess.LOOPBACK).status == 403


def test_every_client_sees_the_page_if_that_is_configured() -> None:
    assert get(Request(peer="10.0.0.7", host="node-1:9655"), PageAccess.ALL).status == 200


def test_the_page_can_be_switched_off() -> None:
    assert get(LOCAL, PageAccess.OFF).status == 404


def test_the_page_may_run_nothing_and_be_framed_by_nobody() -> None:
    headers = dict(get(LOCAL, PageAccess.LOOPBACK).headers)
    assert headers["Content-Security-Policy"] == "default-src 'none'; frame-ancestors 'none'"
    assert headers["X-Frame-Options"] == "DENY"
    assert headers["Cross-Origin-Resource-Policy"] == "same-origin"
    assert headers["Referrer-Policy"] == "no-referrer"


def test_the_query_reaches_the_page() -> None:
    assert get(LOCAL._replace(query="still"), PageAccess.LOOPBACK).body == b"<!DOCTYPE html>still"
