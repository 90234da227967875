"""Folders of models: what comes back, and what is said of a folder that is none."""

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest
import torch

from fenchel import Tsallis
from fenchel.seq2seq import Recurrent, Seq2Seq, Transformer, Vocabulary, saving
from tampering import places, refusals, told_in_one_line
from watch import Largest

LETTERS = Vocabulary("abc")


def test_settings_and_tensors_come_back(tmp_path: Path) -> None:
    settings = {"format": saving.FORMAT, "model": "Model", "words": ["naïve", "日本"]}
    tensors = {"a": torch.randn(3, 4).mT, "b": torch.tensor([1, 2], dtype=torch.int64)}
    saving.save(tmp_path / "new" / "model", settings, tensors)
    saving.save(tmp_path / "new" / "model", settings, tensors)  # over what is there
    found, back = saving.load(tmp_path / "new" / "model")
    assert found == settings
    assert all(torch.equal(back[name], tensor) for name, tensor in tensors.items())
    assert {path.name for path in (tmp_path / "new" / "model").iterdir()} == {"model.json", "model.safetensors"}


def test_a_folder_without_a_model_or_of_another_format_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no model\.json"):
        saving.load(tmp_path)
    saving.save(tmp_path, {"format": saving.FORMAT + 1}, {"a": torch.zeros(1)})
    with pytest.raises(ValueError, match="of format 2; this version reads 1"):
        saving.load(tmp_path)


def test_what_to_install_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "safetensors.torch", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'fenchel\[seq2seq\]'"):
        saving.save(tmp_path, {"format": saving.FORMAT}, {"a": torch.zeros(1)})


# -- folders that were tampered with, or cut short -------------------------------------------------------------------


def recurrent() -> Recurrent:
    return Recurrent(
        LETTERS, LETTERS, embedding=4, hidden=6, layers=1, dropout=0.1, output=0.5 * Tsallis(1.5, learnable=True)
    )


def transformer() -> Transformer:
    alpha = Tsallis(1.5, learnable=True, shape=(2, 1, 1))
    return Transformer(LETTERS, LETTERS, width=4, num_heads=2, layers=1, inner=6, attention=alpha)


MODELS: dict[str, Callable[[], Seq2Seq]] = {"recurrent": recurrent, "transformer": transformer}


def refused(folder: Path) -> str | None:
    """The words of the error that a folder gives, on one line that names it; None if its model loads, and works."""
    try:
        model = Seq2Seq.load(folder)
    except (ValueError, FileNotFoundError) as error:
        return told_in_one_line(error, folder)
    with contextlib.suppress(ValueError):  # as a learned alpha of two heads where there are four
        model.step(torch.tensor([4]), model.start(["ab"]))
    return None


@pytest.mark.parametrize("name", MODELS)
def test_settings_that_are_missing_or_strange_are_told_in_one_line(name: str, tmp_path: Path) -> None:
    MODELS[name]().save(tmp_path)
    whole, told = refusals(tmp_path, refused)
    for path in places(whole):
        if path[0] == "sizes" and "dropout" not in path[-1]:
            assert told[path, "1000000000"], path
        if isinstance(path[-1], str) and path[0] != "words":  # a default may not be what was saved
            assert told[path, "'missing'"], path


@pytest.mark.parametrize("name", MODELS)
def test_tensors_that_are_missing_or_do_not_fit_are_told_in_one_line(name: str, tmp_path: Path) -> None:
    model = MODELS[name]()
    settings, whole = model.settings(), model.state_dict()
    for number, (key, tensor) in enumerate(whole.items()):
        nan, infinite = tensor.clone(), tensor.clone()
        nan.view(-1)[-1], infinite.view(-1)[0] = torch.nan, torch.inf
        strange = [
            None,
            nan,
            infinite,
            tensor.new_zeros(()) if tensor.dim() else tensor.new_zeros(2),
            tensor.new_zeros(0),
            torch.cat([tensor.reshape(-1), tensor.reshape(-1)]),
            tensor.double(),
            tensor.long(),
            tensor.bool(),
            tensor.to(torch.complex64),
        ]
        for each in strange if number < 2 else [strange[number % len(strange)]]:
            tensors = {**whole, key: each} if each is not None else {k: v for k, v in whole.items() if k != key}
            saving.save(tmp_path, settings, tensors)
            assert refused(tmp_path), (key, each)
    saving.save(tmp_path, settings, {**whole, "another": torch.zeros(1)})
    assert "'another'" in str(refused(tmp_path))
    saving.save(tmp_path, settings, {key: tensor.double() for key, tensor in whole.items()})
    assert refused(tmp_path) is None  # all in another precision are whole


def test_files_that_are_cut_short_junk_or_no_files_are_told_in_one_line(tmp_path: Path) -> None:
    random = Random(0)
    recurrent().save(tmp_path)
    for name in ("model.json", "model.safetensors"):
        whole = (tmp_path / name).read_bytes()
        cuts = [whole[: len(whole) * part // 8] for part in range(8)] + [whole[:-1] if name[-1] == "s" else whole[:-3]]
        junk = [random.randbytes(200), b"\x00" * 64, b"\xff" * 64, b"[" * 100_000, b"{}", b"1" * 9000]
        junk += ["{}".encode("utf-16"), b'{"format": 1, "model": "caf\xe9"}', (2**62).to_bytes(8, "little") + b"{}"]
        junk += [b'{"a":' * 100_000, b'{"format": "1"}', b'{"format": 2}', b'{"format": true}', b"null", b'"text"']
        for content in (*cuts, *junk):
            (tmp_path / name).write_bytes(content)
            assert refused(tmp_path), (name, content[:40])
        (tmp_path / name).unlink()
        with pytest.raises(FileNotFoundError, match=f"has no {name}"):
            Seq2Seq.load(tmp_path)
        (tmp_path / name).symlink_to(tmp_path / "nowhere")
        with pytest.raises(FileNotFoundError, match=f"has no {name}"):
            Seq2Seq.load(tmp_path)
        (tmp_path / name).unlink()
        (tmp_path / name).mkdir()
        with pytest.raises(FileNotFoundError, match=f"has no {name}"):
            Seq2Seq.load(tmp_path)
        (tmp_path / name).rmdir()
        (tmp_path / name).write_bytes(whole)
    assert refused(tmp_path) is None


@pytest.mark.parametrize(("name", "size"), [("recurrent", "hidden"), ("transformer", "inner")])
def test_sizes_that_the_file_does_not_have_take_no_memory(name: str, size: str, tmp_path: Path) -> None:
    MODELS[name]().save(tmp_path)
    settings = json.loads((tmp_path / "model.json").read_text(encoding="utf-8"))
    numbers = sum(tensor.numel() for tensor in saving.load(tmp_path)[1].values())
    settings["sizes"][size] = 2 * (numbers // 2)  # as many as a width can have at most, of which the square is built
    (tmp_path / "model.json").write_text(json.dumps(settings), encoding="utf-8")
    with Largest() as largest:
        assert refused(tmp_path)
    assert 0 < largest.elements <= 4 * numbers  # a file of float32 is read as bytes


def test_folders_call_the_number_of_heads_heads_as_they_always_did(tmp_path: Path) -> None:
    model = transformer().eval()
    model.save(tmp_path)
    written = json.loads((tmp_path / saving.SETTINGS).read_text())["sizes"]
    assert written == {"width": 4, "heads": 2, "layers": 1, "inner": 6, "dropout": 0.1}
    loaded = Transformer.load(tmp_path)
    assert loaded.num_heads == 2
    assert torch.equal(loaded.attend("ab", "ab"), model.attend("ab", "ab"))
