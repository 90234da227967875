"""Where a data set lies: a local folder first, then the cache that `fetch` fills. Nothing is downloaded unasked."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import io
import os
import tempfile
import urllib.error
import urllib.request
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from fenchel.progress import Progress, silent

VARIABLE = "FENCHEL_DATA"
"""The environment variable that names the local folder: one folder per set, files as `fenchel data list` names them."""

CACHE_VARIABLE = "FENCHEL_CACHE"
"""The environment variable that names the cache, where downloads go; by default in the user's cache folder."""

TIMEOUT = 60
CHUNK = 1 << 16


class MissingDataError(FileNotFoundError):
    """A file of a data set is in no folder."""


class BrokenDataError(ValueError):
    """A file of a data set is there, and is not what it should be."""


@dataclass(frozen=True)
class Source:
    """A file of a data set, and where it comes from.

    Args:
        name: in the folder of its set; ``name.gz`` does as well.
        url: of the file, gzipped or not, or of the zip archive that has it as ``member``; empty if there is none.
        member: the file's path in that archive.
        sha256: of its content, unpacked: packing the same content again changes the file, not this. Empty where the
            address keeps no promise of equal bytes; then ``check`` decides.
        check: raises ValueError if the content is not what it should be.
    """

    name: str
    url: str = ""
    member: str = ""
    sha256: str = ""
    check: Callable[[bytes], object] | None = None

    def verify(self, content: bytes) -> None:
        """Raise BrokenDataError unless the content is the right one."""
        if self.sha256:
            found = hashlib.sha256(content).hexdigest()
            if found != self.sha256:
                raise BrokenDataError(f"{self.name}: the content has sha256 {found}, not {self.sha256}")
        if self.check is not None:
            with explained(self.name):
                self.check(content)


@dataclass(frozen=True)
class DataSet:
    """A data set: its files, and how else to get them.

    Args:
        name: of its folder.
        title: what it is, in a line.
        licence: what may be done with it.
        sources: its files.
        ways: where a user finds it, for what cannot be fetched.
        repacked: files of other names and formats with the same content, read as well and never fetched.
    """

    name: str
    title: str
    licence: str
    sources: Sequence[Source]
    ways: str = ""
    repacked: Sequence[Source] = ()

    def source(self, name: str) -> Source:
        """The file called ``name``."""
        for each in (*self.sources, *self.repacked):
            if each.name == name:
                return each
        raise LookupError(f"{self.name} has no file {name!r}; it has {', '.join(each.name for each in self.sources)}")


def local() -> Path | None:
    """The folder that ``$FENCHEL_DATA`` names, if it does."""
    folder = os.environ.get(VARIABLE)
    return Path(folder) if folder else None


def cache() -> Path:
    """The folder that downloads go to: ``$FENCHEL_CACHE``, or ``fenchel`` in the user's cache folder."""
    if folder := os.environ.get(CACHE_VARIABLE):
        return Path(folder)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fenchel" / "data"


def folders(folder: Path | None = None) -> list[Path]:
    """Where files are looked for, in this order: ``folder`` or ``$FENCHEL_DATA``, then the cache."""
    first = folder or local()
    return [cache()] if first is None else [first, cache()]


def locate(data: DataSet, name: str, folder: Path | None = None) -> Path:
    """The path of a file of a set, packed or not.

    Args:
        data: the set.
        name: the file.
        folder: where to look first. Default: ``$FENCHEL_DATA``.

    Raises:
        MissingDataError: it is nowhere; the message says where it was looked for and how to get it.
    """
    source = data.source(name)
    for place in folders(folder):
        for candidate in (place / data.name / name, place / data.name / f"{name}.gz"):
            if candidate.is_file():
                return candidate
    looked = " and ".join(str(place / data.name) for place in folders(folder))
    ways = [f"`fenchel data fetch {data.name}` downloads it from {source.url}"] if source.url else []
    ways += [data.ways] if data.ways else []
    ways += [f"with a copy of your own, name the folder that holds {data.name}/{name} in ${VARIABLE}"]
    raise MissingDataError(
        f"{data.title}: {name} (or {name}.gz) is missing; looked in {looked}. To get it: {'; or '.join(ways)}."
    )


def read(data: DataSet, name: str, folder: Path | None = None) -> bytes:
    """The content of a file of a set, unpacked."""
    path = locate(data, name, folder)
    content = path.read_bytes()
    if path.name == name:
        return content
    with explained(path.name):
        return gzip.decompress(content)


def present(data: DataSet, folder: Path | None = None) -> list[Path]:
    """The files of a set that are there."""
    paths = []
    for source in (*data.sources, *data.repacked):
        with contextlib.suppress(MissingDataError):
            paths.append(locate(data, source.name, folder))
    return paths


def count_of(parse: Callable[[str], Iterable[object]], count: int, what: str) -> Callable[[bytes], None]:
    """A check that a file of text holds so many entries."""

    def check(content: bytes) -> None:
        found = sum(1 for _ in parse(content.decode("utf-8")))
        if found != count:
            raise ValueError(f"{found} {what}, not {count}")

    return check


def fetch(
    data: DataSet, folder: Path | None = None, progress: Progress = silent, names: Sequence[str] | None = None
) -> list[Path]:
    """Download the files of a set that are not there yet, and keep those that pass their check.

    Args:
        data: the set.
        folder: where to; default: the cache.
        progress: called as bytes arrive.
        names: which files; default: all.

    Returns:
        The new files.

    Raises:
        MissingDataError: a file has no address; the message says how else to get it.
        BrokenDataError: what arrived is not what it should be; nothing is kept.
        OSError: there is no way to the server.
    """
    into = (folder or cache()) / data.name
    chosen = [source for source in data.sources if names is None or source.name in names]
    fetched = []
    url, archive = "", b""
    for number, source in enumerate(chosen):
        if any((into / name).is_file() for name in (source.name, f"{source.name}.gz")):
            continue
        if not source.url:
            locate(data, source.name, folder)  # its message says how to get it by hand
            continue
        if source.url != url:  # files of one archive stand side by side
            tell = partial(_tell, progress, number, len(chosen), source.name)
            url, archive = source.url, _download(source.url, tell)
        content, packed = _unpack(source, archive)
        source.verify(content)
        fetched.append(_keep(into / (f"{source.name}.gz" if packed else source.name), packed or content))
    return fetched


@contextlib.contextmanager
def explained(name: str) -> Iterator[None]:
    """Within it, what goes wrong in reading bytes is told as a BrokenDataError of the file ``name``."""
    try:
        yield
    except BrokenDataError:
        raise
    except (ValueError, LookupError, EOFError, OSError, zlib.error, zipfile.BadZipFile) as error:
        raise BrokenDataError(f"{name} is damaged or not what its name says: {error}") from error


def _unpack(source: Source, content: bytes) -> tuple[bytes, bytes]:
    """The file's content; and the packed file, if it is kept packed."""
    with explained(source.url):
        if source.member:
            with zipfile.ZipFile(io.BytesIO(content)) as archive:
                return archive.read(source.member), b""
        if source.url.endswith(".gz") and not source.name.endswith(".gz"):
            return gzip.decompress(content), content
    return content, b""


def _tell(progress: Progress, done: int, files: int, name: str, part: float) -> None:
    progress((done + part) / files, name)


def _download(url: str, progress: Callable[[float], None]) -> bytes:
    request = urllib.request.Request(url, headers={"User-Agent": "fenchel"})
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT) as answer:
            size, parts, got = int(answer.headers.get("Content-Length") or 0), [], 0
            while part := answer.read(CHUNK):
                parts.append(part)
                got += len(part)
                progress(got / size if size else 0.0)
    except urllib.error.URLError as error:
        raise OSError(f"could not download {url}: {error}") from error
    return b"".join(parts)


def _keep(path: Path, content: bytes) -> Path:
    """Write a file that is whole or not there, however the writing ends."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=".")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    return path
