"""Collectives among the ranks of a process group. Nothing else in the package talks to other ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Group = Any
"""A ``torch.distributed.ProcessGroup``; None stands for the default group."""


def check_group(group: Group) -> int:
    """Check that the group can be used by this process; return the number of its ranks."""
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError(
            "torch.distributed must be initialized: start the program with torchrun and call "
            "torch.distributed.init_process_group() first"
        )
    size = dist.get_world_size(group)
    if size < 1:
        raise ValueError("group must be a process group that this rank belongs to")
    return size


@contextlib.contextmanager
def _explained(group: Group) -> Iterator[None]:
    """Say what it means that a collective fails: mostly that another rank has ended."""
    try:
        yield
    except RuntimeError as error:
        raise RuntimeError(
            f"rank {dist.get_rank(group)} of {dist.get_world_size(group)} cannot go on: another rank has ended, raised "
            f"an error, or did not take part within the timeout of the process group ({str(error).splitlines()[0]})"
        ) from error


def rank_in(group: Group) -> int:
    """The rank of this process in the group."""
    return dist.get_rank(group)


def all_max(tensor: Tensor, group: Group) -> Tensor:
    """The largest of all ranks' values, entry by entry; the tensor is overwritten. NaN must not occur."""
    with _explained(group):
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=group)
    return tensor


def all_sum(tensor: Tensor, group: Group) -> Tensor:
    """The sum of all ranks' values, entry by entry; the tensor is overwritten."""
    with _explained(group):
        dist.all_reduce(tensor, op=dist.ReduceOp.SUM, group=group)
    return tensor


def all_sizes(size: int, device: torch.device, group: Group) -> list[int]:
    """One number of every rank, in the order of the ranks."""
    sizes = torch.zeros(dist.get_world_size(group), dtype=torch.int64, device=device)
    sizes[rank_in(group)] = size
    return [int(each) for each in all_sum(sizes, group).tolist()]


def gather_rows(rows: Tensor, sizes: list[int], group: Group) -> Tensor:
    """All ranks' rows (n_r, …), one after another; ``sizes`` are the n_r. Parts are padded to the largest."""
    most = max(sizes)
    own = rows.contiguous()
    if len(own) < most:
        own = torch.cat([own, own.new_zeros(most - len(own), *own.shape[1:])])
    parts = [torch.empty_like(own) for _ in sizes]
    with _explained(group):
        dist.all_gather(parts, own, group=group)
    return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])


def send_around(tensors: list[Tensor], into: list[Tensor], group: Group) -> list[Any]:
    """Begin to send tensors to the next rank and to receive the previous rank's; return what to wait for."""
    size, rank = dist.get_world_size(group), rank_in(group)
    after, before = (_global(group, (rank + step) % size) for step in (1, -1))
    operations = [dist.P2POp(dist.isend, each.contiguous(), after, group) for each in tensors if each.numel()]
    operations += [dist.P2POp(dist.irecv, each, before, group) for each in into if each.numel()]
    return list(dist.batch_isend_irecv(operations)) if operations else []


def exchange(tensors: list[Tensor], into: list[Tensor], partner: int, group: Group) -> None:
    """Send tensors to one rank and receive its tensors."""
    other = _global(group, partner)
    operations = [dist.P2POp(dist.isend, each.contiguous(), other, group) for each in tensors if each.numel()]
    operations += [dist.P2POp(dist.irecv, each, other, group) for each in into if each.numel()]
    with _explained(group):
        for work in dist.batch_isend_irecv(operations) if operations else []:
            work.wait()


def broadcast(tensor: Tensor, rank: int, group: Group) -> Tensor:
    """The tensor of one rank, on all ranks; that of the others is overwritten."""
    with _explained(group):
        dist.broadcast(tensor, _global(group, rank), group=group)
    return tensor


def _global(group: Group, rank: int) -> int:
    return rank if group is None else dist.get_global_rank(group, rank)
