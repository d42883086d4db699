"""Read the structure of HDF5 files: the child process that touches what users bring.

The HDF5 library trusts the bytes of a file: on a damaged one it may crash, loop or ask for any amount of
memory. So the library only ever opens user files here, in a short-lived process with bounded memory and
CPU time (`inspection` starts it), and reports plain descriptions. Reads a request as one JSON line from
standard input; answers each file with a JSON line, followed by that many raw bytes as the line says.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from typing import Any, BinaryIO

import h5py
import numpy as np

from distmlp.data.columns import column_names
from distmlp.data.filters import available
from distmlp.data.layout import CHECKSUM_GROUP, CHUNK_ENTRY
from distmlp.data.number_format import number_format

MAX_LINKS = 32
MAX_LISTED = 40
# Memory that a sparse or compressed dataset may expand to: deflate packs at most 1032 : 1.
MAX_EXPANSION, FREE_EXPANSION = 1100, 16 << 20


class Refused(Exception):
    """This file cannot be used; the text says why and what to do."""


def main() -> int:
    """Serve one request: `{"files": [paths], "datasets": {role: name}}`."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a crash leaves no file behind
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # who asked has died: nobody wants to know that from us
    line = sys.stdin.buffer.readline()
    if not line:
        return 0
    request = json.loads(line)
    out = sys.stdout.buffer
    out.write(b"ready\n")  # from here on, death is the fault of the file at hand
    out.flush()
    for path in request["files"]:
        _limit(os.path.getsize(path))
        try:
            answer, payload = probe(path, request["datasets"])
        except Refused as refusal:
            answer, payload = {"refused": str(refusal)}, []
        except MemoryError:
            answer, payload = {"refused": "its structure asks for far more memory than its size justifies"}, []
        except Exception as error:
            answer, payload = {"refused": f"HDF5 cannot read its structure ({_text(error)})"}, []
        _send(out, answer, payload)
    return 0


def _limit(file_bytes: int) -> None:
    """Bound memory and CPU time of the next file by its size, where the system tells what is used now."""
    if not os.path.exists("/proc/self/statm"):
        return
    with open("/proc/self/statm", encoding="ascii") as statm:
        now = int(statm.read().split()[0]) * resource.getpagesize()
    memory = now + (64 << 20) + 2 * file_bytes
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    if hard == resource.RLIM_INFINITY or memory < hard:
        resource.setrlimit(resource.RLIMIT_AS, (memory, hard))
    used = resource.getrusage(resource.RUSAGE_SELF)
    seconds = int(used.ru_utime + used.ru_stime + 6 + file_bytes / 20e6)
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    if hard == resource.RLIM_INFINITY or seconds < hard:
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, hard))


def _send(out: BinaryIO, answer: dict[str, Any], payload: list[bytes]) -> None:
    out.write(json.dumps({**answer, "payload": [len(part) for part in payload]}).encode() + b"\n")
    for part in payload:
        out.write(part)
    out.flush()


def probe(path: str, datasets: dict[str, str]) -> tuple[dict[str, Any], list[bytes]]:
    """Describe the datasets (role → name) of one file. Raises Refused, or whatever h5py raises."""
    payload: list[bytes] = []
    found: dict[str, Any] = {}
    with _open(path) as file:
        if not datasets:  # the caller asks what there is
            return {"contents": _contents(file), "datasets": {}}, payload
        for role, name in datasets.items():
            dataset = resolve(file, name, role)
            facts, parts = describe(file, dataset, name, os.path.getsize(path))
            found[role] = facts
            payload += parts
    return {"datasets": found}, payload


def _open(path: str) -> h5py.File:
    try:
        return h5py.File(path, "r", locking=False)
    except OSError as error:
        if "already open for write" not in str(error):
            raise
    try:
        return h5py.File(path, "r", locking=False, swmr=True)
    except OSError:
        raise Refused(
            "a program has it open to write, or ended without closing it; wait until it is closed, or run "
            f"`h5clear -s {path}` when no program writes it any more"
        ) from None


def resolve(file: h5py.File, name: str, role: str) -> h5py.Dataset:
    """The dataset `name`, never leaving the file on the way. Raises Refused."""
    parts = [part for part in name.split("/") if part not in ("", ".")]
    node, links = file["/"], 0
    trail: list[str] = []
    while parts:
        part = parts.pop(0)
        if not isinstance(node, h5py.Group):
            raise Refused(f"`{'/'.join(trail)}` is not a group, so there is no dataset `{name}`; {_holds(file, role)}")
        link = node.get(part, getlink=True) if part in node.keys() else None  # noqa: SIM118 (no link is followed)
        if link is None:
            raise Refused(f"no dataset `{name}`; {_holds(file, role)}")
        if isinstance(link, h5py.ExternalLink):
            raise Refused(
                f"`{name}` is a link to another file ({link.filename}), which is not followed; "
                "copy the data into one file, for example with h5repack IN.h5 OUT.h5"
            )
        if isinstance(link, h5py.SoftLink):
            links += 1
            if links > MAX_LINKS:
                raise Refused(f"`{name}` is a soft link that leads round in a circle; {_holds(file, role)}")
            target = [step for step in link.path.split("/") if step not in ("", ".")]
            if link.path.startswith("/"):
                node, trail = file["/"], []
            parts = target + parts
            continue
        node = node[part]
        trail.append(part)
    if not isinstance(node, h5py.Dataset):
        kind = "a group" if isinstance(node, h5py.Group) else "not a dataset"
        if isinstance(node, h5py.Group) and {"data", "indices", "indptr"} <= set(node.keys()):
            raise Refused(
                f"`{name}` is a sparse matrix (a group of data, indices and indptr), which is not read; store it as an "
                "ordinary dataset, in Python for example: file[NEW] = matrix.toarray()"
            )
        raise Refused(f"`{name}` is {kind}, expected a dataset; {_holds(file, role)}")
    return node


def _holds(file: h5py.File, role: str) -> str:
    names = _contents(file)
    option = f"set data.{role} to the right name"
    if not names:
        return f"the file holds no dataset; {option}"
    more = f" and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else ""
    return f"the file holds {', '.join(names[:MAX_LISTED])}{more}; {option}"


def _contents(file: h5py.File) -> list[str]:
    names: list[str] = []

    def visit(name: str, node: Any) -> None:
        if isinstance(node, h5py.Dataset) and not name.startswith(CHECKSUM_GROUP + "/"):
            names.append(f"`{name}` {node.shape} {node.dtype}")

    try:
        file.visititems(visit)
    except Exception as error:
        names.append(f"(the rest cannot be read: {_text(error)})")
    return names


def describe(file: h5py.File, dataset: h5py.Dataset, name: str, file_bytes: int) -> tuple[dict[str, Any], list[bytes]]:
    """Facts of a `Layout` and its raw parts (fill value, inline data, chunk table, checksums)."""
    dtype, problem = number_format(dataset)
    if problem:
        raise Refused(f"dataset `{name}` {problem}")
    shape = dataset.shape
    if shape is None or not shape:
        raise Refused(f"dataset `{name}` has no rows ({'empty' if shape is None else 'a single value'})")
    plist = dataset.id.get_create_plist()
    if dataset.is_virtual:
        raise Refused(
            f"dataset `{name}` is virtual: its rows lie in other datasets or files, which are not followed; "
            f"make an ordinary dataset of it: h5repack -l {name}:CONTI IN.h5 OUT.h5"
        )
    if plist.get_external_count():
        raise Refused(
            f"dataset `{name}` keeps its rows in another file (HDF5 external storage), which is not followed; "
            f"copy them into an ordinary dataset, in Python for example: file[NEW] = file['{name}'][...]"
        )
    facts: dict[str, Any] = {"name": name, "shape": shape, "dtype": dtype.str, "kind": "contiguous", "offset": -1}
    facts["file_bytes"] = file_bytes
    logical = dtype.itemsize
    for size in shape:
        logical *= size
    if logical > FREE_EXPANSION + MAX_EXPANSION * file_bytes:
        raise Refused(
            f"dataset `{name}` claims {shape} {dtype}, {logical:.3g} bytes, "
            f"which a file of {file_bytes} bytes cannot hold"
        )
    facts["columns"] = column_names(file, dataset, name)
    filters, chunks, inline = _filters(plist, name), b"", b""
    layout = plist.get_layout()
    if layout == h5py.h5d.CONTIGUOUS:
        facts["offset"] = _contiguous(dataset, name, logical, file_bytes)
    elif layout == h5py.h5d.CHUNKED:
        table = _chunk_table(dataset, name, file_bytes)
        facts |= {"kind": "chunked", "chunk": dataset.chunks, "filters": filters}
        chunks = table.tobytes()
    elif layout == h5py.h5d.COMPACT:
        facts["kind"] = "inline"
        inline = np.ascontiguousarray(dataset[...]).tobytes()
    else:
        raise Refused(f"dataset `{name}` has a storage layout that is not known (class {layout})")
    checksums, facts["checksum_rows"] = _checksums(file, name, shape[0])
    return facts, [_fill_value(plist, dtype), inline, chunks, checksums]


def _filters(plist: Any, name: str) -> list[Any]:
    filters = []
    for position in range(plist.get_nfilters()):
        number, flags, values, label = plist.get_filter(position)
        text = bytes(label).split(b"\0")[0].decode("ascii", "replace") or f"filter {number}"
        if not available(number):
            raise Refused(
                f"dataset `{name}` is compressed with the HDF5 filter {number} ({text}), which is not installed here; "
                "install its plugin (`pip install hdf5plugin` has the usual ones), or repack the file with gzip or none"
            )
        filters.append([number, text, flags, [int(value) for value in values]])
    return filters


def _contiguous(dataset: h5py.Dataset, name: str, logical: int, file_bytes: int) -> int:
    offset = dataset.id.get_offset()
    # The status, not the offset: behind a user block that of an unwritten dataset is a number like any other.
    if offset is None or dataset.id.get_space_status() == h5py.h5d.SPACE_STATUS_NOT_ALLOCATED:
        return -1
    if offset < 0 or offset + logical > file_bytes:
        raise Refused(
            f"dataset `{name}` claims {dataset.shape} {dataset.dtype}, bytes {offset} to {offset + logical}, "
            f"but the file ends at {file_bytes}"
        )
    return int(offset)


def _chunk_table(dataset: h5py.Dataset, name: str, file_bytes: int) -> np.ndarray:
    chunk, shape = dataset.chunks, dataset.shape
    grid = [-(-size // step) for size, step in zip(shape, chunk, strict=True)]
    cells = int(np.prod(grid, dtype=object))
    chunk_bytes = int(np.prod(chunk, dtype=object)) * dataset.dtype.itemsize
    if cells > 65536 + file_bytes // 8:
        raise Refused(
            f"dataset `{name}` claims {cells} chunks of {chunk}, more than a file of {file_bytes} bytes can hold"
        )
    if chunk_bytes > FREE_EXPANSION + MAX_EXPANSION * file_bytes or chunk_bytes >= 1 << 32:
        raise Refused(f"dataset `{name}` has chunks of {chunk}, {chunk_bytes:.3g} bytes each, which is too large")
    table = np.zeros(cells, CHUNK_ENTRY)
    table["offset"] = -1
    bad: list[str] = []

    def visit(info: Any) -> None:
        cell = 0
        for start, step, count in zip(info.chunk_offset, chunk, grid, strict=True):
            if start % step or start // step >= count:
                bad.append(f"its index names a chunk at {tuple(info.chunk_offset)}, where none can be")
                return
            cell = cell * count + start // step
        if info.byte_offset is None or info.byte_offset + info.size > file_bytes or info.size >= 1 << 32:
            bad.append(f"the chunk at {tuple(info.chunk_offset)} lies beyond the end of the file, {file_bytes} bytes")
            return
        if table[cell]["offset"] >= 0:
            bad.append(f"its index names the chunk at {tuple(info.chunk_offset)} twice")
        table[cell] = (info.byte_offset, info.size, info.filter_mask & 0xFFFFFFFF)

    if dataset.id.get_num_chunks():
        dataset.id.chunk_iter(visit)
    if bad:
        raise Refused(f"dataset `{name}` is damaged: {bad[0]}; copy or make the file again")
    return table


def _fill_value(plist: Any, dtype: np.dtype) -> bytes:
    value = np.zeros(1, dtype)
    if plist.fill_value_defined() != h5py.h5d.FILL_VALUE_UNDEFINED:
        plist.get_fill_value(value)
    return value.tobytes()


def _checksums(file: h5py.File, name: str, rows: int) -> tuple[bytes, int]:
    path = f"{CHECKSUM_GROUP}/{name.strip('/')}"
    if CHECKSUM_GROUP not in file.keys() or path not in file:  # noqa: SIM118
        return b"", 0
    stored = resolve(file, path, "inputs")
    block = int(stored.attrs.get("block_rows", 0))
    if stored.dtype != np.dtype("<u4") or block < 1 or stored.shape != (-(-rows // block),):
        raise Refused(f"the checksums of dataset `{name}` do not fit it; convert the data again")
    return stored[...].tobytes(), block


def _text(error: BaseException) -> str:
    return " ".join(str(error).replace("synchronously ", "").split())[:300] or type(error).__name__


if __name__ == "__main__":
    sys.exit(main())
