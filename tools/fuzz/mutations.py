"""Turn a valid file into a hostile one: bytes, fields and structure are changed, all from one seeded generator."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator, Sequence
from random import Random
from typing import Any

ESCAPE = "\x1b[31mred\x1b]0;title\x07\x9b2J"
HOSTILE_TEXTS: tuple[str, ...] = (
    "",
    " ",
    "\0",
    "a\0b",
    ESCAPE,
    "line\nfedcdp: forged\r\nline",
    "\u202egnp.exe\u2066",
    "../../../../outside",
    "/outside",
    "..",
    ".",
    "~",
    "$(touch outside)`touch outside`;touch outside",
    "{0.__class__.__mro__}{{7*7}}%s%n",
    "<script>alert(1)</script>",
    "[bold]markup[/bold][/nosuch]",
    "é漢🙂",
    "\ud800",
    "nan",
    "inf",
    "-1",
    "1e400",
    "9" * 5000,
    "x" * 100_000,
    "tools.fuzz.canary:make",
    "os:abort",
    "builtins:breakpoint",
    "linear(1e308, 1e-308)",
    "quantile(0.5, 1e30)",
    "cosine(nan, inf)",
    "exponential(1e-300, 1e300)",
)
HOSTILE_NUMBERS: tuple[Any, ...] = (
    0, 1, -1, 2, 7, 255, 65536, 2**31 - 1, 2**31, 2**32, 2**53, 2**63 - 1, 2**63, 2**64, -(2**63), 10**12, 10**18, 10**400,
    0.0, -0.0, 0.5, 1e-9, 5e-324, 1e-45, 1e38, 1e300, 1.7e308, -1e308, math.nan, math.inf, -math.inf,
)  # fmt: skip
TOKENS: tuple[bytes, ...] = (
    b"\0", b"\x1b[2J", b"\xff\xfe", b"\xef\xbb\xbf", b"\r\n", b'"', b"'", b"{", b"}", b"[" * 40, b"]", b",", b"=", b"\n",
    b"-1", b"1e999", b"NaN", b"Infinity", b"null", b"true", b"9" * 30, b"9" * 5000, b"../", b"\\u0000", b"\\ud800", b"#",
    b"[[a]]\n",
)  # fmt: skip


def hostile_value(case: Random, depth: int = 0) -> Any:
    """A value that the field was not designed for."""
    kind = case.randrange(12)
    if kind < 4:
        return case.choice(HOSTILE_NUMBERS)
    if kind < 8:
        return case.choice(HOSTILE_TEXTS)
    if kind == 8:
        return case.choice((True, False, None))
    if kind == 9:
        return deep(case.choice((3, 50, 2000, 20_000)), case.random() < 0.5)
    if depth > 2:
        return []
    if kind == 10:
        return [hostile_value(case, depth + 1) for _ in range(case.randrange(4))]
    return {str(case.choice(HOSTILE_TEXTS))[:50]: hostile_value(case, depth + 1) for _ in range(case.randrange(3))}


def deep(levels: int, lists: bool) -> Any:
    """A value with this many nesting levels."""
    value: Any = 1
    for _ in range(levels):
        value = [value] if lists else {"a": value}
    return value


def near(case: Random, value: Any) -> Any:
    """A value of the same type, but of another size."""
    if isinstance(value, bool) or value is None:
        return not value
    if isinstance(value, int):
        if abs(value) > 10**300:  # too large for a float or a decimal text in Python
            return -value
        return case.choice((value + 1, value - 1, -value, value * 10**6, value << 40, float(value), str(value)))
    if isinstance(value, float):
        return case.choice((value * 1e9, value * 1e-9, -value, value * 1e300, int(value) if math.isfinite(value) else 0))
    if isinstance(value, str):
        at = case.randrange(len(value) + 1)
        return case.choice(
            (value[:at], value + value, value[:at] + case.choice(HOSTILE_TEXTS)[:200] + value[at:], value.upper())
        )
    if isinstance(value, list):
        return case.choice((value * 2, value[:-1], value[::-1], [value], _many(value)))
    return value


def _many(value: list[Any]) -> list[Any]:
    return value * 1000 if len(value) < 20 and not any(isinstance(each, list | dict) for each in value) else value


def mutate_value(case: Random, value: Any) -> Any:
    """A tree of plain values with one to three of its fields changed, removed, added or renamed."""
    value = json.loads(json.dumps(value))
    for _ in range(case.choice((1, 1, 1, 2, 3))):
        value = _mutate_once(case, value)
    return value


def _mutate_once(case: Random, root: Any) -> Any:
    places = list(_places(root))
    if not places or case.random() < 0.02:
        return hostile_value(case)
    holder, key = case.choice(places)
    act = case.randrange(8)
    if act < 3:
        holder[key] = hostile_value(case)
    elif act < 5:
        holder[key] = near(case, holder[key])
    elif act == 5:
        del holder[key]
    elif act == 6:
        other, other_key = case.choice(places)
        holder[key] = _copy(other[other_key])
    elif isinstance(holder, dict):
        name = case.choice((*HOSTILE_TEXTS, *holder))
        holder[name] = holder.pop(key) if case.random() < 0.5 else hostile_value(case)
    else:
        holder.insert(key, hostile_value(case))
    return root


def _copy(value: Any) -> Any:
    try:
        return json.loads(json.dumps(value))
    except (RecursionError, ValueError):
        return 0


def _places(value: Any, depth: int = 0) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, dict | list) and depth < 20:
        for key in list(value) if isinstance(value, dict) else range(len(value)):
            yield value, key
            yield from _places(value[key], depth + 1)


def mutate_bytes(case: Random, content: bytes, others: Sequence[bytes] = ()) -> bytes:
    """The bytes with one to four places flipped, cut, doubled, spliced or overwritten."""
    data = bytearray(content)
    for _ in range(case.choice((1, 1, 2, 4))):
        at = case.randrange(len(data) + 1)
        if case.random() < 0.4:
            at = min(at, case.randrange(64))  # most formats are recognised by their beginning
        end = min(len(data), at + case.choice((1, 2, 4, 8, 64, 1000)))
        act = case.randrange(9)
        if act == 0 and at < len(data):
            data[at] ^= 1 << case.randrange(8)
        elif act == 1 and at < len(data):
            data[at] = case.choice((0, 1, 0x7F, 0x80, 0xFF, 0x1B, 0x0A, 0x22, case.randrange(256)))
        elif act == 2:
            del data[at:]
        elif act == 3:
            del data[at:end]
        elif act == 4:
            data[at:at] = data[at:end] * case.choice((1, 2, 50))
        elif act == 5:
            data[at:at] = case.choice(TOKENS)
        elif act == 6:
            data[at:end] = case.randbytes(end - at)
        elif act == 7:
            form = case.choice(("<I", ">I", "<Q", ">H", "<H"))
            number = case.choice((0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**63, 2**64 - 1))
            packed = struct.pack(form, number % 2 ** (8 * struct.calcsize(form)))
            data[at : at + len(packed)] = packed
        elif others:
            other = case.choice(others)
            data[at:] = other[case.randrange(len(other) + 1) :]
    return bytes(data)


def as_json(value: Any) -> bytes:
    """JSON as a hostile program writes it, with NaN and surrogates; values too deep for Python are written by hand."""
    try:
        return json.dumps(value).encode("utf-8", "surrogatepass")
    except (RecursionError, ValueError):  # too deep, or self-referential
        return b'{"a":' * 30_000 + b"1" + b"}" * 30_000


def as_toml(value: Any) -> bytes:
    """Nested values as TOML, sections first; values that TOML does not support are written anyway."""
    if not isinstance(value, dict):
        return _toml(value).encode("utf-8", "surrogatepass")
    top = [f"{_key(key)} = {_toml(item)}" for key, item in value.items() if not isinstance(item, dict)]
    lines = list(top)
    for name, section in value.items():
        if isinstance(section, dict):
            lines.append(f"[{_key(name)}]")
            lines += [f"{_key(key)} = {_toml(item)}" for key, item in section.items()]
    return ("\n".join(lines) + "\n").encode("utf-8", "surrogatepass")


def _key(key: object) -> str:
    text = str(key)
    return text if text.replace("_", "").replace("-", "").isalnum() and text.isascii() else json.dumps(text)


def _toml(value: Any) -> str:
    before, after = "", ""
    while isinstance(value, list | dict) and len(value) == 1:  # without recursion, for any depth
        opening, closing = ("[", "]") if isinstance(value, list) else (f"{{{_key(next(iter(value)))} = ", "}")
        value = value[0] if isinstance(value, list) else next(iter(value.values()))
        before, after = before + opening, closing + after
    return before + _toml_of_other(value) + after


def _toml_of_other(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_key(key)} = {_toml(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    if isinstance(value, int):
        return hex(value) if value > 10**300 else str(value)
    if isinstance(value, float):
        return repr(value)
    return '"none"' if value is None else json.dumps(value, ensure_ascii=False)
