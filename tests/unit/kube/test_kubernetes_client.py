"""The official package is imported in parts, or whole if that fails."""

import subprocess
import sys

import pytest


def run(code: str) -> None:
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize("kubeconfig", [False, True])
def test_the_installed_version_loads_without_its_parent_packages(kubeconfig: bool) -> None:
    run(
        "import sys\n"
        "from nodeagent.kube import kubernetes_client\n"
        f"parts = kubernetes_client.load(kubeconfig={kubeconfig})\n"
        "assert parts.light\n"
        "heavy = {'kubernetes', 'kubernetes.client', 'pydantic', 'websocket', 'oauthlib', 'requests'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
        "parts.rest_client(parts.configuration()).pool_manager\n"
        f"assert (parts.load_kube_config is not None) == {kubeconfig}\n"
    )


def test_the_whole_package_can_still_be_imported_afterwards() -> None:
    run(
        "from nodeagent.kube import kubernetes_client\n"
        "parts = kubernetes_client.load(kubeconfig=True)\n"
        "import kubernetes\n"
        "from kubernetes import client, config\n"
        "assert client.CoreV1Api and config.load_kube_config\n"
        "assert client.Configuration is parts.configuration\n"
    )


def test_a_module_that_is_used_for_one_function_is_loaded_when_more_of_it_is_used() -> None:
    run(
        "import os, sys\n"
        "from nodeagent.kube import kubernetes_client, transport\n"
        "parts = kubernetes_client.load(kubeconfig=True)\n"
        "assert parts.light\n"
        "heavy = {'importlib.metadata', 'zipfile', 'multiprocessing', 'multiprocessing.context'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
        "import urllib3.http2, kubernetes.client.configuration as configuration\n"
        "from importlib import metadata\n"
        "assert urllib3.http2.version('urllib3') == metadata.version('urllib3')\n"
        "counted = sys.modules['kubernetes.client.configuration'].multiprocessing\n"
        "assert counted.cpu_count() == os.cpu_count()\n"
        "import multiprocessing\n"
        "assert counted.Queue is not None and multiprocessing.get_context and multiprocessing is not counted\n"
    )


def test_a_release_that_cannot_be_imported_in_parts_is_imported_whole() -> None:
    # A finder that hides one submodule as long as the parent is a bare module: as if a release had moved it.
    run(
        "import sys\n"
        "from nodeagent.kube import kubernetes_client\n"
        "class Moved:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        parent = sys.modules.get('kubernetes')\n"
        "        if name == 'kubernetes.client.rest' and not hasattr(parent, '__file__'):\n"
        "            raise ModuleNotFoundError(name)\n"
        "sys.meta_path.insert(0, Moved())\n"
        "parts = kubernetes_client.load(kubeconfig=True)\n"
        "assert not parts.light\n"
        "assert parts.load_kube_config and parts.rest_client\n"
    )


def test_the_whole_package_is_used_if_it_is_imported_already() -> None:
    run(
        "import kubernetes\n"
        "from nodeagent.kube import kubernetes_client\n"
        "parts = kubernetes_client.load(kubeconfig=False)\n"
        "assert not parts.light\n"
        "assert parts.configuration is kubernetes.client.Configuration\n"
    )
