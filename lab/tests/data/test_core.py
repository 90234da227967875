"""Where data lies, and how it gets there: local first, whole or not at all, and clear words for what is missing."""

import gzip
import hashlib
import io
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from fenchel_lab import data
from fenchel_lab.data import BrokenDataError, DataSet, MissingDataError, Source, core

CONTENT = b"some content"


@pytest.fixture(autouse=True)
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(data.VARIABLE, raising=False)
    monkeypatch.setenv(data.CACHE_VARIABLE, str(tmp_path / "cache"))


def placed(folder: Path, name: str, content: bytes) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(content)
    return folder / name


def set_of(*sources: Source, **fields: object) -> DataSet:
    return DataSet("small", "A small set", "free", sources, **fields)


def right(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def test_importing_touches_no_network() -> None:
    code = """
import socket
socket.socket.connect = None
import fenchel_lab.data
assert len(fenchel_lab.data.SETS) >= 6
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_argument_comes_before_the_environment_and_this_before_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = set_of(Source("file"))
    placed(tmp_path / "cache" / "small", "file", b"cache")
    assert data.read(small, "file") == b"cache"
    monkeypatch.setenv(data.VARIABLE, str(tmp_path / "local"))
    assert data.read(small, "file") == b"cache"
    placed(tmp_path / "local" / "small", "file.gz", gzip.compress(b"local"))
    assert data.read(small, "file") == b"local"
    placed(tmp_path / "argument" / "small", "file", b"argument")
    assert data.read(small, "file", tmp_path / "argument") == b"argument"


def test_what_is_missing_is_told_with_every_way_to_get_it(tmp_path: Path) -> None:
    small = set_of(Source("file", "https://example.org/file"), ways="ask somebody")
    with pytest.raises(MissingDataError) as caught:
        data.read(small, "file", tmp_path / "mine")
    for words in (
        "file (or file.gz) is missing",
        str(tmp_path / "mine" / "small"),
        str(tmp_path / "cache" / "small"),
        "`fenchel data fetch small` downloads it from https://example.org/file",
        "ask somebody",
        "$FENCHEL_DATA",
    ):
        assert words in str(caught.value)


def test_a_file_that_a_set_does_not_have_is_named() -> None:
    with pytest.raises(LookupError, match="small has no file 'other'; it has file"):
        data.locate(set_of(Source("file")), "other")


def test_a_damaged_packed_file_is_told(tmp_path: Path) -> None:
    packed = gzip.compress(CONTENT * 100)
    for damaged in (packed[:-9], b"not packed", packed[:20] + b"\0\0\0\0" + packed[24:]):
        placed(tmp_path / "cache" / "small", "file.gz", damaged)
        with pytest.raises(BrokenDataError, match=r"file\.gz is damaged"):
            data.read(set_of(Source("file")), "file")


def test_fetch_keeps_checked_files_and_fetches_none_twice(tmp_path: Path) -> None:
    there = placed(tmp_path / "web", "file.gz", gzip.compress(CONTENT))
    told: list[tuple[float, str]] = []
    small = set_of(Source("file", there.as_uri(), sha256=right(CONTENT)))
    [path] = data.fetch(small, progress=lambda fraction, note="": told.append((fraction, note)))
    assert path == tmp_path / "cache" / "small" / "file.gz"
    assert data.read(small, "file") == CONTENT
    assert told[-1] == (1.0, "file")
    there.unlink()
    assert data.fetch(small) == []
    assert data.present(small) == [path]


def test_fetch_takes_members_out_of_an_archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("folder/inside", CONTENT)
    url = placed(tmp_path / "web", "all.zip", archive.getvalue()).as_uri()
    data.fetch(set_of(Source("file", url, member="folder/inside")), tmp_path / "mine")
    assert (tmp_path / "mine" / "small" / "file").read_bytes() == CONTENT
    both = set_of(Source("one", url, member="folder/inside"), Source("two", url, member="folder/inside"))
    asked: list[str] = []
    monkeypatch.setattr(core, "_download", lambda url, tell: asked.append(url) or archive.getvalue())
    assert len(data.fetch(both, tmp_path / "mine")) == 2
    assert asked == [url]
    with pytest.raises(BrokenDataError, match=r"all\.zip is damaged.*absent"):
        data.fetch(set_of(Source("other", url, member="absent")), tmp_path / "mine")


def refuse(content: bytes) -> None:
    raise ValueError("too short")


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ({"sha256": right(b"else")}, f"sha256 {right(CONTENT)}, not {right(b'else')}"),
        ({"check": refuse}, "too short"),
        ({"member": "file"}, "damaged"),
    ],
)
def test_fetch_keeps_nothing_that_fails_its_check(source: dict[str, object], words: str, tmp_path: Path) -> None:
    there = placed(tmp_path / "web", "file", CONTENT)
    with pytest.raises(BrokenDataError, match=words):
        data.fetch(set_of(Source("file", there.as_uri(), **source)))
    assert not list((tmp_path / "cache").rglob("*"))


def test_fetch_tells_how_to_get_what_has_no_address() -> None:
    with pytest.raises(MissingDataError, match="ask somebody"):
        data.fetch(set_of(Source("file"), ways="ask somebody"))


def test_a_write_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there = placed(tmp_path / "web", "file", CONTENT)

    def fail(self: Path, target: Path) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(core.Path, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        data.fetch(set_of(Source("file", there.as_uri())))
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]


def test_every_address_is_https_and_every_download_is_checked() -> None:
    for each in data.SETS.values():
        assert each.licence
        for source in each.sources:
            assert source.url.startswith("https://") or (not source.url and each.ways)
            assert source.sha256 or source.check or not source.url
