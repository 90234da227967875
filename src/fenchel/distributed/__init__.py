"""Maps, losses, attention and memories over ``torch.distributed``: rows, sequences, patterns spread over ranks."""

from fenchel.distributed.context import attention
from fenchel.distributed.maps import entmax, entmax_loss
from fenchel.distributed.memory import ShardedMemory, ShardedRetrieval
from fenchel.distributed.output import linear_entmax_loss
from fenchel.distributed.rehearsal import Rehearsal, Transfer, rehearse

__all__ = [
    "Rehearsal",
    "ShardedMemory",
    "ShardedRetrieval",
    "Transfer",
    "attention",
    "entmax",
    "entmax_loss",
    "linear_entmax_loss",
    "rehearse",
]
