"""Work that is shared out among processes: trainings of small models, of which a core can do one at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from fenchel.progress import Progress, silent

Task = TypeVar("Task")
Answer = TypeVar("Answer")


def shared_out(
    function: Callable[[Task, Progress], Answer],
    tasks: Sequence[Task],
    progress: Progress,
    processes: int | None = None,
) -> list[Answer]:
    """The answers to all tasks, in their order.

    Args:
        function: answers a task, and tells how far it is, where somebody listens.
        tasks: each is answered by one process, with one thread: so answers do not depend on how many there are.
        progress: told as tasks are done; with one process, while they are being done too.
        processes: how many; as many as there are cores by default. With 1 nothing is started.
    """
    from joblib import Parallel, cpu_count, delayed

    processes = min(processes or cpu_count(only_physical_cores=False), len(tasks))
    answers: list[Answer] = []
    if processes <= 1:
        for number, task in enumerate(tasks):
            answers.append(function(task, _part(progress, number, len(tasks))))
            progress((number + 1) / len(tasks))
        return answers
    workers = Parallel(n_jobs=processes, return_as="generator")
    for answer in workers(delayed(_alone)(function, task) for task in tasks):
        answers.append(answer)
        progress(len(answers) / len(tasks), f"{len(answers)} of {len(tasks)} trained")
    return answers


def _alone(function: Callable[[Task, Progress], Answer], task: Task) -> Answer:
    torch.set_num_threads(1)
    return function(task, silent)


def _part(progress: Progress, number: int, count: int) -> Progress:
    return lambda fraction, note="": progress((number + fraction) / count, note)
