"""A kubeconfig that cannot be used is one error with file, key and remedy; one that changes is read again."""

import base64
import json
import shutil
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from nodeagent.kube.api_errors import ApiError
from nodeagent.kube.credentials import Credentials, CredentialsError, find_credentials
from nodeagent.kube.transport import Transport, connect
from tests.fake_kube import AGENT, ApiServer
from tests.support.certificates import make, server_context

GOOD = """apiVersion: v1
kind: Config
clusters: [{name: c, cluster: {server: 'https://127.0.0.1:6443'}}]
users: [{name: u, user: {token: secret}}]
contexts: [{name: x, context: {cluster: c, user: u}}]
current-context: x
"""


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        (GOOD, "", "file is empty"),
        (GOOD, "- a\n", "no kubeconfig: it must be a mapping with"),
        (GOOD, "secret\n", "no kubeconfig: it must be a mapping with"),
        (GOOD, "a: [b\n", "expected ',' or ']'"),
        ("current-context: x", "", "Expected key current-context"),
        ("current-context: x", "current-context: y", "Expected object with name y"),
        ("cluster: c,", "cluster: d,", "Expected object with name d"),
        ("user: {token: secret}", "token: secret", "Expected key user"),
        ("server: 'https://127.0.0.1:6443'", "", "`clusters[].cluster.server` must be https://HOST:PORT"),
        ("https://", "", "`clusters[].cluster.server` must be https://HOST:PORT, not '127.0.0.1:6443'"),
        ("server:", "certificate-authority-data: YWJj, server:", "has no PEM certificate"),
        ("server:", "certificate-authority: /nowhere/ca.crt, server:", "File does not exist: /nowhere/ca.crt"),
        (
            "token: secret",
            "client-certificate-data: YWJj, client-key-data: YWJj",
            "`client-key` (or `-data`) are no PEM",
        ),
        ("token: secret", "tokenFile: /nowhere/token", "No such file or directory: '/nowhere/token'"),
    ],
)
def test_an_unusable_kubeconfig_is_one_error_with_the_file_and_the_remedy(
    tmp_path: Path, old: str, new: str, problem: str
) -> None:
    path = tmp_path / "kubeconfig"
    path.write_text(GOOD.replace(old, new))
    assert path.read_text() != GOOD
    with pytest.raises(CredentialsError) as raised:
        connect(find_credentials(str(path)))
    text = str(raised.value)
    assert problem in text
    assert str(path) in text
    assert any(remedy in text for remedy in ("correct the file", "must be", "take it from", "renew them"))
    assert "\n" not in text
    assert "secret" not in text


ANSWER = '{"apiVersion":"client.authentication.k8s.io/v1","kind":"ExecCredential","status":{"token":"%s"%s}}'
EXPIRED = ',"expirationTimestamp":"2020-01-01T00:00:00Z"'


def plugin(tmp_path: Path, *, command: str) -> dict[str, object]:
    script = tmp_path / "plugin"
    script.write_text(f"#!/bin/sh\necho x >> {tmp_path}/runs\n{command}\n")
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    run = {"apiVersion": "client.authentication.k8s.io/v1", "command": str(script), "interactiveMode": "Never"}
    return {"exec": run}


def write(api: ApiServer, path: Path, change: Callable[[dict[str, dict[str, object]]], None]) -> Credentials:
    """The kubeconfig for `api` with its cluster and user changed."""
    config = json.loads(api.kubeconfig(path).read_text())
    entry = {"cluster": config["clusters"][0]["cluster"], "user": config["users"][0]["user"]}
    change(entry)
    config["users"][0]["user"] = entry["user"]
    path.write_text(json.dumps(config))
    return find_credentials(str(path))


@pytest.mark.parametrize("what", ["token", "plugin"])
def test_a_new_address_of_the_server_is_used_within_a_minute(tmp_path: Path, what: str) -> None:
    def change(entry: dict[str, dict[str, object]]) -> None:
        if what == "plugin":
            entry["user"] = plugin(tmp_path, command=f"printf '{ANSWER % ('agent-token', '')}'")

    now = [0.0]
    with ApiServer() as old, ApiServer() as new:
        path = tmp_path / "kubeconfig"
        transport = Transport(write(old, path, change), request_timeout_s=5, clock=lambda: now[0])
        transport.request("GET", "/version")
        write(new, path, change)
        transport.request("GET", "/version")
        assert not new.requests, "the file is read once a minute"
        now[0] = 61.0
        transport.request("GET", "/version")
        assert transport.server == new.url
        assert len(new.requests) == 1
        now[0] = 122.0
        transport.request("GET", "/version")
        if what == "plugin":
            assert (tmp_path / "runs").read_text() == "x\nx\n", "the plugin runs again only for another file"


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificates")
def test_a_rotated_ca_in_the_kubeconfig_is_used_within_a_minute(tmp_path: Path) -> None:
    def trust(ca: Path) -> Callable[[dict[str, dict[str, object]]], None]:
        data = base64.b64encode(ca.read_bytes()).decode()
        return lambda entry: entry["cluster"].update({"certificate-authority-data": data})

    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    one, two = make(tmp_path / "one"), make(tmp_path / "two")
    now = [0.0]
    path = tmp_path / "kubeconfig"
    with ApiServer(tls=server_context(two)) as api:
        transport = Transport(write(api, path, trust(one / "ca.crt")), request_timeout_s=5, clock=lambda: now[0])
        with pytest.raises(ApiError, match="certificate"):
            transport.request("GET", "/version")
        write(api, path, trust(two / "ca.crt"))
        now[0] = 61.0
        assert transport.request("GET", "/version").status == 200


def test_a_kubeconfig_that_is_being_written_leaves_the_old_one_in_use(tmp_path: Path) -> None:
    now = [0.0]
    with ApiServer() as api:
        path = tmp_path / "kubeconfig"
        transport = Transport(write(api, path, lambda entry: None), request_timeout_s=5, clock=lambda: now[0])
        good = path.read_text()
        path.write_text(good[: len(good) // 2])
        now[0] = 61.0
        assert transport.request("GET", "/version").status == 200
        assert str(path) in transport.trouble
        path.write_text(good)
        now[0] = 122.0
        assert transport.request("GET", "/version").status == 200
        assert transport.trouble == ""


def test_a_plugin_is_asked_again_also_while_the_file_cannot_be_read(tmp_path: Path) -> None:
    now = [0.0]

    def change(entry: dict[str, dict[str, object]]) -> None:
        answer = ANSWER % ("'$(cat " + str(tmp_path / "token") + ")'", EXPIRED)
        entry["user"] = plugin(tmp_path, command=f"printf '{answer}'")

    (tmp_path / "token").write_text("agent-token")
    path = tmp_path / "kubeconfig"
    with ApiServer() as api:
        transport = Transport(write(api, path, change), request_timeout_s=5, clock=lambda: now[0])
        good = path.read_text()
        path.unlink()
        (tmp_path / "token").write_text("second")
        api.tokens = {"second": AGENT}
        now[0] = 61.0
        assert transport.request("GET", "/version").status == 200
        assert str(path) in transport.trouble
        path.write_text(good)
        now[0] = 122.0
        assert transport.request("GET", "/version").status == 200
        assert transport.trouble == ""


def test_why_an_exec_plugin_fails_is_reported(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The package only logs it, and uses the expired token again."""
    now = [0.0]

    def change(entry: dict[str, dict[str, object]]) -> None:
        entry["user"] = plugin(tmp_path, command=f"printf '{ANSWER % ('agent-token', EXPIRED)}'")

    with ApiServer() as api:
        transport = Transport(write(api, tmp_path / "kubeconfig", change), request_timeout_s=5, clock=lambda: now[0])
        (tmp_path / "plugin").unlink()
        now[0] = 61.0
        assert transport.request("GET", "/version").status == 200
        assert "the exec plugin failed" in transport.trouble
        assert "No such file or directory" in transport.trouble
        assert "ERROR:root" not in capfd.readouterr().err
