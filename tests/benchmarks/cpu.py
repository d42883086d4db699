"""Training speed on the CPU beside PyTorch and scikit-learn, in one run: `python tests/benchmarks/cpu.py`.

Fashion-MNIST where it is installed (Debian: `dataset-fashion-mnist`), else random rows of that shape; network
784-256-128-10, ReLU, softmax cross-entropy, Adam, batch 256, float32. The subjects take turns, each in a process of
its own; what counts is the wall time of whole epochs after the first. Writes results/cpu-step.json.
"""

from __future__ import annotations

import argparse
import gzip
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent
FASHION = Path("/usr/share/datasets/fashion-mnist")
LAYERS, BATCH, ROWS = [784, 256, 128, 10], 256, 60_000
THREADS = 2  # in all: one process with two, or two ranks with one each

CONFIG = """
[model]
layers = [784, 256, 128, 10]
loss = "softmax_cross_entropy"
[data]
train = "train.h5"
validation = "test.h5"
batch = 256
[run]
epochs = {epochs}
engine = "reference"
output = "run-{ranks}"
log_every = {steps}
validate_every = "{epochs} epochs"
checkpoint_every = "{epochs} epochs"
"""


def read_idx(name: str) -> np.ndarray:
    raw = gzip.decompress((FASHION / f"{name}.gz").read_bytes())
    dimensions = raw[3]
    shape = np.frombuffer(raw, ">i4", dimensions, 4)
    return np.frombuffer(raw, np.uint8, offset=4 + 4 * dimensions).reshape(shape[0], -1).squeeze()


def load_data() -> tuple[str, dict[str, np.ndarray]]:
    """Name, and raw uint8 images and labels."""
    if FASHION.is_dir():
        parts = {"train": "train", "test": "t10k"}
        return "Fashion-MNIST", {
            f"{part}_{what}": read_idx(f"{name}-{what}-idx{rank}-ubyte")
            for part, name in parts.items()
            for what, rank in (("images", 3), ("labels", 1))
        }
    rng = np.random.default_rng(0)
    data = {}
    for part, rows in (("train", ROWS), ("test", 10_000)):
        data[f"{part}_images"] = rng.integers(0, 256, (rows, 784), np.uint8)
        data[f"{part}_labels"] = rng.integers(0, 10, rows).astype(np.uint8)
    return "random", data


def standardized(folder: Path) -> list[np.ndarray]:
    """Train images, train labels, test images, test labels: float32 and int64, as the peers like them."""
    data = np.load(folder / "data.npz")
    mean, deviation = data["train_images"].mean(axis=0), data["train_images"].std(axis=0)
    deviation[deviation == 0] = 1
    images = [((data[f"{part}_images"] - mean) / deviation).astype(np.float32) for part in ("train", "test")]
    labels = [data[f"{part}_labels"].astype(np.int64) for part in ("train", "test")]
    return [images[0], labels[0], images[1], labels[1]]


def run_torch(folder: Path, epochs: int, fused: bool) -> dict:
    """The usual loop: shuffled indices, a slice of them a step."""
    import torch

    torch.set_num_threads(THREADS)
    x, t, x_test, t_test = map(torch.from_numpy, standardized(folder))
    hidden = [torch.nn.Linear(784, 256), torch.nn.ReLU(), torch.nn.Linear(256, 128), torch.nn.ReLU()]
    model = torch.nn.Sequential(*hidden, torch.nn.Linear(128, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=fused)
    criterion = torch.nn.CrossEntropyLoss()
    seconds = []
    for _ in range(epochs):
        start = time.perf_counter()
        for chosen in torch.randperm(len(x)).split(BATCH):
            optimizer.zero_grad()
            criterion(model(x[chosen]), t[chosen]).backward()
            optimizer.step()
        seconds.append(time.perf_counter() - start)
    with torch.no_grad():
        accuracy = (model(x_test).argmax(1) == t_test).float().mean().item()
    return {"seconds": seconds[1:], "accuracy": accuracy}


def run_sklearn(folder: Path, epochs: int) -> dict:
    import warnings

    from sklearn.exceptions import ConvergenceWarning
    from sklearn.neural_network import MLPClassifier

    warnings.simplefilter("ignore", ConvergenceWarning)
    x, t, x_test, t_test = standardized(folder)
    model = MLPClassifier((256, 128), batch_size=BATCH, max_iter=1, alpha=0, warm_start=True, learning_rate_init=1e-3)
    seconds = []
    for _ in range(epochs):
        start = time.perf_counter()
        model.fit(x, t)
        seconds.append(time.perf_counter() - start)
    return {"seconds": seconds[1:], "accuracy": model.score(x_test, t_test)}


def run_distmlp(folder: Path, epochs: int, ranks: int) -> dict:
    """The command, from its own metrics: the clock between the ends of epochs, whatever happened between them."""
    from launching import run_distmlp

    (folder / f"{ranks}.toml").write_text(CONFIG.format(epochs=epochs, ranks=ranks, steps=-(-ROWS // BATCH)))
    done = run_distmlp(
        ["train", f"{ranks}.toml", "--overwrite"],
        ranks=ranks,
        cwd=folder,
        env={"OMP_NUM_THREADS": str(THREADS // ranks)},
        timeout=300,
    )
    if done.returncode:
        sys.exit(done.stdout + done.stderr)
    lines = [json.loads(line) for line in (folder / f"run-{ranks}" / "metrics.jsonl").read_text().splitlines()]
    clock = [line["seconds"] for line in lines]
    assert len(clock) == epochs
    return {"seconds": np.diff(clock).tolist(), "accuracy": lines[-1]["validation_accuracy"]}


def run_peer(subject: str, folder: Path, epochs: int) -> dict:
    command = [sys.executable, __file__, "--peer", subject, "--folder", str(folder), "--epochs", str(epochs)]
    environment = {**os.environ, "OMP_NUM_THREADS": str(THREADS)}
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout)


PEERS = {
    "torch": lambda folder, epochs: run_torch(folder, epochs, fused=False),
    "torch-fused-adam": lambda folder, epochs: run_torch(folder, epochs, fused=True),
    "sklearn": run_sklearn,
}


def measure(epochs: int, rounds: int) -> dict:
    name, data = load_data()
    results: dict[tuple[str, int], list[dict]] = {}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        np.savez(folder / "data.npz", **data)
        write_shards(folder, data)
        for _ in range(rounds):
            for subject, ranks in [
                ("distmlp", 1),
                ("torch", 1),
                ("torch-fused-adam", 1),
                ("sklearn", 1),
                ("distmlp", 2),
            ]:
                if subject == "distmlp":
                    result = run_distmlp(folder, epochs, ranks)
                else:
                    result = run_peer(subject, folder, epochs)
                results.setdefault((subject, ranks), []).append(result)
    return {
        "device": f"{cpu_name()}, {len(os.sched_getaffinity(0))} cores",
        "data": name,
        "versions": {
            "python": platform.python_version(),
            **{p: importlib.metadata.version(p) for p in ("numpy", "torch", "scikit-learn", "mpi4py")},
        },
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "rows": [row(subject, ranks, parts) for (subject, ranks), parts in results.items()],
    }


def row(subject: str, ranks: int, parts: list[dict]) -> dict:
    """One line of the table; `us_*` is the time of a step, `blocks` the epochs it was taken from."""
    steps = -(-ROWS // BATCH)
    us = sorted(second / steps * 1e6 for part in parts for second in part["seconds"])
    return {
        "preset": "fashion-256",
        "layers": LAYERS,
        "batch": BATCH,
        "precision": "fp32",
        "optimizer": "adam",
        "ranks": ranks,
        "threads_per_rank": THREADS // ranks,
        "subject": subject,
        "us_median": round(statistics.median(us), 1),
        "us_min": round(us[0], 1),
        "us_max": round(us[-1], 1),
        "blocks": len(us),
        "samples_per_second": round(ROWS / steps / statistics.median(us) * 1e6),
        "accuracy": round(statistics.median(part["accuracy"] for part in parts), 4),
    }


def write_shards(folder: Path, data: dict[str, np.ndarray]) -> None:
    import h5py

    for part in ("train", "test"):
        with h5py.File(folder / f"{part}.h5", "w") as file:
            file["inputs"], file["targets"] = data[f"{part}_images"], data[f"{part}_labels"]


def cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=4, help="of each subject and round; the first does not count")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=HERE / "results" / "cpu-step.json")
    parser.add_argument("--peer", choices=PEERS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.peer:
        print(json.dumps(PEERS[options.peer](options.folder, options.epochs)))
        return
    record = measure(options.epochs, options.rounds)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    for r in record["rows"]:
        print(f"{r['subject']:18} {r['ranks']} ranks  {r['samples_per_second']:7,} samples/s  accuracy {r['accuracy']}")


if __name__ == "__main__":
    sys.path.insert(0, str(HERE.parent))
    main()
