"""What nvidia-smi says of the cards and, where one is cut up, of its MIG slices.

Knows: its options, and how it answers when something is wrong. Must not know: torch,
CUDA_VISIBLE_DEVICES (nvidia-smi does not heed it), checkpoints, printing.
Cards come in nvidia-smi's own order, which is that of the PCI bus.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

TIMEOUT_S = 20.0
"""Without persistence mode the driver wakes eight cards in about ten seconds."""

_FIELDS: tuple[str, ...] = (
    "index", "uuid", "driver_version", "memory.free", "memory.used", "memory.total",
    "utilization.gpu", "mig.mode.current", "name",
)  # fmt: skip
# the name comes last: it alone may hold a comma
_SINCE_R450 = "mig.mode.current"
_NUMBER = re.compile(r"(\d+)(?: MiB| %)?", re.ASCII)
_UNKNOWN = re.compile(r"\[.*\]|N/A")  # [N/A], [Not Supported], [Unknown Error], [GPU is lost] …
_HEAD = re.compile(r"GPU \d+: .*\(UUID: (GPU-[^)\s]+)\)")
_SLICE = re.compile(r"\s*MIG (\S+)\s+Device\s+(\d+): \(UUID: (MIG-[^)\s]+)\)")
_MIB = 1 << 20


class Memory(NamedTuple):
    """Bytes; None is what the driver does not tell."""

    free_bytes: int | None = None
    used_bytes: int | None = None
    total_bytes: int | None = None


class Slice(NamedTuple):
    """One MIG device: `instance` and `compute` are NVIDIA's ids of it in the card."""

    uuid: str
    profile: str
    instance: int | None = None
    compute: int | None = None
    memory: Memory = Memory()


class Card(NamedTuple):
    """One card. `physical` is its number in nvidia-smi."""

    physical: int
    uuid: str
    name: str
    memory: Memory = Memory()
    utilisation_percent: int | None = None
    driver: str = ""
    mig: bool = False
    slices: tuple[Slice, ...] = ()


class Answer(NamedTuple):
    """`trouble` is what went wrong, in nvidia-smi's words where it has some; with `cards`
    beside it the list may lack one, or a slice of one. `certain` says that there is no card at all.
    """

    cards: tuple[Card, ...] = ()
    trouble: str = ""
    certain: bool = False
    warnings: tuple[str, ...] = ()


class _Said(NamedTuple):
    status: int
    lines: list[str]
    trouble: str = ""


def ask(environ: Mapping[str, str], timeout_s: float | None = None) -> Answer | None:
    """All cards of this machine; None when there is no nvidia-smi on the PATH."""
    from shutil import which

    program = which("nvidia-smi", path=environ.get("PATH"))
    if program is None:
        return None
    seconds = TIMEOUT_S if timeout_s is None else timeout_s
    fields = _FIELDS
    said = _query(program, fields, environ, seconds)
    if said.status and any("not a valid field" in line for line in said.lines):
        fields = tuple(name for name in fields if name != _SINCE_R450)
        said = _query(program, fields, environ, seconds)
    answer = _understand(said, fields)
    if any(card.mig for card in answer.cards):
        return _sliced(answer, program, environ, seconds)
    return answer


def _query(
    program: str, fields: tuple[str, ...], environ: Mapping[str, str], seconds: float
) -> _Said:
    options = (f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits")
    return _run((program, *options), environ, seconds)


def _run(words: tuple[str, ...], environ: Mapping[str, str], seconds: float) -> _Said:
    """Its lines. A driver that is stuck may not even let the program be killed: not waited for."""
    from contextlib import suppress
    from subprocess import DEVNULL, PIPE, STDOUT, Popen, TimeoutExpired

    try:
        process = Popen(  # stdout and stderr are one: it prints its errors on either
            words, stdin=DEVNULL, stdout=PIPE, stderr=STDOUT, env={**environ, "LC_ALL": "C"},
            encoding="utf-8", errors="backslashreplace",
        )  # fmt: skip
    except OSError as error:
        return _Said(-1, [], f"nvidia-smi cannot be run: {error.strerror or error}")
    try:
        text, _ = process.communicate(timeout=seconds)
    except TimeoutExpired:
        process.kill()
        with suppress(TimeoutExpired):
            process.wait(1)
        if process.stdout is not None:
            process.stdout.close()
        return _Said(-1, [], f"nvidia-smi gave no answer in {seconds:g} seconds")
    return _Said(process.returncode, [line for line in text.splitlines() if line.strip()])


def _understand(said: _Said, fields: tuple[str, ...]) -> Answer:
    """Rows as cards; whatever is neither a row nor a warning is trouble."""
    cards: list[Card] = []
    odd: list[str] = []
    warnings: list[str] = []
    for line in said.lines:
        card = _card(line, fields)
        if card is not None:
            cards.append(card)
        else:
            (warnings if line.startswith("WARNING") else odd).append(line.strip())
    trouble = said.trouble or _sentence(said.status, odd)
    numbers = [card.physical for card in cards]
    if cards and not trouble and numbers != list(range(len(cards))):
        trouble = f"nvidia-smi lists only {', '.join(map(str, numbers))}"
    if not cards and not trouble:
        trouble = "nvidia-smi names no card"
    none = not cards and _is_sure(said, odd)
    return Answer(tuple(cards), trouble, none, tuple(warnings))


def _sentence(status: int, odd: list[str]) -> str:
    if odd:
        return f"nvidia-smi says: {odd[0][:300]}"
    return f"nvidia-smi ended with status {status}" if status else ""


def _is_sure(said: _Said, odd: list[str]) -> bool:
    """Whether it said that no driver runs, or that the driver has no card."""
    text = "\n".join(odd)
    return "No devices were found" in text or "communicate with the NVIDIA driver" in text


def _card(line: str, fields: tuple[str, ...]) -> Card | None:
    """One row; None when any part of it is not as nvidia-smi writes it."""
    words = [word.strip() for word in line.split(",", len(fields) - 1)]
    row = dict(zip(fields, words, strict=False))
    if len(words) < len(fields) or not row["uuid"].startswith("GPU-") or not row["name"]:
        return None
    names = ("memory.free", "memory.used", "memory.total", "utilization.gpu")
    numbers = [_number(row[name]) for name in names]
    index = _NUMBER.fullmatch(row["index"])
    if index is None or any(number == _ODD for number in numbers):
        return None
    memory = Memory(*(None if number is None else number * _MIB for number in numbers[:3]))
    mig = row.get(_SINCE_R450) == "Enabled"
    return Card(
        int(index[1]), row["uuid"], row["name"], memory,
        None if mig else numbers[3], row["driver_version"], mig,
    )  # fmt: skip


_ODD = -1


def _number(word: str) -> int | None:
    """A count, None where the driver does not tell, _ODD where the word is neither."""
    found = _NUMBER.fullmatch(word)
    if found is not None:
        return int(found[1])
    return None if _UNKNOWN.fullmatch(word) else _ODD


# -- MIG ---------------------------------------------------------------------------------------
def _sliced(answer: Answer, program: str, environ: Mapping[str, str], seconds: float) -> Answer:
    """The cards with their slices: names from `-L`, ids and memory from `-q -x`."""
    said = _run((program, "-L"), environ, seconds)
    facts = _facts(_run((program, "-q", "-x"), environ, seconds).lines)
    found: dict[str, list[Slice]] = {}
    uuid, odd = "", []
    for line in said.lines:
        head, row = _HEAD.match(line), _SLICE.match(line)
        if head is not None:
            uuid = head[1]
        elif row is not None:
            known = facts.get((uuid, int(row[2])), _Facts())
            found.setdefault(uuid, []).append(Slice(row[3], row[1], *known))
        else:
            odd.append(line.strip())
    cards = (card._replace(slices=tuple(found.get(card.uuid, ()))) for card in answer.cards)
    trouble = answer.trouble or said.trouble or _sentence(said.status, odd)
    return answer._replace(cards=tuple(cards), trouble=trouble)


class _Facts(NamedTuple):
    instance: int | None = None
    compute: int | None = None
    memory: Memory = Memory()


def _facts(lines: list[str]) -> dict[tuple[str, int], _Facts]:
    """(uuid of the card, number of the slice) -> its ids and memory."""
    from xml.etree import ElementTree

    try:
        root = ElementTree.fromstring("\n".join(lines))
    except ElementTree.ParseError:
        return {}
    found = {}
    for gpu in root.iter("gpu"):
        uuid = gpu.findtext("uuid", "").strip()
        for row in gpu.iter("mig_device"):
            index = _element(row.findtext("index"))
            if index is not None:
                found[uuid, index] = _Facts(
                    _element(row.findtext("gpu_instance_id")),
                    _element(row.findtext("compute_instance_id")),
                    Memory(*(_element(row.findtext(path), _MIB) for path in _MEMORY)),
                )
    return found


_MEMORY = tuple(f"fb_memory_usage/{name}" for name in ("free", "used", "total"))


def _element(text: str | None, unit: int = 1) -> int | None:
    number = _number((text or "N/A").strip())
    return None if number is None or number == _ODD else number * unit
