"""Files that reader threads have open, shared by them: the newest few hundred."""

from __future__ import annotations

import errno
import os
import resource
import threading
from collections import OrderedDict

MOST = 1024


class OpenFile:
    """Closed when nobody holds it any more."""

    def __init__(self, path: str) -> None:
        self.handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def __del__(self) -> None:
        if hasattr(self, "handle"):
            os.close(self.handle)


class OpenFiles:
    """Safe to share between threads. `most` files stay open, by default a quarter of what this process may have."""

    def __init__(self, most: int = 0) -> None:
        may = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._most = most or (MOST if may == resource.RLIM_INFINITY else max(8, min(MOST, may // 4)))
        self._files: OrderedDict[str, OpenFile] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, path: str) -> OpenFile:
        """To be held while its handle is used: it may be let go here meanwhile. Raises OSError."""
        with self._lock:
            file = self._files.get(path)
            if file is not None:
                self._files.move_to_end(path)
                return file
        file = self._open(path)  # not under the lock: a file system may take its time
        with self._lock:
            file = self._files.setdefault(path, file)
            if len(self._files) > self._most:
                self._files.popitem(last=False)
        return file

    def _open(self, path: str) -> OpenFile:
        while True:
            try:
                return OpenFile(path)
            except OSError as error:
                if error.errno not in (errno.EMFILE, errno.ENFILE) or not self._files:
                    raise
            with self._lock:  # a low limit: make do with fewer
                if self._files:
                    self._files.popitem(last=False)
