"""Faults from outside: Python imports this at start where its folder is on PYTHONPATH (see `injection` in faults.py).

`DISTMLP_TEST_FAULTS` holds a JSON list of objects: `rank`, `target` ("package.module:Class.method", or
"package.module" for its import), `call` (which call of it, from 1), `action`: raise, sleep, kill, stop, exit, warn.
"""

import functools
import importlib.abc
import importlib.util
import json
import os
import signal
import sys
import time


def _rank():
    for name in ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID"):
        if name in os.environ:
            return int(os.environ[name])
    return 0


def _act(action, seconds):
    if action == "raise":
        raise RuntimeError("injected fault")
    if action == "sleep":
        time.sleep(seconds)
    elif action == "warn":
        import warnings

        warnings.warn("injected warning", stacklevel=1)
    elif action == "exit":
        os._exit(9)
    else:
        os.kill(os.getpid(), getattr(signal, {"kill": "SIGKILL", "stop": "SIGSTOP"}.get(action, action)))


def _wrap(module, path, fault):
    *owners, name = path.split(".")
    owner = functools.reduce(getattr, owners, module)
    original = owner.__dict__[name] if isinstance(owner, type) else getattr(owner, name)
    function = getattr(original, "__func__", original)
    calls = [0]

    @functools.wraps(function)
    def faulty(*args, **kwargs):
        calls[0] += 1
        if calls[0] == fault.get("call", 1):
            _act(fault["action"], fault.get("seconds", 1000))
        return function(*args, **kwargs)

    setattr(owner, name, type(original)(faulty) if isinstance(original, (classmethod, staticmethod)) else faulty)


class _Finder(importlib.abc.MetaPathFinder):
    """Lets modules be found as usual and puts the faults in when they have been executed."""

    def __init__(self, faults):
        self.faults = faults

    def find_spec(self, name, path=None, target=None):
        mine = [fault for fault in self.faults if fault["target"].partition(":")[0] == name]
        if not mine:
            return None
        sys.meta_path.remove(self)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            sys.meta_path.insert(0, self)
        execute = spec.loader.exec_module

        def exec_module(module):
            for fault in mine:
                if ":" not in fault["target"]:
                    _act(fault["action"], fault.get("seconds", 1000))
            execute(module)
            for fault in mine:
                if ":" in fault["target"]:
                    _wrap(module, fault["target"].partition(":")[2], fault)

        spec.loader.exec_module = exec_module
        return spec


_faults = [fault for fault in json.loads(os.environ.get("DISTMLP_TEST_FAULTS", "[]")) if fault["rank"] == _rank()]
if _faults:
    sys.meta_path.insert(0, _Finder(_faults))
