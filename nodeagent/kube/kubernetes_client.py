"""Imports the parts of the official `kubernetes` package that `kube` uses, without executing its parent packages.

`import kubernetes` runs `kubernetes/__init__.py`, which pulls in the dynamic client, websockets, pydantic and more:
170 ms of CPU and 43 MiB where configuration, authentication and transport alone cost 65 ms and 25 MiB (python 3.11,
kubernetes 37.0.2, urllib3 included, which is most of it). The kubeconfig loader also imports an OAuth stack, which only
the long-deprecated `auth-provider: oidc` uses: 102 ms and 32 MiB with it, 75 ms and 26 MiB without.

How: during the import of the submodules, bare module objects with only a directory stand in `sys.modules` for the
parents (and for the OAuth stack). Afterwards they are removed, so that a later `import kubernetes` gets the whole
package. If a release cannot be imported this way, the whole package is imported instead: slower, never broken.
"""

import importlib
import importlib.util
import os
import sys
import types
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Final, NamedTuple

_PARENTS: Final = ("kubernetes", "kubernetes.client", "kubernetes.config", "kubernetes.utils")


class KubernetesClient(NamedTuple):
    """The official package's classes and functions that `server_connection` uses."""

    configuration: Any
    """`kubernetes.client.Configuration`."""
    rest_client: Any
    """`kubernetes.client.rest.RESTClientObject`: its pool manager has TLS, client certificates and proxies set up."""
    in_cluster_loader: Any
    """`kubernetes.config.incluster_config.InClusterConfigLoader`."""
    load_kube_config: Any
    """`kubernetes.config.kube_config.load_kube_config`; None if it was not loaded."""
    light: bool
    """True if the parent packages were not executed."""


class _LazyModule(types.ModuleType):
    """Stands for a module until another attribute than the given ones is read: then the module is imported."""

    def __init__(self, name: str, **given: Any) -> None:
        super().__init__(name)
        self.__dict__.update(given)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # read by every import
            raise AttributeError(name)
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        return getattr(importlib.import_module(self.__name__), name)


def _version(distribution: str) -> str:
    from importlib import metadata

    return metadata.version(distribution)


@contextmanager
def _standing_in(modules: Iterable[types.ModuleType]) -> Iterator[None]:
    """Meanwhile, these stand in `sys.modules` for the real modules that are not loaded yet."""
    stand_ins = {module.__name__: module for module in modules if module.__name__ not in sys.modules}
    sys.modules.update(stand_ins)
    try:
        yield
    finally:
        for name, module in stand_ins.items():
            if sys.modules.get(name) is module:
                del sys.modules[name]


def without_unused_modules() -> AbstractContextManager[None]:
    """Meanwhile, two modules that are imported for one function each are not loaded: 1.1 MiB of the running agent.

    urllib3 reads the version of h2 (`importlib.metadata`, which loads zipfile and csv) before it uses HTTP/2, and
    `kubernetes.client.configuration` counts CPUs (`multiprocessing`, which loads pickle). Both functions work as
    before."""
    return _standing_in(
        (_LazyModule("importlib.metadata", version=_version), _LazyModule("multiprocessing", cpu_count=os.cpu_count))
    )


def load(*, kubeconfig: bool, light: bool = True) -> KubernetesClient:
    """Import the parts. `kubeconfig`: also the kubeconfig loader (PyYAML). `light` False imports the whole package,
    which a kubeconfig with an `auth-provider` needs.

    Raises ImportError if the package is not installed.
    """
    if light and not any(name in sys.modules for name in _PARENTS):
        try:
            with without_unused_modules(), _bare_parents():
                return _collect(kubeconfig=kubeconfig, light=True)
        except (ImportError, AttributeError, TypeError):
            # This release cannot be imported in parts. Drop the parts and import it whole.
            for name in [name for name in sys.modules if name.partition(".")[0] == "kubernetes"]:
                del sys.modules[name]
    return _collect(kubeconfig=kubeconfig, light=False)


def _collect(*, kubeconfig: bool, light: bool) -> KubernetesClient:
    configuration = importlib.import_module("kubernetes.client.configuration")
    if light:
        # `kubernetes.config.*` imports Configuration and ApiClient from `kubernetes.client`. Only an auth-provider uses
        # ApiClient, and it loads the whole package.
        client: Any = sys.modules["kubernetes.client"]
        client.Configuration = configuration.Configuration
        client.ApiClient = None
    rest = importlib.import_module("kubernetes.client.rest")
    in_cluster = importlib.import_module("kubernetes.config.incluster_config")
    kube_config = importlib.import_module("kubernetes.config.kube_config") if kubeconfig else None
    return KubernetesClient(
        configuration=configuration.Configuration,
        rest_client=rest.RESTClientObject,
        in_cluster_loader=in_cluster.InClusterConfigLoader,
        load_kube_config=kube_config.load_kube_config if kube_config else None,
        light=light,
    )


def _bare_parents() -> AbstractContextManager[None]:
    """Meanwhile, modules with only a directory stand for the parents, and empty ones for the OAuth stack. Raises
    ImportError if the package is not installed."""
    spec = importlib.util.find_spec("kubernetes")
    if spec is None or not spec.submodule_search_locations:
        msg = "the kubernetes package is not installed"
        raise ImportError(msg)
    root = spec.submodule_search_locations[0]
    parents = [_bare(name, __path__=["/".join((root, *name.split(".")[1:]))]) for name in _PARENTS]
    oauth2 = _bare("oauthlib.oauth2")
    return _standing_in(
        (*parents, _bare("oauthlib", oauth2=oauth2), oauth2, _bare("requests_oauthlib", OAuth2Session=None))
    )


def _bare(name: str, **given: Any) -> types.ModuleType:
    module = types.ModuleType(name)
    module.__dict__.update(given)
    return module
