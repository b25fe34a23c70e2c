"""The time of a training step on this machine, used to convert a time budget to steps."""

from __future__ import annotations

import time
from pathlib import Path

import torch

from locant.experiments import arms, own_code
from locant.experiments.run import load_setting, quiet
from locant.experiments.tasks import find_task
from locant.experiments.work import Work
from locant.runs.float32_products import fast_products

TIMED_STEPS = 8
"""Steps to time; the first two do not count."""


@fast_products()
def seconds_of_a_step(work: Work, scheme: str, data: Path) -> float:
    """Returns the median time of a training step on this machine."""
    torch.set_num_threads(work.preset.threads)
    quiet()
    own_code.load(work, data)
    task, setting = find_task(work.task), load_setting(work, data)
    model = arms.build(task, setting, work.model, scheme, 0)
    if torch.cuda.is_available():
        model.cuda()  # type: ignore[call-arg]
    examples = task.examples(setting, 0, work.preset.batch * TIMED_STEPS)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    model.train()
    times = []
    for number in range(TIMED_STEPS):
        start = time.perf_counter()
        rows = [examples[number * work.preset.batch + at] for at in range(work.preset.batch)]
        batch = {name: value.to(model.device) for name, value in task.collate(setting, rows).items()}
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss.item()  # waits for a GPU
        times.append(time.perf_counter() - start)
    return sorted(times[2:])[len(times[2:]) // 2]
