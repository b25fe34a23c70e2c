"""The fork server: a process that imports everything a run needs, once. Every run is a fork of it and starts at once.

This module imports nothing heavy. A command starts the server first; it then imports torch while the server imports
torch and transformers.
"""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import forkserver
from types import ModuleType
from typing import Any

PRELOAD = "locant.experiments.preload"


def start() -> Any:
    """Starts the fork server, if it is not running, and returns its multiprocessing context.

    Windows has no fork server: there, every process imports everything itself.
    """
    if sys.platform == "win32":
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([PRELOAD])
    forkserver.ensure_running()
    return context


@contextmanager
def without_main() -> Iterator[None]:
    """Starts processes that do not import the caller's script.

    multiprocessing imports `__main__` into every process. A script that calls `locant.compare` would then be executed
    again in every run, and each would start another comparison. Runs need modules of locant alone.
    """
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main
