"""Where commands write: tried before the work, and never over files that another command or a user wrote."""

from __future__ import annotations

import errno
import tempfile
from collections.abc import Callable, Collection
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from fenchel.seq2seq import checkpoints, saving


def try_folder(folder: Path) -> None:
    """Raise an OSError of one line if no file can be written into a folder; leave nothing behind.

    Example:
        >>> try_folder(Path("/dev/null/report"))
        Traceback (most recent call last):
            ...
        OSError: /dev/null/report cannot be written: Not a directory
    """
    missing: list[Path] = []
    try:
        if folder.exists() and not folder.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, "Is a file and not a folder")
        missing = [each for each in (folder, *folder.parents) if not each.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise OSError(f"{folder} cannot be written: {error.strerror}") from None
    finally:
        for each in missing:
            if each.is_dir():
                each.rmdir()


def is_signed(path: Path, sign: str) -> bool:
    """Whether a file has a sign, the name of what wrote it, among its first bytes."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return sign.encode() in file.read(4096)


@dataclass(frozen=True)
class Output:
    """What a command writes into a folder, and how it recognises what it wrote there before.

    A folder without files is free; subfolders and hidden files do not matter. A folder with files is free if an earlier
    run of the same command wrote them, and no other file has a name that the command may use. With ``force`` every
    folder that can be written is free.

    Args:
        command: as a user types it, without options.
        names: patterns of the names of all files that it may write.
        written: the names of the files in a folder that an earlier run of the command wrote.
        shared: whether other files may be in the folder, as long as none of them would be overwritten.
    """

    command: str
    names: Collection[str]
    written: Callable[[Path], Collection[str]]
    shared: bool = False

    def claim(self, folder: Path, force: bool = False) -> None:
        """Raise an OSError of one line unless the folder is free; to be called before the work."""
        try_folder(folder)
        if not folder.is_dir():
            return
        places = [each for each in sorted(folder.iterdir()) if not each.name.startswith(".")]
        if blocked := [each for each in places if each.is_dir() and self._may_write(each.name)]:
            raise FileExistsError(f"{blocked[0]} is a folder, where `{self.command}` would write a file")
        there = [each.name for each in places if not each.is_dir()]
        if force or not there:
            return
        mine = set(self.written(folder)) & set(there)
        others = [name for name in there if name not in mine]
        if not mine and not self.shared:
            raise FileExistsError(
                f"{folder} has files that `{self.command}` did not write, such as {others[0]}: "
                "choose another folder, or add --force"
            )
        if strange := [name for name in others if self._may_write(name)]:
            raise FileExistsError(
                f"{folder / strange[0]} was not written by `{self.command}`, which may overwrite it: "
                "choose another place, or add --force"
            )

    def _may_write(self, name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in self.names)


MODEL = (saving.SETTINGS, saving.TENSORS, checkpoints.CHECKPOINT)
"""The files of a model and its checkpoint."""


def claim_model(folder: Path, command: str, kinds: Collection[str], force: bool) -> None:
    """Raise an OSError unless a command may train a model in a folder: see :class:`Output`.

    A model without a checkpoint was not written by a training that this one could go on with, so it counts as somebody
    else's.

    Args:
        folder: for the model and its checkpoint.
        command: that trains.
        kinds: of models that it trains.
        force: whether to remove a model and a checkpoint that are there, and begin anew.
    """

    def written(folder: Path) -> Collection[str]:
        file = folder / checkpoints.CHECKPOINT
        if not file.exists():
            return ()
        model = checkpoints.record(file).get("model")
        return MODEL if isinstance(model, dict) and model.get("model") in kinds else ()

    Output(command, MODEL, written).claim(folder, force)
    if force:
        for name in MODEL:
            (folder / name).unlink(missing_ok=True)
