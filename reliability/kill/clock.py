"""A clock that is set back by a day while a command runs.

The real clock belongs to everyone on the machine. So a small library, loaded before all others, sets it back for the
processes of one command. The file system has the real clock; files written before the jump get times of tomorrow.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from pathlib import Path

DAY = 86_400
SOURCE = r"""
#define _GNU_SOURCE
#include <stdlib.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static long behind(void) {  /* seconds by which the clock is late now */
  const char *sign = getenv("CLOCK_SET_BACK_SIGN");
  return sign && !access(sign, F_OK) ? 86400 : 0;
}

int clock_gettime(clockid_t clock, struct timespec *found) {
  int failed = (int)syscall(SYS_clock_gettime, clock, found);
  if (!failed && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) found->tv_sec -= behind();
  return failed;
}

int gettimeofday(struct timeval *found, void *zone) {
  struct timespec now;
  (void)zone;
  clock_gettime(CLOCK_REALTIME, &now);
  found->tv_sec = now.tv_sec;
  found->tv_usec = now.tv_nsec / 1000;
  return 0;
}

time_t time(time_t *found) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  if (found) *found = now.tv_sec;
  return now.tv_sec;
}
"""


def build(folder: Path) -> Path | None:
    """Compiles the library; None if there is no C compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        return None
    source, library = folder / "clock.c", folder / "clock.so"
    source.write_text(SOURCE)
    subprocess.run([compiler, "-O1", "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    return library


def set_back_by(sign: Path, library: Path) -> dict[str, str]:
    """Returns the environment of a command whose clock is set back once the file `sign` exists."""
    return {"LD_PRELOAD": str(library), "CLOCK_SET_BACK_SIGN": str(sign)}


def move_to_tomorrow(folder: Path) -> None:
    """Gives the files of a folder the times that they have for someone whose clock was set back by a day."""
    tomorrow = time.time() + DAY
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):  # it was deleted meanwhile
            os.utime(path, (tomorrow, tomorrow), follow_symlinks=False)
