"""Maps, losses, attention and memories over ``torch.distributed``: rows, sequences, patterns spread over ranks."""

from fenchel.distributed.maps import entmax, entmax_loss
from fenchel.distributed.output import linear_entmax_loss

__all__ = ["entmax", "entmax_loss", "linear_entmax_loss"]
