"""Rules between keys that no other module's tests hold."""

import textwrap
from pathlib import Path

import pytest

from nodeagent.config import load
from nodeagent.config.problems import ConfigError


def problems(tmp_path: Path, text: str) -> list[str]:
    path = tmp_path / "config.yaml"
    head = "apiVersion: nodeagent.io/v1alpha1\nkind: NodeAgentConfiguration\n"
    path.write_text(head + textwrap.dedent(text), "utf-8")
    try:
        load.load(str(path), overrides=())
    except ConfigError as error:
        return [f"{each.key}: {each.message}" for each in error.problems]
    return []


@pytest.mark.parametrize(
    ("keys", "found"),
    [
        ("command: [/bin/dump]", []),
        ("url: https://hooks.example.com/x", []),
        ("url: http://127.0.0.1:8080/x", []),
        ("command: [/bin/dump], url: https://h/", ["a hook is a command or an HTTP call"]),
        ("url: http://10.0.0.1/x", ["sends the pod's identity to 10.0.0.1 unencrypted"]),
        (
            "url: https://u:p@h/",
            ["contains a user or a password, which everybody who may read the configuration would see"],
        ),
        ("url: ftp://h/", ['"ftp://h/": must be an http:// or https:// address, or empty']),
        ('url: "https://h/\\n"', ['"https://h/\\n": must be an http:// or https:// address, or empty']),
        ("command: [/bin/dump], onFailure: retry", ['"retry": must be one of evict, skip']),
        ("command: [/bin/dump], deadline: 1h", ['"1h": must be from 100ms to 10m']),
    ],
)
def test_a_hook_is_a_command_or_an_address_that_may_be_called(tmp_path: Path, keys: str, found: list[str]) -> None:
    messages = problems(tmp_path, f"hooks: {{beforeEviction: {{{keys}}}}}")
    assert [message.partition(": ")[2] for message in messages] == found


@pytest.mark.parametrize(
    ("address", "valid"),
    [
        (":0", True),
        ("127.0.0.1:65535", True),
        ("[::1]:9655", True),
        (":65536", False),
        (":99999", False),
        ("host", False),
    ],
)
def test_an_address_has_a_port_that_exists(tmp_path: Path, address: str, valid: bool) -> None:
    messages = problems(tmp_path, f"metrics: {{address: '{address}'}}")
    assert len(messages) == (0 if valid else 1)
    assert all("a port is at most 65535" in message for message in messages)
