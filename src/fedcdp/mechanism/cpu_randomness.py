"""Random words and normal values in C for a CPU: those of `randomness`, to the bit, in a fraction of NumPy's time.

The program next to this module (`philox.c`) is compiled at run time, in a fraction of a second, once a process has drawn so
much that this pays. Without a C compiler, or if its program does not give NumPy's values, NumPy goes on drawing them. The
logarithms, sines and cosines are NumPy's in either case.
"""

from __future__ import annotations

import ctypes
import logging
import math
import shutil
import subprocess
import tempfile
import threading
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.int64]
Normals = NDArray[np.float32]

_SOURCE = Path(__file__).with_name("philox.c")
# Not a bit may differ from NumPy's: no operation is fused with another, and none is replaced by an approximation.
_OPTIONS = ("-O3", "-march=native", "-ffp-contract=off", "-fno-math-errno", "-shared", "-fPIC")
_PATIENCE = 60  # seconds for the compiler
_PAYS = 2**23  # blocks: NumPy takes about as long to draw them as a compiler takes for the program
_PIECE = 2**14  # blocks whose normal values are computed at once, few enough to stay in a CPU's cache
_NORMALS = 4  # normal values of a block
TURN = 2.0**-32 * 2 * math.pi
_LOG = logging.getLogger("fedcdp")


class Generator(Protocol):
    """Draws from a key and four broadcastable 32-bit counters."""

    def words(self, key: int, *counter: Words | int) -> list[Words]:
        """Four words for each place."""
        ...

    def normals(self, key: int, *counter: Words | int, into: Normals) -> None:
        """The four normal values of these words for each place, into an array [..., 4] without gaps."""
        ...


class Drawing:
    """Draws by a reference, until compiling a faster program pays."""

    def __init__(self, reference: Generator, pays: int = _PAYS) -> None:
        self._reference = self._fastest = reference
        self._left: float = pays
        self._lock = threading.Lock()

    def of(self, blocks: int) -> Generator:
        """The generator for a draw of so many blocks."""
        self._left -= blocks
        if self._left < 0:
            with self._lock:
                if self._left < 0:
                    self._fastest = compiled(self._reference) or self._reference
                    self._left = math.inf
        return self._fastest


class _Counter(ctypes.Structure):
    """`struct counter` of the program."""

    _fields_ = (("start", ctypes.c_void_p), ("by_row", ctypes.c_int64), ("by_column", ctypes.c_int64))


class _Program:
    """The program as a generator."""

    def __init__(self, library: ctypes.CDLL) -> None:
        pointer, count = ctypes.c_void_p, ctypes.c_int64
        grid = ctypes.c_uint64, pointer, count
        self._words, self._uniforms, self._normals = library.philox, library.uniforms, library.normals
        self._words.argtypes = *grid, count, pointer
        self._uniforms.argtypes = *grid, count, count, ctypes.c_float, pointer, pointer
        self._normals.argtypes = count, pointer, pointer, pointer, pointer
        for function in (self._words, self._uniforms, self._normals):
            function.restype = None

    def words(self, key: int, *counter: Words | int) -> list[Words]:
        """See `Generator`."""
        grid = _Grid(counter)
        found = np.empty((4, *grid.shape), np.int64)
        self._words(key, grid.counters, grid.columns, grid.places, found.ctypes.data)
        return [found[place, ...] for place in range(4)]

    def normals(self, key: int, *counter: Words | int, into: Normals) -> None:
        """See `Generator`."""
        grid = _Grid(counter)
        buffers = np.empty((3, 2 * min(_PIECE, grid.places)), np.float32)
        for begin in range(0, grid.places, _PIECE):
            some = min(_PIECE, grid.places - begin)
            unit, angle, cosine = buffers[:, : 2 * some]
            where = [each.ctypes.data for each in (unit, angle, cosine)]
            self._uniforms(key, grid.counters, grid.columns, begin, some, TURN, *where[:2])
            np.log(unit, out=unit)
            np.cos(angle, out=cosine)
            np.sin(angle, out=angle)
            self._normals(some, where[0], where[2], where[1], into.ctypes.data + begin * _NORMALS * into.itemsize)


class _Grid:
    """Counters, spread over a grid of rows and columns."""

    def __init__(self, counter: tuple[Words | int, ...]) -> None:
        arrays = [np.asarray(each, np.int64) for each in counter]
        self.shape = np.broadcast_shapes(*(each.shape for each in arrays))
        rows, self.columns = math.prod(self.shape[:-1]), math.prod(self.shape[-1:])
        self.places = rows * self.columns
        self._spread = [np.broadcast_to(each, self.shape).reshape(rows, self.columns) for each in arrays]  # keeps them alive
        steps = ([stride // each.itemsize for stride in each.strides] for each in self._spread)
        each_counter = (_Counter(each.ctypes.data, *by) for each, by in zip(self._spread, steps, strict=True))
        self.counters = (_Counter * 4)(*each_counter)


def compiled(reference: Generator, compiler: str = "cc") -> Generator | None:
    """The program, if it can be compiled here and gives a reference's values to the bit; else None."""
    try:
        program = _Program(_library(compiler))
    except (OSError, subprocess.SubprocessError, AttributeError) as error:
        _LOG.debug("drawing random values with NumPy: %s", error)
        return None
    if not _alike(program, reference):
        _LOG.warning("drawing random values with NumPy: the program that %s compiled gives others", compiler)
        return None
    return program


def _library(compiler: str) -> ctypes.CDLL:
    """The compiled program. Its file is in a folder of this process alone, and is removed after loading."""
    if (command := shutil.which(compiler)) is None:
        raise FileNotFoundError(f"there is no C compiler ({compiler})")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        library = Path(folder) / "philox.so"
        subprocess.run(  # nosec B603
            [command, *_OPTIONS, "-o", library, _SOURCE, "-lm"], check=True, capture_output=True, timeout=_PATIENCE
        )
        return ctypes.CDLL(str(library))


def _alike(program: Generator, reference: Generator) -> bool:
    """Whether both draw the same, for large and small counters and a number of columns that fills no vector."""
    blocks, rows = np.arange(2**32 - 500, 2**32 + 501), np.array([[0], [3], [2**32 - 1]])
    tried = 0xFEDCBA9876543210, blocks & 0xFFFFFFFF, rows[::-1], 2**32 - 2, rows
    if not np.array_equal(program.words(*tried), reference.words(*tried)):
        return False
    ours, theirs = (np.empty((3, 1001, 4), np.float32) for _ in range(2))
    program.normals(*tried, into=ours)
    reference.normals(*tried, into=theirs)
    return np.array_equal(ours, theirs)
