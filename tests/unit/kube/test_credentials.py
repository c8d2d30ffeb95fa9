"""Credentials are found in files and the environment alone."""

import subprocess
import sys
from pathlib import Path

import pytest

from nodeagent.kube.credentials import CredentialSource, find_credentials


@pytest.fixture
def places(tmp_path: Path) -> Path:
    """A home with a kubeconfig, another kubeconfig, and a service account."""
    for name in ("home/.kube/config", "env.yaml", "given.yaml", "sa/token", "sa/ca.crt"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x")
    return tmp_path


def environment(places: Path, *names: str) -> dict[str, str]:
    everything = {
        "HOME": str(places / "home"),
        "KUBECONFIG": str(places / "env.yaml"),
        "KUBERNETES_SERVICE_HOST": "10.96.0.1",
        "KUBERNETES_SERVICE_PORT": "443",
    }
    return {k: v for k, v in everything.items() if k in names}


def find(places: Path, given: str, *names: str) -> tuple[CredentialSource, str]:
    found = find_credentials(given, environ=environment(places, *names), service_account_dir=str(places / "sa"))
    return found.source, found.kubeconfig or found.server


ALL = ("HOME", "KUBECONFIG", "KUBERNETES_SERVICE_HOST", "KUBERNETES_SERVICE_PORT")


def test_the_order_is_option_then_environment_then_service_account_then_home(places: Path) -> None:
    given = str(places / "given.yaml")
    assert find(places, given, *ALL) == (CredentialSource.EXPLICIT, given)
    assert find(places, "", *ALL) == (CredentialSource.ENVIRONMENT, str(places / "env.yaml"))
    in_cluster = ("HOME", "KUBERNETES_SERVICE_HOST", "KUBERNETES_SERVICE_PORT")
    assert find(places, "", *in_cluster) == (CredentialSource.SERVICE_ACCOUNT, "10.96.0.1:443")
    assert find(places, "", "HOME") == (CredentialSource.HOME, str(places / "home/.kube/config"))


def test_a_configured_file_that_is_missing_ends_the_search(places: Path) -> None:
    found = find_credentials(str(places / "nope"), environ=environment(places, *ALL))
    assert not found.found
    assert str(places / "nope") in found.reason
    environ = {**environment(places, *ALL), "KUBECONFIG": str(places / "gone")}
    assert not find_credentials(environ=environ, service_account_dir=str(places / "sa")).found


def test_no_credentials_come_with_the_reason(tmp_path: Path) -> None:
    found = find_credentials(environ={"HOME": str(tmp_path)}, service_account_dir=str(tmp_path))
    assert found.source is CredentialSource.NONE
    assert "no $KUBECONFIG" in found.reason


def test_of_several_kubeconfigs_those_that_exist_are_used(places: Path) -> None:
    environ = {"KUBECONFIG": f"{places / 'gone'}:{places / 'env.yaml'}:{places / 'given.yaml'}"}
    assert find_credentials(environ=environ).kubeconfig == f"{places / 'env.yaml'}:{places / 'given.yaml'}"


def test_an_ipv6_service_address_is_put_in_brackets(places: Path) -> None:
    environ = {"KUBERNETES_SERVICE_HOST": "fd00::1", "KUBERNETES_SERVICE_PORT": "443"}
    assert find_credentials(environ=environ, service_account_dir=str(places / "sa")).server == "[fd00::1]:443"


def test_finding_credentials_imports_nothing_heavy() -> None:
    code = (
        "import sys\n"
        "from nodeagent.kube.credentials import find_credentials\n"
        "find_credentials(environ={})\n"
        "heavy = {'kubernetes', 'urllib3', 'msgspec', 'json', 'ssl', 'yaml', 'dataclasses'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
