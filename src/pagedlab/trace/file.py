"""Traces on disk: JSON Lines, plain (``.jsonl``) or as one zstd stream (``.jsonl.zst``).

The writer keeps the file readable up to its last flush, so that Ctrl-C, a crash or a full disk
leave a prefix that opens. The reader trusts nothing: a trace may be a stranger's.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Union

import msgspec
import zstandard

from pagedlab.errors import UserError, notice
from pagedlab.trace.events import EVENT_TYPES, FORMAT, KINDS, VERSION, Event, TraceGap, TraceHeader
from pagedlab.wording import plural, printable

MAX_BYTES = 2 << 30          # of JSON, decompressed: about ten million records
MAX_RECORD_BYTES = 64 << 20  # no newline in so much: not JSON Lines
ENDINGS = (".jsonl", ".jsonl.zst")
FLUSH_BYTES = 1 << 18        # handed to the system at the latest after so much JSON …
FLUSH_NS = 250_000_000       # … or so much time of the trace
CHUNK_BYTES = 1 << 20
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"

_ENCODER = msgspec.json.Encoder()
_DECODER: msgspec.json.Decoder[Any] = msgspec.json.Decoder(Union[EVENT_TYPES])  # noqa: UP007
_BAD_JSON = (msgspec.DecodeError, RecursionError, UnicodeDecodeError)


class TraceFile:
    """A sink that writes events as they come; close it, or use it in a ``with``.

    The file is created with the first event, so a run that is refused leaves none behind.

    Raises:
        UserError: the file cannot be written, or its name says that something else is in it.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        if why := why_unwritable(self.path):
            raise UserError(f"cannot write the trace {self.path}: {why}.")
        _check_ending(self.path)
        self.exists = False  # something of this trace is in the file
        self._file: BinaryIO | None = None
        self._pending: list[bytes] = []
        self._num_pending_bytes = 0
        self._flushed_ns = 0
        self._zstd = zstandard.ZstdCompressor().compressobj() if self.path.suffix == ".zst" else None

    def append(self, event: Event, /) -> None:
        line = encode(event)
        self._pending.append(line)
        self._num_pending_bytes += len(line)
        # The header goes out at once: a file cut anywhere after it opens.
        if (
            self._num_pending_bytes >= FLUSH_BYTES
            or event.t_ns - self._flushed_ns >= FLUSH_NS
            or type(event) is TraceHeader
        ):
            self.flush()
            self._flushed_ns = event.t_ns

    def flush(self) -> None:
        """Hand everything to the operating system, as whole zstd blocks."""
        data = b"\n".join(self._pending) + b"\n" if self._pending else b""
        self._pending, self._num_pending_bytes = [], 0
        if self._zstd is not None:
            data = self._zstd.compress(data) + self._zstd.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK)
        self._write(data)

    def close(self) -> None:
        if self._file is None and not self._pending:
            return
        self.flush()
        if self._zstd is not None:
            self._write(self._zstd.flush(zstandard.COMPRESSOBJ_FLUSH_FINISH))
        if self._file is not None:
            self._file.close()
            self._file = None

    def __enter__(self) -> TraceFile:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _write(self, data: bytes) -> None:
        try:
            if self._file is None:
                self._file = open(self.path, "wb", buffering=0)  # noqa: SIM115  # closed by close()
            written = self._file.write(data)
            self.exists = True
            while written < len(data):
                written += self._file.write(data[written:])
        except OSError as error:
            raise UserError(f"cannot write the trace {self.path}: {error.strerror}.") from None


def _check_ending(path: Path) -> None:
    """What is no regular file, such as a pipe or /dev/stdout, may have any name."""
    if not path.name.endswith(ENDINGS) and (path.is_file() or not path.exists()):
        raise UserError(f"cannot write the trace {path}: let its name end in {' or '.join(ENDINGS)}.")


def encode(event: Event) -> bytes:
    """One record, without its newline; a character that UTF-8 cannot carry becomes U+FFFD."""
    try:
        return _ENCODER.encode(event)
    except UnicodeEncodeError:  # half a surrogate pair, from an undecodable command line
        return _ENCODER.encode(_without_surrogates(msgspec.to_builtins(event)))


def _without_surrogates(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "surrogatepass").decode("utf-8", "replace")
    if isinstance(value, list):
        return [_without_surrogates(v) for v in value]
    if isinstance(value, dict):
        return {_without_surrogates(k): _without_surrogates(v) for k, v in value.items()}
    return value


def why_unwritable(path: Path) -> str | None:
    """Found out before a long run and not after it; None if nothing speaks against writing."""
    if path.is_dir():
        return "it is a directory"
    if not path.parent.is_dir():
        return f"there is no directory {path.parent}"
    return None if os.access(path if path.exists() else path.parent, os.W_OK) else "Permission denied"


def refuse_overwriting(source: Path, target: Path | None) -> None:
    """What is read shall not be lost under what is made of it.

    Raises:
        UserError: both are one regular file.
    """
    if target is not None and target.is_file() and source.is_file() and target.samefile(source):
        raise UserError(f"{target} would overwrite what it is made from: give another file.")


@contextmanager
def whole_file(target: Path) -> Iterator[Path]:
    """Where to write so that ``target`` has all of it or nothing: a neighbour that then takes the name.

    A link stays a link, and what is no regular file, such as a pipe or /dev/stdout, is written as it is.
    """
    if target.exists() and not target.is_file():
        yield target
        return
    name, target = target.name, Path(os.path.realpath(target))
    partial = target.with_name(f".{os.getpid()}.part.{name}")
    try:
        yield partial
        os.replace(partial, target)
    finally:
        partial.unlink(missing_ok=True)


def save_trace(events: Iterable[Event], path: str | os.PathLike[str]) -> None:
    """Write all of it, or nothing.

    Raises:
        UserError: the file cannot be written, or its name says that something else is in it.
    """
    target = Path(path)
    _check_ending(target)
    try:
        with whole_file(target) as place, TraceFile(place) as file:
            for event in events:
                file.append(event)
    except OSError as error:
        raise UserError(f"cannot write the trace {target}: {error.strerror}.") from None


def load_trace(path: str | os.PathLike[str]) -> list[Event]:
    """All events of a file; what is odd but bearable is a notice on stderr.

    Raises:
        UserError: no such file, no valid header, an unknown major version, an invalid record
            before the last, or more than ``MAX_BYTES`` of JSON.
    """
    lines = _Lines(Path(path))
    # Events hold no cycles, and looking for some among millions of lists takes most of the time.
    was_collecting = gc.isenabled()
    gc.disable()
    try:
        header = _read_header(lines)
        events: list[Event] = [header]
        num_unknown: dict[str, int] = {}
        is_cut = _read_records(lines, events, num_unknown)
    except OSError as error:
        raise UserError(f"cannot read the trace {path}: {error.strerror}.") from None
    finally:
        if was_collecting:
            gc.enable()
    if num_unknown:
        kinds = ", ".join(sorted(num_unknown)[:5]) + (", …" if len(num_unknown) > 5 else "")
        skipped = plural(sum(num_unknown.values()), "record")
        notice(f"{path}: skipped {skipped} of kinds this version does not know ({kinds})")
    elif lost := _lost_records(events):
        notice(f"{path}: {lost}")
    ends_early = header.ends_with is not None and events[-1].kind != header.ends_with
    if is_cut or ends_early:
        first = plural(len(events), "record")
        notice(f"{path}: the file is cut; showing its first {first}, up to step {events[-1].step}")
    return events


def _lost_records(events: list[Event]) -> str | None:
    """A sentence if the records' numbers, which grow by one within a process, leave a hole."""
    if events[-1].seq == len(events) - 1:  # one process and no hole: the usual case, known without a walk
        return None
    next_seq: dict[str, int] = {}
    num_lost, first = 0, None
    for event in events:
        expected = next_seq.get(event.proc, event.seq)
        if event.seq != expected and type(event) is not TraceGap:
            num_lost, first = num_lost + event.seq - expected, first or event
        next_seq[event.proc] = event.seq + 1
    if first is None or num_lost <= 0:
        return None
    what = plural(num_lost, "record") + ("" if num_lost == 1 else ", the first")
    return f"it lacks {what} before seq {first.seq} (step {first.step}); what follows may be wrong"


def _read_header(lines: _Lines) -> TraceHeader:
    line = next(lines, b"")
    if not line:
        what = "it is empty" if not lines.num_bytes else "its first line is not a trace header"
        raise UserError(f"{lines.path} is not a pagedlab trace: {what}.")
    try:
        raw = msgspec.json.decode(line)
    except _BAD_JSON:
        raw = None
    if not isinstance(raw, dict) or raw.get("kind") != "trace_header" or raw.get("format") != FORMAT:
        raise UserError(f"{lines.path} is not a pagedlab trace: its first line is not a trace header.")
    version = raw.get("version")
    if isinstance(version, list) and version and isinstance(version[0], int) and version[0] != VERSION[0]:
        wrote = printable(f"{'.'.join(str(v) for v in version[:2])}", 20)
        raise UserError(
            f"{lines.path} has trace format {wrote}, this pagedlab reads {VERSION[0]}.x: open it with the version that "
            f"wrote it ({printable(str(raw.get('pagedlab')), 40)})."
        )
    try:
        return _DECODER.decode(line)
    except _BAD_JSON as error:
        raise UserError(f"{lines.path} has no valid trace header: {printable(str(error))}.") from None


def _read_records(lines: _Lines, events: list[Event], num_unknown: dict[str, int]) -> bool:
    """Append the records after the header; True if the last one is only the beginning of one."""
    decode, append = _DECODER.decode, events.append
    for line in lines:
        try:
            event = decode(line)
            if event.seq < 0 or type(event) is TraceHeader:
                raise msgspec.ValidationError("a record without seq" if event.seq < 0 else "a second header")
            append(event)
        except _BAD_JSON as error:
            kind = _unknown_kind(line)
            if kind is not None:
                num_unknown[kind] = num_unknown.get(kind, 0) + 1
            elif next(lines, None) is None:
                return True
            else:
                where = f"{lines.path}, line {lines.line_number - 1}"
                raise UserError(f"{where} is not a valid record: {printable(str(error))}.") from None
    return False


def _unknown_kind(line: bytes) -> str | None:
    """The kind of a well-formed record that a later version may have written, else None."""
    try:
        raw = msgspec.json.decode(line)
    except _BAD_JSON:
        return None
    kind = raw.get("kind") if isinstance(raw, dict) else None
    return kind if isinstance(kind, str) and kind and kind not in KINDS else None


class _Lines(Iterator[bytes]):
    """Non-empty lines of a plain or zstd file, decompressed as they are asked for."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.line_number = 0      # of the latest line returned
        self.num_bytes = 0        # decompressed so far
        self._lines = self._read()

    def __next__(self) -> bytes:
        for line in self._lines:
            self.line_number += 1
            if line:
                return line
        raise StopIteration

    def _read(self) -> Iterator[bytes]:
        tail = b""
        for chunk in self._chunks():
            self.num_bytes += len(chunk)
            if self.num_bytes > MAX_BYTES:
                raise UserError(f"{self.path} holds more than {MAX_BYTES >> 30} GiB of records: record fewer steps.")
            *lines, tail = (tail + chunk).split(b"\n")
            yield from lines
            if len(tail) > MAX_RECORD_BYTES:
                raise UserError(f"{self.path} is no pagedlab trace: a line is over {MAX_RECORD_BYTES >> 20} MiB long.")
        if tail:
            yield tail

    def _chunks(self) -> Iterator[bytes]:
        if self.path.is_dir():
            raise UserError(f"{self.path} is a directory, not a trace.")
        if not self.path.exists():
            raise UserError(f"there is no trace {self.path}.")
        with open(self.path, "rb") as file:
            is_zstd = file.read(len(_ZSTD_MAGIC)) == _ZSTD_MAGIC
            file.seek(0)
            source = zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True) if is_zstd else file
            try:
                while chunk := source.read(CHUNK_BYTES):
                    yield chunk
            except zstandard.ZstdError as error:
                raise UserError(f"{self.path} is damaged: {error}.") from None
