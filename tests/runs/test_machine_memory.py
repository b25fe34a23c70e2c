"""Free memory, within the limits of a container."""

import pytest

from locant.runs import machine_memory

FREE = {"/proc/meminfo": "MemTotal:  900 kB\nMemAvailable:   300 kB\nHuge: x: 0\n"}
SECOND = {"/sys/fs/cgroup/memory.max": "200000\n", "/sys/fs/cgroup/memory.current": "50000\n"}
FIRST = {
    "/sys/fs/cgroup/memory/memory.limit_in_bytes": "9000",
    "/sys/fs/cgroup/memory/memory.usage_in_bytes": "1000",
}


@pytest.mark.parametrize(
    ("files", "available"),
    [
        ({}, None),
        (FREE, 300 * 1024),
        ({"/proc/meminfo": "MemTotal: 900 kB\n"}, None),
        ({"/proc/meminfo": "no table\n"}, None),
        (SECOND, 150_000),
        (FREE | SECOND, 150_000),
        (FREE | FIRST, 8000),
        (FREE | SECOND | {"/sys/fs/cgroup/memory.max": "max\n"}, 300 * 1024),
        (FREE | SECOND | {"/sys/fs/cgroup/memory.max": "99000000\n"}, 300 * 1024),
        (SECOND | {"/proc/meminfo": "no table\n"}, 150_000),
        (FREE | SECOND | {"/sys/fs/cgroup/memory.max": "max\n"} | FIRST, 8000),
    ],
)
def test_the_smallest_of_what_the_system_says(files, available, tmp_path, monkeypatch):
    for name, content in files.items():
        path = tmp_path / name.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    monkeypatch.setattr(machine_memory, "Path", lambda name: tmp_path / name.lstrip("/"))
    assert machine_memory.available() == available


def test_sizes_in_words():
    sizes = (0, 2**20, 3 * 2**19, 2**30 - 1, 2**30, 5 * 2**29)
    assert [machine_memory.spell(size) for size in sizes] == [
        "0.0 MiB", "1.0 MiB", "1.5 MiB", "1024.0 MiB", "1.0 GiB", "2.5 GiB",
    ]  # fmt: skip
