"""How much memory there is, as the machine and its control groups tell."""

from pathlib import Path

import pytest

from distmlp.data.memory import available_bytes


def host(root: Path, meminfo="MemTotal: 100 kB\nMemAvailable:   900 kB\n", membership="0::/a/b\n", **files) -> Path:
    for name, text in {"proc/meminfo": meminfo, "proc/self/cgroup": membership, **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


GROUP = "sys/fs/cgroup"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 900 << 10),
        ({f"{GROUP}/a/b/memory.max": "max\n", f"{GROUP}/a/b/memory.current": "5\n"}, 900 << 10),
        ({f"{GROUP}/a/b/memory.max": "5000\n", f"{GROUP}/a/b/memory.current": "2000\n"}, 3000),
        ({f"{GROUP}/a/memory.max": "4000\n", f"{GROUP}/a/memory.current": "2500\n"}, 1500),
        ({f"{GROUP}/memory.max": "100\n", f"{GROUP}/memory.current": "200\n"}, 0),
        (
            {f"{GROUP}/a/b/memory.max": "5000\n", f"{GROUP}/a/b/memory.current": "4000\n",
             f"{GROUP}/a/b/memory.stat": "anon 1\ninactive_file 700\n"}, 1700,
        ),
        (
            {"membership": "4:cpu,memory:/j\n1:name=x:/\n", f"{GROUP}/memory/j/memory.limit_in_bytes": "6000\n",
             f"{GROUP}/memory/j/memory.usage_in_bytes": "1000\n"}, 5000,
        ),
        ({"membership": "4:memory:/\n", f"{GROUP}/memory/memory.limit_in_bytes": f"{(1 << 63) - 4096}\n"}, 900 << 10),
        ({"meminfo": "nothing\n"}, 1 << 30),
    ],
)  # fmt: skip
def test_the_tightest_limit_counts(tmp_path, files, expected):
    assert available_bytes(host(tmp_path, **files)) == expected


def test_this_machine():
    assert available_bytes() > 1 << 20
