"""Which files a pattern means."""

import pytest

from distmlp.data.sources import expand
from distmlp.errors import DataError


@pytest.fixture
def folder(tmp_path, monkeypatch):
    for name in ("b.h5", "a.h5", "odd[1].h5", "deep/c.h5"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("patterns", "names"),
    [
        ("[ab].h5", ["a.h5", "b.h5"]),
        (("b.h5", "a.h5"), ["a.h5", "b.h5"]),
        (("a.h5", "*.h5", "./a.h5"), ["a.h5", "b.h5", "odd[1].h5"]),
        ("odd[1].h5", ["odd[1].h5"]),
        ("**/*.h5", ["a.h5", "b.h5", "deep/c.h5", "odd[1].h5"]),
        ("deep", ["deep"]),
    ],
)
def test_patterns(folder, patterns, names):
    assert expand(patterns) == tuple(str(folder / name) for name in names)


def test_every_pattern_that_matches_nothing_is_named(folder):
    with pytest.raises(DataError) as caught:
        expand(["a.h5", "x*.h5", "nowhere/y.h5"])
    first, second = str(caught.value).splitlines()
    assert first == "x*.h5: this pattern matches no file; the folder holds a.h5, b.h5, deep, odd[1].h5"
    assert second.startswith("nowhere/y.h5: no such file: the folder does not exist")
