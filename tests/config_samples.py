"""Configurations that several tests start from."""

from __future__ import annotations

MINIMAL = {"model": {"layers": [4, 8, 2]}, "data": {"train": "a-*.h5"}}

CONTRACT = """
[model]
layers = [784, 512, 512, 10]     # all widths
activation = "relu"
output_activation = "identity"
loss = "softmax_cross_entropy"
init = "he_normal"

[data]
train = "shards/train-*.h5"
validation = "shards/test-*.h5"
inputs = "inputs"
targets = "targets"
sample_weights = ""
standardize = "inputs"
batch = 1024
streams = 16
shuffle = true

[optimizer]
name = "adam"
learning_rate = 1e-3
weight_decay = 0.0
clip_norm = 0.0

[schedule]
name = "constant"
warmup_steps = 0

[run]
epochs = 10
seed = 0
engine = "auto"
precision = "fp32"
transport = "auto"
output = "runs/fashion"
checkpoint_every = "1 epoch"
keep = 3
log_every = 50
validate_every = "1 epoch"
on_nonfinite = "stop"
early_stopping = 0
ema_decay = 0.0
reproducible = "run"
share_gpu = false
stall_timeout = "10 minutes"
tensorboard = false
"""


def written(folder, text=CONTRACT, name="run.toml"):
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def document(**changes):
    """MINIMAL with `section__key=value` put in."""
    result = {name: dict(keys) for name, keys in MINIMAL.items()}
    for place, value in changes.items():
        section, key = place.split("__")
        result.setdefault(section, {})[key] = value
    return result
