"""Which addresses a hook may call."""

import pytest

from nodeagent.config import hook_url


@pytest.mark.parametrize(
    "url",
    [
        "https://hooks.example.com/evict?cluster=a",
        "https://10.0.0.7:8443",
        "http://localhost:8080/",
        "http://127.0.0.1",
        "http://127.9.9.9:1/x",
        "http://[::1]:8080/x",
    ],
)
def test_encrypted_anywhere_and_plain_to_this_host(url: str) -> None:
    assert hook_url.refusal(url) == ""


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("http://169.254.169.254/latest/meta-data", "unencrypted"),
        ("http://10.0.0.7/", "unencrypted"),
        ("http://localhost.example.com/", "unencrypted"),
        ("http://127.0.0.1.example.com/", "unencrypted"),
        ("http://127.1/", "unencrypted"),
        ("http://0x7f000001/", "unencrypted"),
        ("http://0.0.0.0/", "unencrypted"),
        ("http://[::ffff:169.254.169.254]/", "unencrypted"),
        ("https://user:secret@host/", "password"),
        ("https://host/#x", "fragment"),
        ("https:///path", "no http"),
        ("file:///etc/passwd", "no http"),
        ("https://host:99999/", "no address"),
        ("https://[::1/", "no address"),
    ],
)
def test_other_addresses_are_refused(url: str, why: str) -> None:
    assert why in hook_url.refusal(url)
