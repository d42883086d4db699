"""Can files keep a network busy: the forecast of `data check --for`."""

import numpy as np
import pytest
from data.samples import write_shard
from launching import run_distmlp

from distmlp.tools.busy import Forecast, forecast

CONFIG = """
[model]
hidden = [64]
loss = "mse"
[data]
train = "not-there.h5"
batch = 100
streams = 4
[run]
engine = "reference"
"""


@pytest.mark.parametrize(("rate", "waiting", "text"), [
    (20_000.0, 0.0, "they keep the network busy"), (11_000.0, 0.0, "that is just enough"),
    (2_500.0, 0.75, "training would wait 75% of its time; not so once the 4,000 bytes"),
])  # fmt: skip
def test_the_verdict_follows_from_the_rates(rate, waiting, text):
    found = Forecast("fused", 100, 40, 100, 0.01, rate, 2)
    assert (found.needed, found.waiting) == (10_000.0, waiting)
    assert text in str(found)
    assert "a step of 100 rows takes 10 ms on the fused engine here" in str(found)


def test_rates_are_measured(tmp_path, monkeypatch):
    monkeypatch.setattr("distmlp.tools.busy.READ_SECONDS", 0.1)
    rows = np.ones((20_000, 8), "f4")
    write_shard(tmp_path / "a.h5", rows, rows[:, :2])
    (tmp_path / "run.toml").write_text(CONFIG)
    found = forecast(tmp_path / "run.toml", [str(tmp_path / "a.h5")])
    assert (found.engine, found.batch, found.row_bytes, found.rows) == ("reference", 100, 40, 20_000)
    assert 1e3 < found.rows_per_second < 1e9
    assert 1e-6 < found.step_seconds < 0.1


def test_the_command_on_two_ranks(tmp_path):
    write_shard(tmp_path / "a.h5", np.ones((200, 8), "f4"), np.ones((200, 2), "f4"))
    (tmp_path / "run.toml").write_text(CONFIG)
    done = run_distmlp(["data", "check", "a.h5", "--for", "run.toml"], 2, cwd=tmp_path)
    assert (done.returncode, done.stdout.count("MB: ")) == (0, 1), done.stderr
    (tmp_path / "run.toml").write_text(CONFIG.replace("mse", "wrong"))
    assert run_distmlp(["data", "check", "a.h5", "--for", "run.toml"], cwd=tmp_path).returncode == 2
