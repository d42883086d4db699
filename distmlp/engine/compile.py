"""CUDA sources → cubin with NVRTC, kept on disk.

A cubin is found by the hash of the sources that it is made of, the options and the compiler's version. Many ranks may
compile the same one at once: each writes a file of its own and renames it.
"""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple, TypeVar

from distmlp.errors import SystemUnfitError

KERNELS = Path(__file__).parent / "kernels"
INCLUDE = re.compile(r'^#include "(.+)"', re.MULTILINE)
MESSAGE_LINES = 12  # of a compiler's complaint
T = TypeVar("T")


class Compiled(NamedTuple):
    code: bytes
    ptx: str
    remarks: str  # registers and spills, warnings


def cubin(source: str, macros: Mapping[str, str], capability: int) -> bytes:
    """The machine code of `kernels/source` for a GPU of `capability` (× 10), from the cache or the compiler.

    Raises SystemUnfitError where NVRTC is missing or does not know the GPU.
    """
    options = _options(macros, capability)
    found = _cache_folder() / f"{_key(source, options)}.cubin"
    try:
        kept = found.read_bytes()
        if hashlib.sha256(kept[32:]).digest() == kept[:32]:
            return kept[32:]
    except OSError:
        pass
    code = _compile(source, options, _machine_code)
    _keep(found, code)
    return code


def compiled(source: str, macros: Mapping[str, str], capability: int) -> Compiled:
    """What the compiler makes of it, and has to say, for tests."""
    options = (*_options(macros, capability), "--ptxas-options=-v")
    return _compile(source, options, lambda nvrtc, program: Compiled(
        nvrtc.getCUBIN(program), nvrtc.getPTX(program).decode(), nvrtc.getProgramLog(program)
    ))  # fmt: skip


def kernel_sha256() -> str:
    """SHA-256 over all `*.cu` and `*.cuh` below `distmlp/`: path, NUL, content, NUL, in sorted path order."""
    package = Path(__file__).parents[1]
    digest = hashlib.sha256()
    paths = {f"distmlp/{p.relative_to(package).as_posix()}": p for e in ("cu", "cuh") for p in package.rglob(f"*.{e}")}
    for name in sorted(paths):
        digest.update(name.encode() + b"\0" + paths[name].read_bytes() + b"\0")
    return digest.hexdigest()


def architecture(capability: int) -> str:
    """NVRTC's target for a GPU of `capability` (× 10). Raises SystemUnfitError where the compiler is too old for it.

    Machine code runs on later GPUs of the same major generation, so the newest known one of it will do.
    """
    known = supported()
    usable = [c for c in known if c <= capability and c // 10 == capability // 10]
    if not usable:
        raise SystemUnfitError(
            f"this GPU has compute capability {capability // 10}.{capability % 10}, and NVRTC {version()} compiles for "
            f"{known[0] // 10}.{known[0] % 10} to {known[-1] // 10}.{known[-1] % 10}; install CuPy for a CUDA version "
            'that knows it (`pip install "distmlp[cuda13]"`)'
        )
    best = max(usable)
    return f"sm_{best}a" if best == 90 else f"sm_{best}"


@lru_cache
def supported() -> tuple[int, ...]:
    """Compute capabilities (× 10) that this NVRTC knows."""
    return tuple(sorted(_nvrtc().getSupportedArchs()))


@lru_cache
def version() -> str:
    """NVRTC's version. Raises SystemUnfitError where it cannot be loaded."""
    return ".".join(map(str, _nvrtc().getVersion()))


@lru_cache
def _nvrtc():  # type: ignore[no-untyped-def]  # a module of CuPy
    try:
        from cupy_backends.cuda.libs import nvrtc

        nvrtc.getVersion()
    except Exception as error:  # ImportError, or RuntimeError from CuPy's loader
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise SystemUnfitError(
            f"the CUDA run-time compiler NVRTC cannot be loaded ({reason}); "
            'run `pip install "distmlp[cuda13]"` (or `[cuda12]` for a CUDA 12 driver), which brings it'
        ) from None
    return nvrtc


@lru_cache
def _sources() -> dict[str, str]:
    paths = [path for pattern in ("*.cu", "*.cuh") for path in sorted(KERNELS.glob(pattern))]
    return {path.name: path.read_text("utf-8") for path in paths}


def _reached(source: str) -> dict[str, str]:
    """Text of `source` and of what it includes: a change elsewhere compiles nothing of it again."""
    texts, waiting = {}, [source]
    while waiting:
        if (name := waiting.pop()) not in texts:
            texts[name] = _sources()[name]
            waiting += INCLUDE.findall(texts[name])
    return dict(sorted(texts.items()))


def _options(macros: Mapping[str, str], capability: int) -> tuple[str, ...]:
    return "-std=c++17", f"-arch={architecture(capability)}", *(f"-D{k}={v}" for k, v in sorted(macros.items()))


def _key(source: str, options: tuple[str, ...]) -> str:
    digest = hashlib.sha256()
    for part in (version(), source, *options, *(part for item in _reached(source).items() for part in item)):
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()[:40]


def _machine_code(nvrtc, program) -> bytes:  # type: ignore[no-untyped-def]
    return nvrtc.getCUBIN(program)


def _compile(source: str, options: tuple[str, ...], take: Callable[..., T]) -> T:
    """What `take` takes from the compiled program."""
    nvrtc = _nvrtc()
    headers = {name.encode(): text.encode() for name, text in _reached(source).items() if name != source}
    program = nvrtc.createProgram(_sources()[source], source, tuple(headers.values()), tuple(headers))
    try:
        nvrtc.compileProgram(program, options)
        return take(nvrtc, program)
    except nvrtc.NVRTCError as error:
        log = nvrtc.getProgramLog(program).strip().splitlines()
        raise SystemUnfitError(
            f"NVRTC {nvrtc.getVersion()} could not compile {source} ({error}) with {' '.join(options)}:\n"
            + "\n".join(log[:MESSAGE_LINES])
        ) from None
    finally:
        nvrtc.destroyProgram(program)


def _cache_folder() -> Path:
    """A folder of our own that can be written to: the user's cache, else one in the temporary directory."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    for folder in (Path(base) / "distmlp" / "kernels", Path(tempfile.gettempdir()) / f"distmlp-{os.getuid()}"):
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            owner = folder.stat()
            # Machine code is loaded from here: nobody else may write it.
            if owner.st_uid == os.getuid() and not owner.st_mode & 0o022 and os.access(folder, os.W_OK):
                return folder
        except OSError:
            continue
    return Path(tempfile.mkdtemp(prefix="distmlp-"))


def _keep(path: Path, code: bytes) -> None:
    """Write `path`, a hash and the code, complete or not at all; a full disk only costs the next run a compilation."""
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.stem, suffix=".tmp")
        with os.fdopen(handle, "wb") as file:
            file.write(hashlib.sha256(code).digest() + code)
        os.replace(name, path)
    except OSError:
        pass
