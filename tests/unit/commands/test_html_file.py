import os
from pathlib import Path

import pytest

from nodeagent.commands import html_file
from nodeagent.commands.standard_streams import OutputError
from nodeagent.report import html_page

BLOCKS = (html_page.paragraph("all is well"),)


def test_a_page_is_written_with_the_permissions_of_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        html_file.write(str(tmp_path / "page.html"), "title", BLOCKS)
    finally:
        os.umask(before)
    assert "all is well" in (tmp_path / "page.html").read_text("utf-8")
    assert (tmp_path / "page.html").stat().st_mode & 0o777 == 0o640
    assert os.listdir(tmp_path) == ["page.html"]


def test_an_existing_page_is_replaced_as_a_whole_and_keeps_its_permissions(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text("x" * 1_000_000)
    page.chmod(0o600)
    html_file.write(str(page), "title", BLOCKS)
    assert "xxx" not in page.read_text("utf-8")
    assert page.stat().st_mode & 0o777 == 0o600


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "link.html").symlink_to(tmp_path / "page.html")
    html_file.write(str(tmp_path / "link.html"), "title", BLOCKS)
    assert (tmp_path / "link.html").is_symlink()
    assert "all is well" in (tmp_path / "page.html").read_text("utf-8")


def test_a_pipe_is_written_to_and_not_replaced(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    try:
        html_file.write(str(tmp_path / "pipe"), "title", BLOCKS)
        assert os.read(reader, 15) == b"<!DOCTYPE html>"
    finally:
        os.close(reader)
    assert (tmp_path / "pipe").is_fifo()


@pytest.mark.parametrize("place", [".", "missing/page.html"])
def test_a_file_that_cannot_be_written_is_one_clear_error(tmp_path: Path, place: str) -> None:
    with pytest.raises(OutputError, match=f"--html .*{place}: (Is a directory|No such file or directory)"):
        html_file.write(os.path.join(tmp_path, place), "title", BLOCKS)
    assert os.listdir(tmp_path) == []


def test_a_full_disk_is_reported() -> None:
    with pytest.raises(OutputError, match="No space left on device"):
        html_file.write("/dev/full", "title", BLOCKS)


def test_a_dash_is_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    html_file.write("-", "title", BLOCKS)
    assert capsys.readouterr().out.startswith("<!DOCTYPE html>")
