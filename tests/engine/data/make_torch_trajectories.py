"""Write torch-trajectories.json; needs PyTorch (`pip install torch`), the tests need only the file.

From the project's folder: `PYTHONPATH=tests python tests/engine/data/make_torch_trajectories.py`
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from engine.trajectories import CASES, START, STEPS, gradient, key

OPTIMIZERS = {
    "sgd": lambda p, **common: torch.optim.SGD(p, **common),
    "momentum": lambda p, **common: torch.optim.SGD(p, momentum=0.9, **common),
    "nesterov": lambda p, **common: torch.optim.SGD(p, momentum=0.9, nesterov=True, **common),
    "rmsprop": lambda p, **common: torch.optim.RMSprop(p, alpha=0.99, eps=1e-8, **common),
    "adam": lambda p, **common: torch.optim.Adam(p, betas=(0.9, 0.999), eps=1e-8, **common),
    "adamw": lambda p, **common: torch.optim.AdamW(p, betas=(0.9, 0.999), eps=1e-8, **common),
}


def trajectory(case: dict) -> list[list[float]]:
    """Six parameters after each step."""
    weight, bias = torch.tensor(START[:4], dtype=torch.float64), torch.tensor(START[4:], dtype=torch.float64)
    optimizer = OPTIMIZERS[case["name"]]([weight, bias], lr=case["learning_rate"], weight_decay=case["weight_decay"])
    path = []
    for step in range(STEPS):
        slope = torch.from_numpy(gradient(np.concatenate([weight.numpy(), bias.numpy()]), step))
        weight.grad, bias.grad = slope[:4].clone(), slope[4:].clone()
        if case["clip_norm"]:
            torch.nn.utils.clip_grad_norm_([weight, bias], case["clip_norm"])
        optimizer.step()
        path.append([*weight.tolist(), *bias.tolist()])
    return path


if __name__ == "__main__":
    paths = ",\n".join(f"{json.dumps(key(case))}: {json.dumps(trajectory(case))}" for case in CASES)
    text = f'{{"torch": "{torch.__version__}", "paths": {{\n{paths}\n}}}}\n'
    Path(__file__).with_name("torch-trajectories.json").write_text(text)
