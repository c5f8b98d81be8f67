"""What connections of ours send and read in PostgreSQL's binary format without making objects on the way."""

import struct
from typing import Final

from psycopg.abc import Buffer
from psycopg.adapt import AdaptersMap, Dumper
from psycopg.pq import Format
from psycopg.types.numeric import Int8BinaryLoader
from psycopg.types.string import ByteaBinaryLoader


class UuidArray(list[bytes]):
    """A uuid[] parameter from ids of 16 bytes."""


class IntArray(list[int | None]):
    """An int[] parameter, None for SQL null. To a connection that was not taught it is a list."""


class TextArray(list[str | None]):
    """A text[] parameter, None for SQL null. To a connection that was not taught it is a list."""


class JsonTextArray(list[str | None]):
    """A jsonb[] parameter from JSON texts, None for SQL null. To a connection that was not taught it is a list."""


class JsonArray(list[bytes | None]):
    """A jsonb[] parameter from encoded JSON, None for SQL null."""


_NULL: Final = b"\xff\xff\xff\xff"


def _sized(item: bytes) -> bytes:
    return len(item).to_bytes(4, "big") + item


def _array(oid: int, length: int, items: bytes, nulls: bool = False) -> bytes:
    if not length:
        return struct.pack("!iiI", 0, 0, oid)
    return struct.pack("!iiIii", 1, nulls, oid, length, 1) + items


class _UuidArrayDumper(Dumper):
    format = Format.BINARY
    oid = 2951

    def dump(self, obj: UuidArray) -> Buffer | None:
        return _array(2950, len(obj), b"\0\0\0\x10".join([b"", *obj]))


class _IntArrayDumper(Dumper):
    format = Format.BINARY
    oid = 1007

    def dump(self, obj: IntArray) -> Buffer | None:
        # Attempts and priorities of many jobs are few.
        sized = {item: _NULL if item is None else struct.pack("!ii", 4, item) for item in set(obj)}
        return _array(23, len(obj), b"".join([sized[item] for item in obj]), None in sized)


class _TextArrayDumper(Dumper):
    format = Format.BINARY
    oid = 1009

    def dump(self, obj: TextArray) -> Buffer | None:
        # Types and queues of many jobs are few.
        sized = {item: _NULL if item is None else _sized(item.encode()) for item in set(obj)}
        return _array(25, len(obj), b"".join([sized[item] for item in obj]), None in sized)


class _JsonTextArrayDumper(Dumper):
    format = Format.BINARY
    oid = 3807

    def dump(self, obj: JsonTextArray) -> Buffer | None:
        items = [_NULL if item is None else _sized(b"\x01" + item.encode()) for item in obj]
        return _array(3802, len(obj), b"".join(items), None in obj)


class _JsonArrayDumper(Dumper):
    format = Format.BINARY
    oid = 3807

    def dump(self, obj: JsonArray) -> Buffer | None:
        items = [_NULL if item is None else _sized(b"\x01" + item) for item in obj]
        return _array(3802, len(obj), b"".join(items), None in obj)


def send_arrays(adapters: AdaptersMap) -> None:
    """Teach a connection to send the arrays above."""
    adapters.register_dumper(UuidArray, _UuidArrayDumper)
    adapters.register_dumper(IntArray, _IntArrayDumper)
    adapters.register_dumper(TextArray, _TextArrayDumper)
    adapters.register_dumper(JsonTextArray, _JsonTextArrayDumper)
    adapters.register_dumper(JsonArray, _JsonArrayDumper)


def read_raw(adapters: AdaptersMap) -> None:
    """Teach a connection to read uuid as 16 bytes and timestamptz as microseconds since 2000."""
    adapters.register_loader("uuid", ByteaBinaryLoader)
    adapters.register_loader("timestamptz", Int8BinaryLoader)
