"""Facts about kernel and machine: listed files alone, and none that cannot be read."""

from pathlib import Path

import pytest

from nodeagent.sampling.hostfs.host import open_host
from nodeagent.sampling.node import facts


def host(root: Path, **files: str) -> dict[str, str]:
    for name, text in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return facts.read_facts(open_host(str(root)))


def test_listed_files_and_lines_are_facts(tmp_path: Path) -> None:
    found = host(
        tmp_path,
        proc__sys__vm__min_free_kbytes="67584\n",
        proc__meminfo="MemTotal: 16384 kB\nMemFree: 1 kB\n",
        proc__cmdline="password=s3cr3t\n",
    )
    assert found["/proc/sys/vm/min_free_kbytes"] == "67584"
    assert found["MemTotal"] == "16384 kB"
    assert "MemFree" not in found
    assert "s3cr3t" not in repr(found)


def test_the_distribution_is_named(tmp_path: Path) -> None:
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/os-release").write_text('NAME="x"\nPRETTY_NAME="Debian GNU/Linux 12 (bookworm)"\n')
    assert facts.read_facts(open_host(str(tmp_path)))["system"] == "Debian GNU/Linux 12 (bookworm)"


def test_a_host_without_files_has_the_versions_of_the_programs(tmp_path: Path) -> None:
    found = facts.read_facts(open_host(str(tmp_path)))
    assert {"python", "machine", "msgspec", "cgroups"} <= set(found)
    assert found["cgroups"] == "none"


def test_a_long_file_is_cut(tmp_path: Path) -> None:
    found = host(tmp_path, proc__sys__vm__swappiness="6" * 10_000)
    assert len(found["/proc/sys/vm/swappiness"]) == facts.MAX_FACT_CHARS


@pytest.mark.parametrize("path", facts.FILES)
def test_no_fact_names_the_machine_or_its_command_line(path: str) -> None:
    assert not any(word in path for word in ("cmdline", "hostname", "domainname", "environ", "boot_id", "random"))
