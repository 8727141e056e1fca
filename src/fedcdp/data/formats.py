"""The file formats of the benchmarks: CIFAR-10's pickles, read without trusting them, and MNIST's IDX.

A pickle is a program. Three barriers protect this process from it: only opcodes that build plain values may occur (checked
before anything runs); only the names under which NumPy arrays are pickled resolve; and they resolve to inert stand-ins
rather than to NumPy, so no foreign state reaches native code. An IDX file is a big-endian header, then unsigned bytes.
"""

from __future__ import annotations

import io
import math
import pickle
import pickletools
import struct
from collections.abc import Callable
from typing import Any, ClassVar, NoReturn

import numpy as np
from numpy.typing import NDArray

from fedcdp.errors import DataError

_PLAIN_OPCODES = (
    "PROTO FRAME STOP MARK NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 LONG1 "
    "BINSTRING SHORT_BINSTRING BINBYTES SHORT_BINBYTES BINUNICODE SHORT_BINUNICODE "
    "EMPTY_DICT SETITEM SETITEMS EMPTY_LIST APPEND APPENDS EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 "
    "BINPUT LONG_BINPUT MEMOIZE BINGET LONG_BINGET GLOBAL STACK_GLOBAL REDUCE BUILD"
)
PLAIN_OPCODES = frozenset(_PLAIN_OPCODES.split())


def read_pickle(content: bytes, source: str) -> dict[bytes, Any]:
    """The dictionary of plain values and byte arrays that is pickled in `content` (protocol 2 to 4, Python 2 or 3).

    Guarantees: no code named by the pickle runs, and for any bytes, unexpected content raises a `DataError` that names
    `source`.
    """
    try:
        _refuse_unusual_opcodes(content)
        value = _WatchedUnpickler(io.BytesIO(content), encoding="bytes").load()
    except Exception as error:  # no documentation bounds what a malformed pickle may raise
        raise DataError(f"{source} is not a pickle of plain data: {' '.join(str(error).split())}") from error
    if not isinstance(value, dict):
        raise DataError(f"{source} holds a pickled {type(value).__name__} where a dictionary is expected")
    return {key: item.array if isinstance(item, _Array) else item for key, item in value.items()}


def _refuse_unusual_opcodes(content: bytes) -> None:
    for opcode, argument, _ in pickletools.genops(content):
        if opcode.name not in PLAIN_OPCODES:
            raise pickle.UnpicklingError(f"the opcode {opcode.name} is not allowed")
        # The unpickler allocates its memo up to the largest index, so a dozen bytes could request gigabytes.
        if opcode.name == "LONG_BINPUT" and argument is not None and argument > len(content):
            raise pickle.UnpicklingError(f"the memo index {argument} is larger than the file")


def _require_names(keys: list[Any]) -> None:
    if not all(isinstance(key, str | bytes) for key in keys):
        raise pickle.UnpicklingError("it holds a dictionary whose keys are not strings or bytes")


class _Inert:
    """A stand-in for a pickled name. It has `__setstate__`, so a BUILD opcode cannot alter the class itself."""

    def __init__(self, *_arguments: object) -> None:
        raise pickle.UnpicklingError("it creates an object other than an array")

    def __setstate__(self, state: object) -> None:
        raise pickle.UnpicklingError("it alters an object other than an array")


class _ArrayType(_Inert):
    """`numpy.ndarray`: occurs only as an argument."""


class _Bytes(_Inert):
    """`_codecs.encode`: Python 3 writes bytes in protocol 2 as Latin-1 text."""

    def __new__(cls, text: object, encoding: object) -> bytes:  # type: ignore[misc]
        if not isinstance(text, str) or encoding not in ("latin1", b"latin1"):
            raise pickle.UnpicklingError("it encodes text other than as Latin-1")
        return text.encode("latin1")


class _ByteType(_Inert):
    """`numpy.dtype`, for bytes only: all other types, above all object arrays, are refused."""

    def __init__(self, code: object, *_flags: object) -> None:
        if code not in ("u1", b"u1"):
            raise pickle.UnpicklingError("it holds an array of a type other than bytes (u1)")

    def __setstate__(self, state: object) -> None:
        """Ignored: byte order and alignment do not matter for bytes."""


class _Array(_Inert):
    """`_reconstruct`: an array under construction, whose shape and bytes arrive as its state."""

    def __init__(self, kind: object, *_placeholders: object) -> None:
        if kind is not _ArrayType:
            raise pickle.UnpicklingError("it creates an object other than an array")
        self.array: NDArray[np.uint8] = np.empty(0, dtype=np.uint8)

    def __setstate__(self, state: object) -> None:
        match state:
            case (int(), tuple(shape), _ByteType(), False | 0, bytes(content)) if all(
                type(length) is int and length > 0 for length in shape
            ):
                if math.prod(shape) != len(content):
                    raise pickle.UnpicklingError(f"an array of shape {shape} has {len(content)} bytes")
                self.array = np.frombuffer(content, dtype=np.uint8).reshape(shape)
            case _:
                raise pickle.UnpicklingError("an array's state is malformed")


class _WatchedUnpickler(pickle._Unpickler):
    """The pure-Python unpickler, whose handling of each opcode can be overridden.

    Dictionary keys must be strings or bytes: hashing a key that nests one tuple twice in the next would take forever.
    """

    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = dict(pickle._Unpickler.dispatch)

    def _checked_setitem(self) -> None:
        _require_names([self.stack[-2]])  # type: ignore[attr-defined]
        self.load_setitem()  # type: ignore[attr-defined]

    def _checked_setitems(self) -> None:
        _require_names(self.stack[::2])  # type: ignore[attr-defined]
        self.load_setitems()  # type: ignore[attr-defined]

    dispatch[pickle.SETITEM[0]] = _checked_setitem
    dispatch[pickle.SETITEMS[0]] = _checked_setitems

    def find_class(self, module: str, name: str) -> type[_Inert]:
        match module, name:
            case "numpy.core.multiarray" | "numpy._core.multiarray", "_reconstruct":
                return _Array
            case "numpy", "ndarray":
                return _ArrayType
            case "numpy", "dtype":
                return _ByteType
            case "_codecs", "encode":
                return _Bytes
        raise pickle.UnpicklingError(f"the name {module}.{name} is not allowed")

    def persistent_load(self, _pid: object) -> NoReturn:
        raise pickle.UnpicklingError("it refers to an object outside the pickle")


UNSIGNED_BYTE = 0x08


def parse_idx(content: bytes, dimensions: int, source: str) -> NDArray[np.uint8]:
    """The array in `content`, which must be IDX of unsigned bytes with `dimensions` axes and the length that it declares.

    Any other bytes raise a `DataError` that names `source`.
    """
    header_bytes = 4 + 4 * dimensions
    magic = struct.pack(">HBB", 0, UNSIGNED_BYTE, dimensions)
    if len(content) < header_bytes or not content.startswith(magic):
        raise DataError(
            f"{source} is not an IDX file of bytes with {dimensions} axes: "
            f"it starts with {content[:4].hex() or 'nothing'} instead of {magic.hex()}, or ends within its header"
        )
    shape = struct.unpack(f">{dimensions}I", content[4:header_bytes])
    promised, found = math.prod(shape), len(content) - header_bytes
    if promised == 0 or promised != found:
        raise DataError(f"{source} declares {promised} bytes of data in its header but holds {found}")
    return np.frombuffer(content, dtype=np.uint8, offset=header_bytes).reshape(shape)
