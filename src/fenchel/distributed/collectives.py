"""Collectives among the ranks of a process group. Nothing else in the package talks to other ranks."""

from __future__ import annotations

import contextlib
import json
import os
import re
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

Group = Any
"""A ``torch.distributed.ProcessGroup``, or one rank's :class:`Peers`; None stands for the default group."""

CHECKS = "FENCHEL_CHECK_RANKS"
"""The environment variable that, set to 1 on all ranks, has them compare their arguments in every call."""

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
                f"take part within the timeout of the process group ({str(error).splitlines()[0]}). If the ranks' "
                f"arguments may differ in shape or value, {CHECKS}=1 on all ranks names the one that does"
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
    # What new_group returns on ranks outside of the group is no group, and has the size −1.
    if not (group is None or isinstance(group, dist.ProcessGroup) or group == dist.GroupMember.NON_GROUP_MEMBER):
        raise TypeError(
            "group must be a torch.distributed.ProcessGroup, the group that rehearse gives, or None for the default "
            f"group, got {group!r}"
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


def all_sizes(
    numbers: Sequence[int], device: torch.device, group: Group, same: Mapping[str, Any] | None = None
) -> list[list[int]]:
    """For each of this rank's numbers those of all ranks, in the order of the ranks, by one all-reduce.

    Args:
        numbers: integers, as many on all ranks.
        device: where the group's tensors are.
        group: the process group.
        same: arguments, by name, that must be equal on all ranks. What :func:`described` says of them is compared along
            the way; if it differs, all ranks raise a ValueError that names the argument.
    """
    peers = _peers(group)
    texts = json.dumps({name: described(value) for name, value in (same or {}).items()})
    found = torch.zeros(len(numbers) + 1, peers.size, dtype=torch.int64, device=device)
    found[:, peers.rank] = torch.tensor([*numbers, zlib.crc32(texts.encode())], device=device)
    peers.all_reduce(found, largest=False)
    *every, digests = found.tolist()
    if len(set(digests)) > 1:
        given = [json.loads(each) for each in _all_texts(texts, device, group)]
        for name in given[0]:
            values = [each.get(name) for each in given]
            firsts = sorted(values.index(value) for value in set(values))[:4]
            if len(firsts) > 1:
                shown = ", ".join(f"{values[rank]} on rank {rank}" for rank in firsts)
                raise ValueError(f"{name} must be equal on all ranks, got {shown}")
        raise ValueError(f"all ranks must call one function, got the arguments {given}")
    return every


def _all_texts(text: str, device: torch.device, group: Group) -> list[str]:
    """The texts of all ranks."""
    own = torch.tensor(list(text.encode()), dtype=torch.uint8, device=device)
    (sizes,) = all_sizes([len(own)], device, group)
    letters = bytes(gather_rows(own, sizes, group).tolist())
    ends = list(accumulate(sizes))
    return [letters[end - size : end].decode() for size, end in zip(sizes, ends, strict=True)]


def checks_ranks() -> bool:
    """Whether ranks compare their arguments in every call, as the environment asks for."""
    return os.environ.get(CHECKS, "") not in ("", "0")


def check_same(device: torch.device, group: Group, same: Mapping[str, Any]) -> None:
    """Under ``FENCHEL_CHECK_RANKS=1`` compare arguments that must be equal on all ranks, by one all-reduce."""
    if checks_ranks():
        all_sizes([], device, group, same)


def raise_together(error: Exception | None, device: torch.device, group: Group) -> None:
    """Raise this rank's error, if there is one; on other ranks a ValueError that says what the first of them is."""
    (failed,) = all_sizes([error is not None], device, group)
    if not any(failed):
        return
    texts = _all_texts(str(error), device, group)
    if error is not None:
        raise error
    raise ValueError(f"on rank {failed.index(1)}: {texts[failed.index(1)]}")


def layout(tensor: Tensor, spread: int) -> str:
    """What must be equal on all ranks of a tensor that is spread along a dimension, which stands as "…"."""
    sizes = [str(size) for size in tensor.shape]
    sizes[spread] = "…"
    learns = ", requires grad" if checks_ranks() and torch.is_grad_enabled() and tensor.requires_grad else ""
    return f"shape ({', '.join(sizes)}), {tensor.dtype}{learns}"


def described(value: Any) -> str:
    """An argument as text to compare among ranks: of tensors shape and dtype; if ranks are checked, values too."""
    if isinstance(value, str):
        return value
    if isinstance(value, nn.Module):
        tensors = {**dict(value.named_parameters()), **dict(value.named_buffers())}
        held = "".join(f", {name}: {described(tensor)}" for name, tensor in tensors.items())
        return re.sub(r" at 0x[0-9a-f]+", "", repr(value)) + held  # addresses differ between processes
    if not isinstance(value, Tensor):
        return repr(value)
    text = f"shape {tuple(value.shape)}, {value.dtype}"
    if not checks_ranks():
        return text
    flat = value.detach().reshape(-1).cpu().contiguous()
    some = ", ".join(str(each) for each in flat[:8].tolist())
    checksum = zlib.crc32(flat.view(torch.uint8).numpy().tobytes())
    learns = ", requires grad" if torch.is_grad_enabled() and value.requires_grad else ""
    return f"{text}, [{some}{', …' if len(flat) > 8 else ''}] (checksum {checksum:08x}){learns}"


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
