"""The machine: named as the system names it, with the versions that ran."""

import importlib.metadata
import os
from pathlib import Path

import pytest
import torch

from fenchel_lab.bench import machine
from fenchel_lab.report.origin import cpu_model


def test_the_processor_is_named_by_the_system(tmp_path: Path) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text("processor\t: 0\nmodel\t\t: 1\nmodel name\t: Abacus (TM) 9 @ 3 Hz\nmodel name\t: B\n")
    assert cpu_model(info) == "Abacus (TM) 9 @ 3 Hz"
    info.write_text("Hardware : unnamed\n")
    assert cpu_model(info)
    assert cpu_model(tmp_path / "absent")


def test_versions_threads_and_switch_are_those_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    here = machine()
    assert here.torch == str(torch.__version__)
    assert here.fenchel == importlib.metadata.version("fenchel")
    assert here.torch_threads == torch.get_num_threads()
    assert here.cores == os.cpu_count()
    assert here.kernels == ("off" if os.environ.get("FENCHEL_KERNELS") == "off" else "on")
    monkeypatch.setenv("FENCHEL_KERNELS", "off")
    assert machine().kernels == "off"


def test_an_absent_peer_has_no_version(monkeypatch: pytest.MonkeyPatch) -> None:
    known = importlib.metadata.version

    def version(package: str) -> str:
        if package == "entmax":
            raise importlib.metadata.PackageNotFoundError(package)
        return known(package)

    monkeypatch.setattr(importlib.metadata, "version", version)
    here = machine()
    assert here.entmax is None
    assert "entmax" not in str(here)
