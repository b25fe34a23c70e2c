"""How much memory is free."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path


def available() -> int | None:
    """Returns the free memory in bytes, within the limits of a container; None on systems other than Linux."""
    found = []
    with suppress(OSError, KeyError, ValueError):
        lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        found.append(1024 * int(lines["MemAvailable"].split()[0]))
    for limit, used in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        with suppress(OSError, ValueError):  # no such file, or "max": no limit
            found.append(int(Path(limit).read_text()) - int(Path(used).read_text()))
    return min(found, default=None)


def spell(size: int) -> str:
    """Returns a size in bytes as text: "1.5 GiB"."""
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"
