"""Targets: data files, both of benchmarks and users' own."""

from __future__ import annotations

import gzip
import io
import os
import pickle
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from fedcdp.data import load_file
from fedcdp.data.datasets import cifar10, lfw
from fedcdp.data.datasets.adult import parse_adult
from fedcdp.data.fetch import read_unpacked
from fedcdp.data.formats import parse_idx, read_pickle
from fedcdp.data.own_files import read_client
from fedcdp.data.table_rules import ColumnRules
from tools.fuzz.mutations import HOSTILE_TEXTS, mutate_bytes

Attempt = Callable[[Random, Path], None]
BOMB_BYTES = 2**30


@cache
def zeros(count: int, wbits: int) -> bytes:
    """`count` zeros, compressed to a thousandth of the size."""
    packer, chunk = zlib.compressobj(1, zlib.DEFLATED, wbits), bytes(2**24)
    return b"".join(packer.compress(chunk) for _ in range(count // len(chunk))) + packer.flush()


def _client_file(path: Path) -> None:
    """A deployed client's file, without options."""
    read_client(path, ColumnRules())


def idx(_place: Path) -> Attempt:
    """MNIST's files: compressed and not, and a decompression bomb."""
    sound = struct.pack(">HBBIII", 0, 8, 3, 5, 4, 4) + bytes(range(80))
    packed = gzip.compress(sound)

    def attempt(case: Random, place: Path) -> None:
        path = place / "images"
        content = case.choice((sound, packed, packed + packed))
        hostile = mutate_bytes(case, content)
        if case.random() < 0.1:
            hostile = gzip.compress(mutate_bytes(case, sound))
        if case.random() < 0.002:
            hostile = zeros(BOMB_BYTES, 31)
        path.write_bytes(hostile)
        parse_idx(read_unpacked(path, 2**20), 3, str(path))

    return attempt


class _Calls:
    def __init__(self, function: Any, *arguments: object) -> None:
        self._call = function, arguments

    def __reduce__(self) -> Any:
        return self._call


def _nested(levels: int) -> bytes:
    """A tuple of pairs of pairs …, each the same object twice: hashing or printing it takes 2^levels steps."""
    return b"\x80\x02}K\x01K\x01\x86" + b"".join(b"q%ch%c\x86" % (n, n) for n in range(levels)) + b"K\x01s."


def pickled(_place: Path) -> Attempt:
    """CIFAR-10's pickles, valid and hostile, mutated opcode by opcode."""
    data = np.arange(24, dtype=np.uint8).reshape(2, 12)
    batch = {b"data": data, b"labels": [3, 7], b"batch_label": b"x", b"filenames": [b"a", b"b"]}
    sound = [pickle.dumps(batch, protocol=protocol) for protocol in (2, 3, 4)]
    hostile_ones = [
        *(pickle.dumps({b"data": _Calls(function, *arguments)}, protocol=protocol)
          for protocol in (0, 2, 4)
          for function, arguments in ((os.system, ("touch outside",)), (eval, ("1+1",)), (getattr, ("", "join")))),
        pickle.dumps({b"data": np.array([object], dtype=object)}),
        *(_nested(levels) for levels in (5, 30, 100)),
        b"\x80\x02}" + b"(" * 5000 + b"l" * 5000 + b".",
        b"\x80\x02r\xff\xff\xff\x7f.",
        b"\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\x7f}.",
    ]  # fmt: skip
    fragments = [b"q\x01", b"h\x01", b"\x86", b"\x87", b"(", b"t", b"s", b"u", b"R", b"b", b"}", b"]", b"a", b"e",
                 b"cnumpy\ndtype\n", b"cnumpy\nndarray\n", b"cnumpy.core.multiarray\n_reconstruct\n", b"c_codecs\nencode\n",
                 b"cos\nsystem\n", b"U\x02u1", b"X\x02\0\0\0hi", b"K\x05", b"N", b"\x88", b"."]  # fmt: skip

    def attempt(case: Random, place: Path) -> None:
        kind = case.random()
        if kind < 0.55:
            hostile = mutate_bytes(case, case.choice(sound), sound)
        elif kind < 0.7:
            hostile = (
                mutate_bytes(case, case.choice(hostile_ones), sound) if case.random() < 0.7 else case.choice(hostile_ones)
            )
        else:
            hostile = b"\x80\x02}" + b"".join(case.choice(fragments) for _ in range(case.randrange(40))) + b"."
        if case.random() < 0.5:
            read_pickle(hostile, "batch")
        else:
            (place / "data_batch_1").write_bytes(hostile)
            cifar10.read_batch(place / "data_batch_1")

    return attempt


def archive(_place: Path) -> Attempt:
    """CIFAR-10's archive: members of any name, type and size."""
    names = [f"{cifar10.LAYOUT}/{name}" for name in (*cifar10.TRAINING_BATCHES, cifar10.TEST_BATCH)]

    def attempt(case: Random, place: Path) -> None:
        members: dict[str, Any] = dict.fromkeys(names, b"content")
        for _ in range(case.randrange(4)):
            name = case.choice((*names, *HOSTILE_TEXTS[:18], f"{cifar10.LAYOUT}/../../outside"))
            members[name] = case.choice(
                (b"", b"y" * 100, tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.DIRTYPE, tarfile.CHRTYPE)
            )
        try:
            content = _tar(members)
        except (ValueError, UnicodeError):
            content = _tar(dict.fromkeys(names, b"content"))
        hostile = content if case.random() < 0.5 else mutate_bytes(case, content)
        if case.random() < 0.5:  # inside the compression
            hostile = gzip.compress(mutate_bytes(case, gzip.decompress(content)), 1)
        if case.random() < 0.002:
            hostile = zeros(BOMB_BYTES, 31)
        folder = place / "unpacked"
        (place / "cifar.tar.gz").write_bytes(hostile)
        target = folder / cifar10.LAYOUT
        for old in target.iterdir() if target.is_dir() else ():
            old.unlink()
        if target.is_dir():
            target.rmdir()
        cifar10.unpack_archive(place / "cifar.tar.gz", folder)

    return attempt


def _tar(members: dict[str, Any]) -> bytes:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w:gz", compresslevel=1) as tar:
        for name, what in members.items():
            member = tarfile.TarInfo(name)
            if isinstance(what, bytes) and len(what) == 1:
                member.type, member.linkname = what, "../../outside"
                what = b""
            member.size = len(what)
            tar.addfile(member, io.BytesIO(what))
    return content.getvalue()


def npz(_place: Path) -> Attempt:
    """A user's own arrays: other types and shapes, false headers, invalid archives, and decompression bombs."""
    arrays = {"x": np.arange(48, dtype=np.float32).reshape(12, 4), "y": np.arange(12) % 3}
    sound = packed_npz(arrays, zipfile.ZIP_STORED)
    seeds = [sound, packed_npz(arrays, zipfile.ZIP_DEFLATED)]
    kinds: list[Any] = [np.float64, np.float16, np.longdouble, np.complex64, np.int8, np.uint64, bool, "U5", "S5", "M8[s]",
                        "m8[D]", object, [("a", "f4"), ("b", "i4")], ">f4", ">i8", "V8"]  # fmt: skip
    shapes = [
        (),
        (0,),
        (12,),
        (12, 1),
        (1, 12),
        (12, 0),
        (12, 3, 2),
        (12, 2, 2, 3),
        (12, 3, 2, 2),
        (2,) * 20,
        (12, 1, 1, 1, 1),
    ]

    def attempt(case: Random, place: Path) -> None:
        kind = case.random()
        if kind < 0.4:
            hostile = mutate_bytes(case, case.choice(seeds))
        elif kind < 0.7:
            hostile = lying_npz(case)
        else:
            changed: dict[str, Any] = dict(arrays)
            for name in ("x", "y"):
                if case.random() < 0.7:
                    shape, dtype = case.choice(shapes), case.choice(kinds)
                    changed[name] = np.zeros(shape, dtype)
                    if case.random() < 0.3 and changed[name].dtype.kind in "iuf" and changed[name].size:
                        changed[name].flat[0] = case.choice((1, 3, 100))
                    if changed[name].dtype.kind == "f" and case.random() < 0.3 and changed[name].size:
                        changed[name].flat[-1] = case.choice((np.nan, np.inf, -1.5))
            if case.random() < 0.1:
                changed[case.choice(HOSTILE_TEXTS[3:9])] = np.zeros(3)
            hostile = packed_npz(changed, zipfile.ZIP_STORED)
        if case.random() < 0.002:
            hostile = zero_bomb()
        path = place / "own.npz"
        path.write_bytes(hostile)
        reader = case.choice((load_file, _client_file, lfw.read_packed))
        reader(path)

    return attempt


def packed_npz(arrays: dict[str, Any], method: int) -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", method) as file:
        for name, value in arrays.items():
            member = io.BytesIO()
            np.lib.format.write_array(member, np.asarray(value), allow_pickle=True)
            file.writestr(f"{name.replace(chr(0), '')}.npy".encode("utf-8", "replace").decode(), member.getvalue())
    return content.getvalue()


def lying_npz(case: Random) -> bytes:
    """Arrays whose headers claim another type, shape or order than the data that follow."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as file:
        for name in ("x", "y"):
            shape = case.choice(("(12, 4)", "(12,)", "(10**12,)", "(1000000000, 4)", "(400000000,)", "(-1, 4)", "()",
                                 "(True, 4)", "(9223372036854775807, 2)", "[12]", "((12,),)", "(1.5,)"))  # fmt: skip
            kind = case.choice(
                ("<f4", "<i8", "|O", "|S2000000000", "<U500000000", "|V1", "nosuch", "[('a', '<f4')]", "\x1b[2J")
            )
            header = f"{{'descr': {kind!r}, 'fortran_order': {case.choice(('False', 'True', '3'))}, 'shape': {shape}, }}"
            if case.random() < 0.2:
                header = mutate_bytes(case, header.encode()).decode("latin1")
            raw = header.encode("latin1", "replace") + b"\n"
            version = case.choice((b"\x01\x00", b"\x02\x00", b"\x03\x00", b"\x09\x09"))
            size = struct.pack("<H", len(raw) % 65536) if version == b"\x01\x00" else struct.pack("<I", len(raw))
            file.writestr(f"{name}.npy", b"\x93NUMPY" + version + size + raw + bytes(case.choice((0, 96, 192, 1000))))
    return content.getvalue()


@cache
def zero_bomb() -> bytes:
    """A gibibyte of zeros in a small file, which is a valid array of records."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as file:
        with file.open("x.npy", "w", force_zip64=True) as member:
            np.lib.format.write_array_header_1_0(
                member, {"descr": "<f4", "fortran_order": False, "shape": (BOMB_BYTES // 16, 4)}
            )
            for _ in range(BOMB_BYTES // 2**24):
                member.write(bytes(2**24))
        member_y = io.BytesIO()
        np.lib.format.write_array(member_y, np.arange(12) % 3)
        file.writestr("y.npy", member_y.getvalue())
    return content.getvalue()


def csv(_place: Path) -> Attempt:
    """A user's own table."""
    header = b"a,b,c,label\n"
    sound = header + b"".join(b"%d,%d.5,-1e%d,%s\n" % (n, n, n % 9, b"xyz"[n % 3 : n % 3 + 1]) for n in range(30))
    long_label = header + b"1,2,3,a\n" * 40_000 + b"1,2,3," + b"l" * 120_000 + b"\n"

    def attempt(case: Random, place: Path) -> None:
        if case.random() < 0.5:
            hostile = mutate_bytes(case, sound)
        else:
            rows = [line.split(b",") for line in sound.splitlines()]
            for _ in range(case.choice((1, 2, 5))):
                row = case.choice(rows)
                cell = case.choice((*HOSTILE_TEXTS, "1_000", "٣", "0x10", "1,2", '"', '"a""b"', "=cmd()", "1e39", "-0"))
                row[case.randrange(len(row))] = cell.encode("utf-8", "surrogatepass")
            hostile = b"\n".join(b",".join(row) for row in rows)
        if case.random() < 0.002:
            hostile = long_label
        path = place / "own.csv"
        path.write_bytes(hostile)
        case.choice((load_file, _client_file))(path)

    return attempt


def adult(_place: Path) -> Attempt:
    """The census files."""
    line = (
        b"39, State-gov, 77516, Bachelors, 13, Never-married, Adm-clerical, Not-in-family, White, Male, 2174, 0, 40, "
        b"United-States, <=50K\n"
    )
    sound = line * 5

    def attempt(case: Random, place: Path) -> None:
        hostile = mutate_bytes(case, sound)
        if case.random() < 0.5:
            cells = line.rstrip().split(b", ")
            cells[case.randrange(len(cells))] = case.choice(HOSTILE_TEXTS).encode("utf-8", "surrogatepass")
            hostile = b", ".join(cells) + b"\n" + sound
        path = place / "adult.data"
        path.write_bytes(hostile)
        parse_adult(read_unpacked(path, 2**20), str(path))

    return attempt


TARGETS: dict[str, Callable[[Path], Attempt]] = {
    "MNIST idx and gzip": idx,
    "CIFAR-10 pickles": pickled,
    "CIFAR-10 archive": archive,
    "own npz, LFW npz": npz,
    "own csv": csv,
    "Adult": adult,
}
