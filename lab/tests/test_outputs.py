"""Where commands write: tried before the work, free only if nothing of others is overwritten."""

from pathlib import Path

import pytest

from fenchel_lab.outputs import Output, is_signed, try_folder


def listed(folder: Path) -> list[str]:
    """The files that a list in the folder names."""
    return (folder / "list").read_text(encoding="utf-8").split() if (folder / "list").is_file() else []


OUTPUT = Output("fenchel example", ["list", "part-*.txt"], listed)


def test_trying_a_folder_leaves_nothing_behind(tmp_path: Path) -> None:
    try_folder(tmp_path / "a" / "b")
    try_folder(tmp_path)
    assert not any(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_is_told_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file", encoding="utf-8")
    (tmp_path / "nowhere").symlink_to(tmp_path / "absent")
    for folder in (
        tmp_path / "taken",
        tmp_path / "taken" / "below" / "it",
        tmp_path / "nowhere",
        tmp_path / ("long" * 100),
        tmp_path / ("long" * 100) / "below",
    ):
        with pytest.raises(OSError, match=f"^{folder} cannot be written: [A-Za-z ]+$"):
            OUTPUT.claim(folder, force=True)


def test_a_folder_is_free_if_it_has_no_files_or_those_of_the_same_command(tmp_path: Path) -> None:
    OUTPUT.claim(tmp_path)
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "part-1.txt").touch()
    (tmp_path / ".hidden").touch()
    OUTPUT.claim(tmp_path)
    (tmp_path / "list").write_text("list part-1.txt", encoding="utf-8")
    (tmp_path / "part-1.txt").touch()
    (tmp_path / "notes.txt").touch()  # added by its user later: nothing would touch it
    OUTPUT.claim(tmp_path)


@pytest.mark.parametrize("name", ["notes.txt", "part-1.txt", "list"])
def test_a_folder_with_files_of_others_is_refused_unless_forced(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("mine", encoding="utf-8")
    with pytest.raises(FileExistsError, match=f"`fenchel example` did not write, such as {name}: .* --force"):
        OUTPUT.claim(tmp_path)
    OUTPUT.claim(tmp_path, force=True)
    assert (tmp_path / name).read_text(encoding="utf-8") == "mine"


def test_a_file_that_was_added_under_a_name_of_the_command_is_refused(tmp_path: Path) -> None:
    (tmp_path / "list").write_text("list part-1.txt", encoding="utf-8")
    (tmp_path / "part-7.txt").touch()
    with pytest.raises(FileExistsError, match=r"part-7\.txt was not written by `fenchel example`"):
        OUTPUT.claim(tmp_path)


def test_a_shared_folder_may_have_any_other_files(tmp_path: Path) -> None:
    shared = Output("fenchel example", ["part-*.txt"], listed, shared=True)
    (tmp_path / "notes.txt").touch()
    shared.claim(tmp_path)
    (tmp_path / "part-2.txt").touch()
    with pytest.raises(FileExistsError, match=r"part-2\.txt was not written"):
        shared.claim(tmp_path)


def test_a_folder_in_the_place_of_a_file_is_refused_even_if_forced(tmp_path: Path) -> None:
    (tmp_path / "list").mkdir()
    with pytest.raises(FileExistsError, match="is a folder, where `fenchel example` would write a file"):
        OUTPUT.claim(tmp_path, force=True)


def test_a_sign_is_looked_for_at_the_beginning(tmp_path: Path) -> None:
    (tmp_path / "signed").write_bytes(b"\x89 by fenchel example")
    (tmp_path / "other").write_bytes(b"\x00" * 9000 + b"fenchel example")
    assert is_signed(tmp_path / "signed", "fenchel example")
    assert not is_signed(tmp_path / "other", "fenchel example")
    assert not is_signed(tmp_path / "absent", "fenchel example")
