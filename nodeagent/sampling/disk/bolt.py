"""A reader of bolt databases, in which containerd keeps its metadata (https://github.com/etcd-io/bbolt).

Promises:

1. It only reads, takes no lock and delays no writer: the file is read at once and parsed afterwards.
2. A result is one committed state. A writer may not touch the pages of the newest state before two more commits, so the
   state is whole if no commit came while the file was read. Otherwise it is read again, `_TRIES` times.
3. A file of any content ends in an error or a result: every offset is checked, and no page is visited twice.

The format: pages of one size. Page 0 and 1 are the two meta pages; the one with the newer transaction and a correct
checksum counts. A bucket is a B+ tree of branch and leaf pages. An element of a leaf is a key with a value or with a
bucket, which is a page number or, if that is 0, a page within the value.
"""

import os
import struct
from collections.abc import Iterator
from typing import Final, NamedTuple

from nodeagent.sampling.hostfs.host import Host, Unreadable

MAX_BYTES: Final = 256 << 20
"""Larger databases are not read. A node with 500 pods has 8 MiB."""
_TRIES: Final = 5
_MAGIC: Final = 0xED0CDAED
_VERSION: Final = 2
_PAGE: Final = struct.Struct("<QHHI")
"""Number, flags, number of elements, further pages."""
_META: Final = struct.Struct("<IIIIQQQQQQ")
"""Magic, version, page size, flags, root page, root sequence, free list, number of pages, transaction, checksum."""
_BRANCH: Final = struct.Struct("<IIQ")
"""Offset of the key from the element, its length, page."""
_LEAF: Final = struct.Struct("<IIII")
"""Flags, offset of the key from the element, its length, length of the value."""
_BUCKET: Final = struct.Struct("<QQ")
"""Page, sequence."""
_BRANCH_PAGE, _LEAF_PAGE = 0x01, 0x02
_IS_BUCKET: Final = 0x01
_MAX_DEPTH: Final = 64
"""A tree of three pages has a million keys."""
_FNV_OFFSET, _FNV_PRIME = 0xCBF29CE484222325, 0x100000001B3
_META_SIZE: Final = 1 << 16
"""Bytes that contain both meta pages, with pages of up to 32 KiB."""


class Bucket:
    """A bucket of one state of a database. Lookups raise BoltError if the file is damaged."""

    def __init__(self, database: "_Database", page: bytes | int) -> None:
        self._database = database
        self._page = page

    def items(self) -> Iterator[tuple[bytes, "bytes | Bucket"]]:
        """(key, value or bucket), in the order of the keys."""
        return self._database.items(self._page, set())

    def bucket(self, *path: str) -> "Bucket | None":
        """The bucket below these names; None if there is none."""
        found = self
        for name in path:
            below = dict(found.items()).get(name.encode())
            if not isinstance(below, Bucket):
                return None
            found = below
        return found


class BoltError(Exception):
    """The file is no bolt database, or was damaged."""


def read_database(host: Host, path: str) -> Bucket:
    """The root bucket of the newest state. Raises BoltError, Unreadable."""
    fd = host.open(path)
    try:
        for _ in range(_TRIES):
            size = os.fstat(fd).st_size
            if size > MAX_BYTES:
                raise BoltError(f"{path}: {size} bytes, more than {MAX_BYTES}")
            data = os.pread(fd, size, 0)
            meta = _newest_meta(data)
            if meta == _newest_meta(os.pread(fd, _META_SIZE, 0)):
                return Bucket(_Database(data, meta.page_size), meta.root)
    except OSError as error:
        raise Unreadable(path, error.errno or 0, error.strerror or str(error)) from error
    finally:
        os.close(fd)
    raise BoltError(f"{path}: was written during each of {_TRIES} reads")


class _Meta(NamedTuple):
    page_size: int
    root: int
    transaction: int


def _newest_meta(data: bytes) -> _Meta:
    first = _meta(data, 0)
    # With a damaged first page its size is unknown; bolt then tries the usual ones, too.
    sizes = (first.page_size,) if first is not None else (4096, 8192, 16384, 32768)
    found = [each for each in (first, *(_meta(data, size) for size in sizes)) if each is not None]
    if not found:
        raise BoltError("no bolt database")
    return max(found, key=lambda meta: meta.transaction)


def _meta(data: bytes, at: int) -> _Meta | None:
    if at + _PAGE.size + _META.size > len(data):
        return None
    body = data[at + _PAGE.size : at + _PAGE.size + _META.size]
    magic, version, page_size, _, root, _, _, _, transaction, checksum = _META.unpack(body)
    if magic != _MAGIC or version != _VERSION or checksum != _fnv(body[:-8]):
        return None
    return _Meta(page_size, root, transaction) if 512 <= page_size <= 1 << 20 else None


def _fnv(data: bytes) -> int:
    """FNV-1a of 64 bits."""
    value = _FNV_OFFSET
    for byte in data:
        value = (value ^ byte) * _FNV_PRIME & 0xFFFFFFFFFFFFFFFF
    return value


class _Database:
    def __init__(self, data: bytes, page_size: int) -> None:
        self._data = data
        self._page_size = page_size

    def items(self, page: bytes | int, visited: set[int], depth: int = 0) -> Iterator[tuple[bytes, bytes | Bucket]]:
        """The elements below a page: its number, or its bytes if it is within a value."""
        if depth > _MAX_DEPTH:
            raise BoltError(f"a tree deeper than {_MAX_DEPTH} pages")
        if isinstance(page, int):
            if page in visited:
                raise BoltError(f"page {page} is its own descendant")
            visited.add(page)
        data, start = (self._data, page * self._page_size) if isinstance(page, int) else (page, 0)
        _, flags, count, _ = _unpack(_PAGE, data, start)
        at = start + _PAGE.size
        if flags & _BRANCH_PAGE:
            for index in range(count):
                _, _, below = _unpack(_BRANCH, data, at + index * _BRANCH.size)
                yield from self.items(below, visited, depth + 1)
        elif flags & _LEAF_PAGE:
            for index in range(count):
                yield self._element(data, at + index * _LEAF.size)
        else:
            raise BoltError(f"a page with the flags {flags:#x} in a tree")

    def _element(self, data: bytes, at: int) -> tuple[bytes, bytes | Bucket]:
        flags, offset, key_size, value_size = _unpack(_LEAF, data, at)
        start = at + offset
        if start + key_size + value_size > len(data):
            raise BoltError("an element ends after its page")
        key, value = data[start : start + key_size], data[start + key_size : start + key_size + value_size]
        if not flags & _IS_BUCKET:
            return key, value
        root, _ = _unpack(_BUCKET, value, 0)
        return key, Bucket(self, root or value[_BUCKET.size :])


def _unpack(layout: struct.Struct, data: bytes, at: int) -> tuple[int, ...]:
    if at < 0 or at + layout.size > len(data):
        raise BoltError(f"byte {at} is after the end")
    return layout.unpack_from(data, at)
