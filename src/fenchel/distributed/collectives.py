"""Collectives among the ranks of a process group. Nothing else in the package talks to other ranks."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Group = Any
"""A ``torch.distributed.ProcessGroup``, or one rank's :class:`Peers`; None stands for the default group."""

Wait = Callable[[], object]
"""Waits until tensors that are on their way have arrived."""


class Peers(ABC):
    """What a rank can do with the other ranks of its group. Tensors are overwritten by what arrives.

    Args:
        size: the number of ranks.
        rank: that of the caller.
    """

    size: int
    rank: int

    @abstractmethod
    def all_reduce(self, tensor: Tensor, largest: bool) -> None:
        """The largest of all ranks' values, or their sum, entry by entry."""

    @abstractmethod
    def all_gather(self, own: Tensor) -> Tensor:
        """The tensors of all ranks, of one shape, stacked; not to be written to."""

    @abstractmethod
    def broadcast(self, tensor: Tensor, source: int) -> None:
        """The tensor of one rank, on all ranks."""

    @abstractmethod
    def send(self, tensors: Sequence[Tensor], to: int, into: Sequence[Tensor], source: int) -> list[Wait]:
        """Begin to send tensors to one rank, and to receive as many of another."""

    def sum_rows(self, rows: Tensor, sizes: list[int]) -> Tensor:
        """The sum of all ranks' rows, of which this rank wants its own; ``sizes`` says how many each has."""
        first = sum(sizes[: self.rank])
        whole = rows.clone()
        self.all_reduce(whole, largest=False)
        return whole[first : first + sizes[self.rank]]


class _Processes(Peers):
    """The ranks of a process group."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.size, self.rank = dist.get_world_size(group), dist.get_rank(group)

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Say what it means that a collective fails: mostly that another rank has ended."""
        try:
            yield
        except RuntimeError as error:
            raise RuntimeError(
                f"rank {self.rank} of {self.size} cannot go on: another rank has ended, raised an error, or did not "
                f"take part within the timeout of the process group ({str(error).splitlines()[0]})"
            ) from error

    def all_reduce(self, tensor: Tensor, largest: bool) -> None:
        with self._explained():
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM, group=self.group)

    def all_gather(self, own: Tensor) -> Tensor:
        found = own.new_empty(self.size, *own.shape)
        with self._explained():
            dist.all_gather(list(found.unbind()), own, group=self.group)
        return found

    def broadcast(self, tensor: Tensor, source: int) -> None:
        with self._explained():
            dist.broadcast(tensor, self._global(source), group=self.group)

    def send(self, tensors: Sequence[Tensor], to: int, into: Sequence[Tensor], source: int) -> list[Wait]:
        to, source = self._global(to), self._global(source)
        operations = [dist.P2POp(dist.isend, each.contiguous(), to, self.group) for each in tensors if each.numel()]
        operations += [dist.P2POp(dist.irecv, each, source, self.group) for each in into if each.numel()]
        with self._explained():
            works = dist.batch_isend_irecv(operations) if operations else []
        return [lambda work=work: self._arrived(work) for work in works]  # type: ignore[misc]

    def _arrived(self, work: Any) -> None:
        with self._explained():
            work.wait()

    def sum_rows(self, rows: Tensor, sizes: list[int]) -> Tensor:
        if dist.get_backend(self.group) != "nccl" or len(set(sizes)) > 1:
            return super().sum_rows(rows, sizes)  # other back ends have no reduce-scatter of parts of different sizes
        own = torch.empty_like(rows[: sizes[self.rank]])
        with self._explained():
            dist.reduce_scatter_tensor(own, rows, group=self.group)
        return own

    def _global(self, rank: int) -> int:
        return rank if self.group is None else dist.get_global_rank(self.group, rank)


def _peers(group: Group) -> Peers:
    return group if isinstance(group, Peers) else _Processes(group)


def check_group(group: Group) -> int:
    """Check that the group can be used by this process; return the number of its ranks."""
    if isinstance(group, Peers):
        return group.size
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError(
            "torch.distributed must be initialized: start the program with torchrun and call "
            "torch.distributed.init_process_group() first"
        )
    size = dist.get_world_size(group)
    if size < 1:
        raise ValueError("group must be a process group that this rank belongs to")
    return size


def rank_in(group: Group) -> int:
    """The rank of the caller in the group."""
    return group.rank if isinstance(group, Peers) else dist.get_rank(group)


def all_max(tensor: Tensor, group: Group) -> Tensor:
    """The largest of all ranks' values, entry by entry; the tensor is overwritten. NaN must not occur."""
    _peers(group).all_reduce(tensor, largest=True)
    return tensor


def all_sum(tensor: Tensor, group: Group) -> Tensor:
    """The sum of all ranks' values, entry by entry; the tensor is overwritten."""
    _peers(group).all_reduce(tensor, largest=False)
    return tensor


def all_sizes(size: int, device: torch.device, group: Group) -> list[int]:
    """One number of every rank, in the order of the ranks."""
    peers = _peers(group)
    sizes = torch.zeros(peers.size, dtype=torch.int64, device=device)
    sizes[peers.rank] = size
    peers.all_reduce(sizes, largest=False)
    return [int(each) for each in sizes.tolist()]


def gather_rows(rows: Tensor, sizes: list[int], group: Group) -> Tensor:
    """All ranks' rows (n_r, …), one after another; ``sizes`` are the n_r. Parts are padded to the largest."""
    most = max(sizes)
    own = rows.contiguous()
    if len(own) < most:
        own = torch.cat([own, own.new_zeros(most - len(own), *own.shape[1:])])
    parts = _peers(group).all_gather(own)
    if min(sizes) == most:
        return parts.flatten(0, 1)
    return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])


def sum_rows(rows: Tensor, sizes: list[int], group: Group) -> Tensor:
    """This rank's rows of the sum of all ranks' rows (n, …); ``sizes`` says how many each rank has."""
    return _peers(group).sum_rows(rows, sizes)


def send_around(tensors: list[Tensor], into: list[Tensor], group: Group) -> list[Wait]:
    """Begin to send tensors to the next rank and to receive the previous rank's; return what to wait for."""
    peers = _peers(group)
    return peers.send(tensors, (peers.rank + 1) % peers.size, into, (peers.rank - 1) % peers.size)


def exchange(tensors: list[Tensor], into: list[Tensor], partner: int, group: Group) -> None:
    """Send tensors to one rank and receive its tensors."""
    for wait in _peers(group).send(tensors, partner, into, partner):
        wait()


def broadcast(tensor: Tensor, rank: int, group: Group) -> Tensor:
    """The tensor of one rank, on all ranks; that of the others is overwritten."""
    _peers(group).broadcast(tensor, rank)
    return tensor
