"""Committed results: complete, of studies that exist, and of no particular machine."""

import json
import re
from pathlib import Path

import pytest

from fenchel_lab.report import Claim, find
from fenchel_lab.report.records import Job, Record

ROOT = Path(__file__).parent.parent.parent / "docs" / "results"
RESULTS = sorted(path.parent for path in ROOT.glob("*/result.json"))


@pytest.mark.parametrize("folder", RESULTS, ids=lambda folder: folder.name)
def test_a_result_is_whole_and_says_how_to_get_it_again(folder: Path) -> None:
    text = (folder / "result.json").read_text(encoding="utf-8")
    record = json.loads(text)
    study = find(folder.name)
    assert record["study"] == study.name
    assert record["data"] == list(study.data)
    where = "FENCHEL_DATA=… " if study.data else ""
    assert record["command"].startswith(f"{where}fenchel study run {study.name} --seed ")
    assert re.fullmatch("[0-9a-f]{40}", record["commit"]), "computed from a checkout with changes"
    assert not re.search(r"/(home|root|tmp|work|Users)/", text)
    kept = {"result.json", *(part["file"] for part in (*record["figures"], *record["tables"]))}
    assert kept == {path.name for path in folder.iterdir()} - {"runs"}


def test_the_page_has_the_claims_of_every_record() -> None:
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    for folder in RESULTS:
        record = json.loads((folder / "result.json").read_text(encoding="utf-8"))
        for claim in record.get("claims", ()):
            assert Claim(**claim).row in page, (folder.name, Claim(**claim).row)


def test_the_page_links_every_result() -> None:
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    assert set(re.findall(r"\]\((\w+)/result\.json\)", page)) == {folder.name for folder in RESULTS}


RUNS = sorted(ROOT.glob("*/runs/*"))


@pytest.mark.parametrize("folder", sorted({file.parent for file in RUNS}), ids=lambda folder: folder.parent.name)
def test_records_are_of_clean_checkouts_and_where_a_study_finds_them(folder: Path) -> None:
    assert find(folder.parent.name).records
    for file in folder.iterdir():
        record = Record.read(file)
        assert Job(record.cell, record.seed, record.settings, dict).name == file.name
        assert re.fullmatch("[0-9a-f]{40}", record.commit or ""), file
