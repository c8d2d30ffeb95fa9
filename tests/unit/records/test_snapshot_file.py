"""The snapshot file: what is written is read, and everything else is one error that names the file."""

import contextlib
import io
import struct
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nodeagent.records import snapshot_file
from nodeagent.records.snapshot_file import Manifest, SnapshotError, SnapshotFile, SnapshotWriter

MANIFEST = Manifest("node-1", "0.1.0", 1_800_000_000.0, "eviction", "abcd-7", 1.5, 2.5, missing=("a part",))


def written(**members: bytes) -> bytes:
    """A snapshot file; `samples_0` is samples/samples-0.rec."""
    buffer = io.BytesIO()
    writer = SnapshotWriter(buffer, name="x.zip")
    for name, data in members.items():
        kind, _, rest = name.partition("_")
        writer.add(f"samples/samples-{rest}.rec" if kind == "samples" else name, [data[:3], data[3:]])
    writer.finish(MANIFEST)
    return buffer.getvalue()


def changed(change: Callable[[zipfile.ZipFile], None], *, without_manifest: bool = False) -> bytes:
    """A zip file that nodeagent would not write."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as target:
        if not without_manifest:
            target.writestr("manifest.json", '{"format": 1, "node": "n"}')
        change(target)
    return buffer.getvalue()


def read_all(path: Path) -> list[bytes]:
    with SnapshotFile(path) as found:
        return [found.read(name) for name in [*found.samples, "decisions.jsonl", "config.yaml", "kubelet.json"]]


def refusal(tmp_path: Path, data: bytes) -> str:
    """The message, without the path that it begins with."""
    path = tmp_path / "file.zip"
    path.write_bytes(data)
    with pytest.raises(SnapshotError) as caught:
        read_all(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert "\n" not in message
    return message.removeprefix(f"{path}: ")


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "file.zip"
    documents = {"config.yaml": b"mode: enforce", "facts.json": b'{"a":1}'}
    path.write_bytes(written(samples_0=b"one", samples_1=b"two", **documents))
    assert snapshot_file.is_snapshot(path)
    with SnapshotFile(path) as found:
        assert found.manifest == MANIFEST
        assert [found.read(name) for name in found.samples] == [b"one", b"two"]
        assert found.read_text("config.yaml") == "mode: enforce"
        assert found.read_json("facts.json") == {"a": 1}
        assert (found.read("kubelet.json"), found.read_json("kubelet.json")) == (b"", {})


def test_a_pipe_can_be_written() -> None:
    class Pipe(io.RawIOBase):
        data = b""

        def writable(self) -> bool:
            return True

        def seekable(self) -> bool:
            return False

        def write(self, data: object) -> int:
            self.data += bytes(data)  # type: ignore[call-overload]
            return len(data)  # type: ignore[arg-type]

    pipe = Pipe()
    writer = SnapshotWriter(pipe, name="-")  # type: ignore[arg-type]
    writer.add("config.yaml", [b"mode: enforce"])
    writer.finish(MANIFEST)
    with zipfile.ZipFile(io.BytesIO(pipe.data)) as found:
        assert found.read("config.yaml") == b"mode: enforce"


@pytest.mark.parametrize(
    "name", ["other.txt", "../config.yaml", "samples/x/y.rec", "samples/../../etc/passwd.rec", "/x"]
)
def test_a_member_with_another_name_is_neither_written_nor_read(tmp_path: Path, name: str) -> None:
    with pytest.raises(SnapshotError, match="a snapshot has no member"):
        SnapshotWriter(io.BytesIO(), name="x.zip").add(name, [b""])
    assert refusal(tmp_path, changed(lambda file: file.writestr(name, "x"))) == f"a snapshot has no member {name!r}"
    assert [path.name for path in tmp_path.iterdir()] == ["file.zip"]


def test_a_larger_file_than_allowed_is_not_written() -> None:
    writer = SnapshotWriter(io.BytesIO(), name="x.zip", max_bytes=1000)
    with pytest.raises(SnapshotError, match=r"x\.zip: larger than .* MiB; take a shorter time"):
        writer.add("samples/samples-0.rec", [b"x" * 500] * 3)
    with pytest.raises(SnapshotError, match=r"config\.yaml is larger than 1 MiB"):
        SnapshotWriter(io.BytesIO(), name="x.zip").add("config.yaml", [bytes(2**20), b"x"])


def test_more_members_than_allowed_are_not_written(tmp_path: Path) -> None:
    path = tmp_path / "file.zip"
    most = snapshot_file.MAX_MEMBERS - 1  # and the manifest
    path.write_bytes(written(**{f"samples_{number}": b"x" for number in range(most)}))
    assert len(read_all(path)) == most + 3
    with pytest.raises(SnapshotError, match=r"x\.zip: more than \d+ members; take a shorter time"):
        written(**{f"samples_{number}": b"x" for number in range(most + 1)})


# --- hostile files ---------------------------------------------------------------------------------------------------


def test_a_bomb_is_refused_before_it_is_unpacked(tmp_path: Path) -> None:
    def add(file: zipfile.ZipFile) -> None:
        file.writestr("config.yaml", bytes(2**20 + 1), zipfile.ZIP_DEFLATED)

    assert refusal(tmp_path, changed(add)) == "'config.yaml' unpacks to more than 1 MiB"


def test_a_bomb_that_lies_about_its_size_is_damaged(tmp_path: Path) -> None:
    def add(file: zipfile.ZipFile) -> None:
        file.writestr("config.yaml", bytes(2**20), zipfile.ZIP_DEFLATED)
        file.infolist()[-1].file_size = 10

    assert "'config.yaml' is " in refusal(tmp_path, changed(add))


def test_many_members_that_are_too_large_together_are_refused(tmp_path: Path) -> None:
    def add(file: zipfile.ZipFile) -> None:
        for number in range(5):
            file.writestr(f"samples/samples-{number}.rec", b"x")
            file.infolist()[-1].file_size = 60 * 2**20

    assert refusal(tmp_path, changed(add)) == "unpacks to more than 256 MiB"


def test_millions_of_members_are_refused_before_they_are_listed(tmp_path: Path) -> None:
    def add(file: zipfile.ZipFile) -> None:
        for number in range(snapshot_file.MAX_MEMBERS):
            file.writestr(f"samples/samples-{number}.rec", b"")

    assert refusal(tmp_path, changed(add)) == f"more than {snapshot_file.MAX_MEMBERS} members, not a snapshot file"


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_a_name_that_comes_twice_is_refused(tmp_path: Path) -> None:
    def add(file: zipfile.ZipFile) -> None:
        file.writestr("config.yaml", "a")
        file.writestr("config.yaml", "b")

    assert refusal(tmp_path, changed(add)) == "contains 'config.yaml' twice"


def test_a_symbolic_link_is_refused(tmp_path: Path) -> None:
    def add(file: zipfile.ZipFile) -> None:
        info = zipfile.ZipInfo("config.yaml")
        info.create_system, info.external_attr = 3, 0o120777 << 16
        file.writestr(info, "/etc/shadow")

    assert refusal(tmp_path, changed(add)) == "'config.yaml' is no regular file"


def test_an_encrypted_or_unusually_compressed_member_is_refused(tmp_path: Path) -> None:
    data = written(**{"config.yaml": b"x"})
    place = data.index(b"PK\x01\x02")
    encrypted = data[: place + 8] + b"\x01\x00" + data[place + 10 :]
    assert refusal(tmp_path, encrypted) == "'config.yaml' is encrypted"

    def add(file: zipfile.ZipFile) -> None:
        file.writestr("config.yaml", "x", zipfile.ZIP_LZMA)

    assert refusal(tmp_path, changed(add)) == "'config.yaml' is compressed in a way that nodeagent does not use"


def test_a_newer_format_is_refused_with_the_version_that_reads_it(tmp_path: Path) -> None:
    def add(file: zipfile.ZipFile) -> None:
        file.writestr("manifest.json", '{"format": 2, "version": "0.9.0", "new": 1}')
        file.writestr("something-new.bin", "x")

    assert refusal(tmp_path, changed(add, without_manifest=True)) == (
        "format 2 is newer than 1, which this nodeagent reads; use version '0.9.0' or later"
    )


@pytest.mark.parametrize(
    ("manifest", "message"),
    [
        ("{", "manifest.json is no JSON"),
        ("[]", "manifest.json is no JSON object"),
        ("{}", "manifest.json has no format version"),
        ('{"format": "1"}', "manifest.json has no format version"),
        ('{"format": true}', "manifest.json has no format version"),
        ('{"format": 1, "node": 7}', "manifest.json: Expected `str`, got `int`"),
        ("[" * 100_000, "manifest.json is no JSON"),
    ],
)
def test_a_wrong_manifest_is_refused(tmp_path: Path, manifest: str, message: str) -> None:
    data = changed(lambda file: file.writestr("manifest.json", manifest), without_manifest=True)
    assert refusal(tmp_path, data) == message


def test_a_zip_file_of_something_else_is_refused(tmp_path: Path) -> None:
    data = changed(lambda file: file.writestr("word/document.xml", "x"), without_manifest=True)
    assert refusal(tmp_path, data) == "not a snapshot file: it has no manifest.json"


def test_a_file_that_cannot_be_opened_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SnapshotError, match="No such file or directory"):
        SnapshotFile(tmp_path / "missing")
    with pytest.raises(SnapshotError, match="Is a directory"):
        SnapshotFile(tmp_path)
    assert not snapshot_file.is_snapshot(tmp_path)


def test_a_comment_or_zip64_is_refused(tmp_path: Path) -> None:
    data = changed(lambda file: setattr(file, "comment", b"hidden"))
    assert refusal(tmp_path, data) == "not a snapshot file, or truncated"
    end = data[: -len(b"hidden") - 2] + b"\0\0"
    locator = struct.pack("<4sLQL", b"PK\x06\x07", 0, 0, 1)
    assert refusal(tmp_path, end[:-22] + locator + end[-22:]) == "not a zip file as nodeagent writes it"


SAMPLES, DECISIONS, CONFIG = b"0123456789" * 50, b'{"record": "decision"}\n' * 20, b"a: 1\n"
WHOLE = written(samples_0=SAMPLES, **{"decisions.jsonl": DECISIONS, "config.yaml": CONFIG})


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz")


@given(size=st.integers(0, len(WHOLE) - 1))
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_truncated_file_is_one_error(place: Path, size: int) -> None:
    path = place / "truncated.zip"
    path.write_bytes(WHOLE[:size])
    with pytest.raises(SnapshotError):
        read_all(path)


@given(changes=st.lists(st.tuples(st.integers(0, len(WHOLE) - 1), st.integers(0, 255)), min_size=1, max_size=6))
@settings(max_examples=600, deadline=None)
def test_an_altered_file_is_read_as_it_was_or_one_error(place: Path, changes: Iterable[tuple[int, int]]) -> None:
    """A changed time or version of a tool is no damage; content is protected by a checksum."""
    path = place / "altered.zip"
    data = bytearray(WHOLE)
    for position, byte in changes:
        data[position] = byte
    path.write_bytes(data)
    with contextlib.suppress(SnapshotError):
        assert set(read_all(path)) <= {SAMPLES, DECISIONS, CONFIG, b""}
    assert sorted(each.name for each in place.iterdir() if "altered" in each.name) == ["altered.zip"]


@given(data=st.binary(max_size=200))
def test_any_bytes_are_one_error(place: Path, data: bytes) -> None:
    path = place / "any.zip"
    path.write_bytes(data)
    with pytest.raises(SnapshotError):
        read_all(path)
