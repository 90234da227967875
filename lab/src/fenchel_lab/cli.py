"""`fenchel`: the tour, one study at a time, data, models that inflect and that highlight, the benchmark, kernels."""

from __future__ import annotations

import itertools
import math
import re
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich import box, progress
from rich.markup import escape
from rich.table import Table

import fenchel
from fenchel_lab import bench, data, inflect, rationalize, report
from fenchel_lab.outputs import try_folder
from fenchel_lab.report import page
from fenchel_lab.report.origin import version
from fenchel_lab.report.records import Records
from fenchel_lab.report.result import show
from fenchel_lab.report.runs import output
from fenchel_lab.terminal import Force, WholeBar, console, errors, follow, interruption, progress_bars, refusal

app = typer.Typer(no_args_is_help=True, add_completion=False, rich_markup_mode="rich", pretty_exceptions_enable=False)
study = typer.Typer(no_args_is_help=True)
app.add_typer(study, name="study", help="One study: a figure or a table of a paper, computed again.")
data_sets = typer.Typer(no_args_is_help=True)
app.add_typer(data_sets, name="data", help="Real data for the studies: which sets, where they lie, how to get them.")
app.add_typer(inflect.app, name="inflect", help="Inflect words: train a sparse model on a table, ask it, look inside.")
app.add_typer(rationalize.app, name="rationale", help="Class texts of your own, and highlight the words that decided.")


Seed = Annotated[int, typer.Option(help="Seed of everything random.")]


def _version(asked: bool) -> None:
    if asked:
        print(f"fenchel {version()}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and leave.")
    ] = False,
) -> None:
    """Sparse, differentiable choices: what you reach for instead of softmax.

    The library is `import fenchel`. This command shows what it does: a study
    computes a figure or a table of a paper and puts the paper's beside it.

    [bold]Start here[/bold]

    [cyan]fenchel tour[/cyan]                    all studies; then read report/index.html

    [cyan]fenchel study list[/cyan]              which there are, and what they show

    [cyan]fenchel study run paths[/cyan]         one of them: pictures, tables, a record

    [cyan]fenchel study run paths --help[/cyan]  its options: data, seed, folder, long protocol

    [cyan]fenchel data list[/cyan]               real data for the studies, and how to get it

    [cyan]fenchel inflect --help[/cyan]          forms of words, by a model that you train on a table

    [cyan]fenchel rationale --help[/cyan]        class texts of your own, and highlight the words that decided

    [cyan]fenchel bench[/cyan]                   how fast it is here, beside torch and other packages

    [cyan]fenchel warmup[/cyan]                  compile the kernels now, not at their first use
    """


NEXT = """
Three things to try next:
  python -c "import torch, fenchel; print(fenchel.sparsemax(torch.tensor([2.0, 1.0, -1.0])))"   the library, in one line
  fenchel study run basins --seed 1     one chapter: its figures as PNG, its tables as CSV
  fenchel inflect --help                train a model that inflects words, and ask it"""
"""What the tour ends with."""


@app.command()
def tour(
    out: Annotated[Path, typer.Option(help="Folder for index.html.")] = Path("report"),
    seed: Seed = 0,
    force: Force = False,
) -> None:
    """Run every study on embedded data and write the report, one page that needs nothing else.

    Interrupted, the report has the chapters that are done.
    """
    runs: list[report.Run] = []
    toured = [each for each in report.studies() if each.tour]
    interrupted = False
    with _refused():
        page.OUTPUT.claim(out, force)
    try:
        with progress_bars() as bars:
            _tour(toured, seed, bars, runs)
    except KeyboardInterrupt:
        interrupted = True
    if runs or not interrupted:
        with _refused():
            index = page.write(runs, out, len(toured))
        console.print(f"Wrote {index}: open it in a browser, or on a phone.", markup=False, soft_wrap=True)
    if not interrupted:
        console.print(NEXT, markup=False, highlight=False, soft_wrap=True)
    for run in runs:
        _explain(run.study.name, run.error)
    if interrupted:
        raise interruption(f"{len(runs)} of {len(toured)} chapters are done.")
    if any(run.error for run in runs):
        raise typer.Exit(1)


def _tour(toured: list[report.Study], seed: int, bars: progress.Progress, runs: list[report.Run]) -> None:
    """Run the chapters of the tour, and add each run to a list once it is done."""
    whole = bars.add_task("[bold]The tour[/bold]", total=float(len(toured)), note=f"0 of {len(toured)} chapters")
    for number, chapter in enumerate(toured):
        task = bars.add_task(escape(chapter.title), total=1.0, note="")
        shown = WholeBar(bars, task, whole, number)
        runs.append(report.run(chapter, report.Context(data=None, seed=seed, progress=shown)))
        bars.update(whole, completed=number + 1, note=f"{number + 1} of {len(toured)} chapters")
        if runs[-1].error:
            bars.update(task, note="[red]failed[/red]")
            bars.stop_task(task)
        else:
            bars.update(task, completed=1.0, note="")


@study.command("list")
def list_studies() -> None:
    """List the studies in the order of the tour."""
    table = Table("name", "what it shows", "after", box=None, header_style="bold", pad_edge=False)
    for each in report.studies():
        table.add_row(f"[cyan]{each.name}[/cyan]", each.title, each.source)
    console.print(table)


@study.command("run")
def run_study(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="As `fenchel study list` shows it.")],
    folder: Annotated[
        Path | None,
        typer.Option(
            "--data",
            help="Folder of real data; without it, the embedded sample.",
            envvar=data.VARIABLE,
            exists=True,
            file_okay=False,
        ),
    ] = None,
    seed: Seed = 0,
    out: Annotated[Path | None, typer.Option(help="Folder for the results; report/NAME if not given.")] = None,
    full: Annotated[
        bool, typer.Option("--full", help="The longest protocol; the study's text says what differs from the paper.")
    ] = False,
    checkpoints: Annotated[
        Path | None, typer.Option(help="Folder for checkpoints, from which the study resumes if it was interrupted.")
    ] = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Forget all finished runs that are recorded in OUT/runs.")
    ] = False,
    minutes: Annotated[
        float, typer.Option(help="Begin no run later than this; the results are those of the finished runs.", min=0.0)
    ] = math.inf,
    force: Force = False,
) -> None:
    """Run one study; save its figures (PNG), tables (CSV) and record (JSON)."""
    try:
        chosen = report.find(name)
    except report.UnknownStudyError as error:
        raise refusal(error) from None
    if not chosen.data:
        # The environment speaks to all studies, an option to this one.
        given = context.get_parameter_source("folder")
        if given is not None and given.name == "COMMANDLINE":
            raise refusal(f"{name} reads no data: leave --data out.")
        folder = None
    if full and not chosen.full:
        raise refusal(f"{name} has one protocol, and always follows it: leave --full out.")
    if full and chosen.data and folder is None:
        raise refusal(f"{name} needs data for --full ({', '.join(chosen.data)}): give --data, or {data.VARIABLE}.")
    if checkpoints is not None and not chosen.resumes:
        raise refusal(f"{name} writes no checkpoints: leave --checkpoints out.")
    if (fresh or minutes < math.inf) and not chosen.records:
        raise refusal(f"{name} keeps no records of its runs: leave --fresh and --minutes out.")
    results = out or Path("report") / chosen.name
    records = Records(results / "runs" if chosen.records else None, minutes)
    with _refused():
        output(chosen.name).claim(results, force)
        if fresh:
            records.clear()
    if records.count:
        kept = f"{records.count} finished runs are recorded in {records.folder} and not run again; --fresh begins anew."
        console.print(kept, markup=False, highlight=False, soft_wrap=True)
    try:
        with progress_bars() as bars:
            asked = partial(report.Context, folder, seed, full, checkpoints=checkpoints, records=records)
            run = follow(bars, chosen.title, lambda bar: report.run(chosen, asked(progress=bar)))
    except KeyboardInterrupt:
        kept = f"; the {records.count} runs that are finished are kept" if records.count else ""
        raise interruption(f"{name} was not done: no result was written to {results}{kept}.") from None
    if isinstance(run.error, data.MissingDataError | data.BrokenDataError):
        raise refusal(run.error)
    _explain(run.study.name, run.error)
    if run.result is None:
        raise typer.Exit(1)
    for paragraph in run.result.paragraphs:
        console.print(f"\n{paragraph}", markup=False, highlight=False)
    for number, table in enumerate(run.result.tables, 1):
        console.print(f"\nTable {number}. {table.caption}", markup=False, highlight=False)
        header, rows = table.filled()
        grid = Table(*map(escape, header), box=box.SIMPLE_HEAD, pad_edge=False)
        for row in rows:
            grid.add_row(*(escape(show(cell)) for cell in row))
        console.print(grid)
    for number, figure in enumerate(run.result.figures, 1):
        console.print(f"\nfigure-{number}.png: {figure.caption}", markup=False, highlight=False)
    with _refused():
        run.save(results)
    console.print(f"Saved to {results} in {run.seconds:.1f} s.", markup=False, soft_wrap=True)


@data_sets.command("list")
def list_data() -> None:
    """List the data sets: what they are, and which of their files are here."""
    table = Table("name", "what it is", "licence", "files here", box=None, header_style="bold", pad_edge=False)
    for each in data.SETS.values():
        here = data.present(each)
        found = "none" if not here else f"{len(here)} of {max(len(here), len(each.sources))}"
        table.add_row(f"[cyan]{each.name}[/cyan]", each.title, each.licence, found)
    console.print(table)


@data_sets.command("where")
def where_data(
    name: Annotated[str | None, typer.Argument(help="A set: show its files. Without one, the folders.")] = None,
) -> None:
    """Show where data is looked for, first to last, or where the files of a set lie."""
    try:
        chosen = None if name is None else _data_set(name)
        for path in data.folders() if chosen is None else data.present(chosen):
            console.print(str(path), markup=False, highlight=False, soft_wrap=True)
        if chosen is not None and not data.present(chosen):
            data.locate(chosen, chosen.sources[0].name)  # says what is missing, and how to get it
    except (LookupError, data.MissingDataError) as error:
        raise refusal(error) from None


@data_sets.command("fetch")
def fetch_data(
    name: Annotated[str, typer.Argument(help="As `fenchel data list` shows it.")],
    into: Annotated[Path | None, typer.Option(help="Folder to put it in; the cache if not given.")] = None,
) -> None:
    """Download a data set, check it, and keep it."""
    try:
        chosen = _data_set(name)
        folder = (into or data.cache()) / chosen.name
        if not all((folder / each.name).is_file() or (folder / f"{each.name}.gz").is_file() for each in chosen.sources):
            try_folder(folder)  # one that has everything may be for reading only
        with progress_bars() as bars:
            new = follow(bars, chosen.title, lambda bar: data.fetch(chosen, into, bar))
    except (LookupError, OSError, data.BrokenDataError) as error:
        raise refusal(error) from None
    text = f"Fetched {len(new)} files into {folder}." if new else f"Nothing to fetch: {folder} has it all."
    console.print(f"{text} Terms: {chosen.licence}.", markup=False, highlight=False, soft_wrap=True)


@app.command("bench")
def run_bench(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[WORKLOAD]...", help="As --list shows them; all if none is named.")
    ] = None,
    seconds: Annotated[float, typer.Option(help="For each contestant of each case.", min=0.0)] = 1.0,
    out: Annotated[Path, typer.Option(help="Folder for bench.json and bench.md.")] = Path("report/bench"),
    readme: Annotated[
        list[Path] | None,
        typer.Option(
            help=f"A page; its part from {bench.BEGIN} to {bench.END} is written anew, from {bench.SHORT} with five "
            "rows only. May be given several times.",
            dir_okay=False,
        ),
    ] = None,
    target: Annotated[
        str,
        typer.Option(
            help="What kernels are compiled for: own is this processor's instruction set; both is that and, where it "
            f"is AVX-512, avx2 in another process. {' | '.join(bench.CHOICES)}"
        ),
    ] = "both",
    only_list: Annotated[bool, typer.Option("--list", help="Show the workloads and their goals, and leave.")] = False,
    keep: Annotated[
        bool,
        typer.Option("--keep", help="Keep the figures of other workloads in OUT, of this machine and these versions."),
    ] = False,
    force: Force = False,
) -> None:
    """Measure beside torch and peers: ratios of medians in one run, and whether the goals are reached."""
    try:
        chosen = bench.find(names or [])
        targets = bench.chosen(target)
        earlier = _earlier(out) if keep else None
        measured = {each.workload.name for each in earlier.outcomes} if earlier else set()
        for page in readme or ():  # better to learn now than after the measurement that there is nowhere to write
            _check_page(page, measured | {workload.name for workload in chosen})
        if not only_list:
            bench.OUTPUT.claim(out, force)
    except (LookupError, OSError, ValueError) as error:
        raise refusal(error) from None
    if only_list:
        _list_workloads(chosen)
        return
    result = bench.Report(bench.machine(), seconds, [])
    console.print(result.source, markup=False, highlight=False)
    failed: dict[str, Exception] = {}
    try:
        with progress_bars(refresh_per_second=2) as bars:  # drawing takes time from what is measured
            for workload, each in itertools.product(chosen, targets):
                try:
                    title = f"{workload.name}, {each.name}"
                    outcome = follow(bars, title, partial(bench.run_for, workload, each, seconds))
                except Exception as error:
                    failed[title] = error
                    continue
                result = replace(result, outcomes=[*result.outcomes, outcome])
                with _refused():  # at once: what is measured stays if the rest is interrupted
                    (result.beside(earlier, bench.find([])) if earlier else result).save(out)
    except KeyboardInterrupt:
        kept = f"what was measured before is in {out}" if result.outcomes else "nothing was measured before"
        count = f"{len(result.outcomes)} of {len(chosen) * len(targets)}"
        raise interruption(f"{count} workloads are done; {kept}.") from None
    for outcome in result.measured:
        _show(bench.sheet(outcome))
    for line in result.missing:
        console.print(line, style="yellow", markup=False, soft_wrap=True)
    for name, reason in failed.items():
        _explain(name, reason)
    if result.outcomes:
        console.print(f"Saved bench.json and bench.md to {out}.", markup=False, soft_wrap=True)
    if failed:
        raise typer.Exit(1)
    whole = result.beside(earlier, bench.find([])) if earlier else result
    for page in readme or ():
        with _refused():
            page.write_text(whole.fill(page.read_text(encoding="utf-8")), encoding="utf-8")
        console.print(f"Wrote the figures into {page}.", markup=False, soft_wrap=True)


def _earlier(out: Path) -> bench.Report:
    """The benchmark that lies in a folder, if it may stand beside one of this machine."""
    found, here = bench.read(out, bench.find([])), bench.machine()
    if replace(found.machine, date=here.date) != here:
        raise ValueError(f"--keep needs the same machine and versions; {out} has figures of {found.machine}")
    return found


def _check_page(page: Path, measured: set[str]) -> None:
    """Raise if a page cannot be written, has no marks, or asks for workloads that are not measured."""
    with page.open("r+", encoding="utf-8") as file:
        text = file.read()
    short = bench.SHORT in text
    bench.insert(text, "", bench.SHORT if short else bench.BEGIN)
    missing = {workload for workload, *_ in bench.FRONT} - measured
    if short and missing:
        raise ValueError(f"{page.name} shows five rows; they need the workloads {', '.join(sorted(missing))} too")


@app.command("warmup")
def run_warmup(
    rooms: Annotated[list[str] | None, typer.Argument(help="Such as maps or dp; all if none is named.")] = None,
) -> None:
    """Compile kernels now, so that the first calls already use them."""
    with _refused(), progress_bars() as bars:
        warmth = follow(bars, "kernels", lambda bar: fenchel.warmup(*(rooms or ()), progress=bar))
    console.print(str(warmth), markup=False, highlight=False, soft_wrap=True)


@contextmanager
def _refused() -> Iterator[None]:
    """Within it, an error of reading or writing is reported in one line, and ends the command."""
    try:
        yield
    except (OSError, ValueError) as error:
        raise refusal(error) from None


def _data_set(name: str) -> data.DataSet:
    if name not in data.SETS:
        raise LookupError(f"There is no data set called {name!r}. Data sets: {', '.join(data.SETS)}.")
    return data.SETS[name]


def _list_workloads(workloads: list[bench.Workload]) -> None:
    table = Table("name", "what is measured, and the goals", box=None, header_style="bold", pad_edge=False)
    for each in workloads:
        lines = [each.title, *(f"  {bench.state(goal)}" for goal in each.goals)]
        table.add_row(f"[cyan]{each.name}[/cyan]", escape("\n".join(lines)))
    console.print(table)


def _show(sheet: bench.Sheet) -> None:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title=escape(sheet.title), title_justify="left")
    for number, column in enumerate(sheet.header):
        figures = number >= sheet.names
        # Where a narrow terminal may break a name: torch.softmax, sparsemax_loss.
        title = re.sub(r"(?<=[a-z]\.)|(?<=[a-z])(?=_)", "\n", column) if len(column) > 10 else column
        side: Literal["left", "right"] = "right" if figures else "left"
        whole = not figures and all(
            len(row[number]) <= 40 for row in sheet.rows
        )  # long labels leave no room for figures
        table.add_column(escape(title), justify=side, overflow="fold", no_wrap=whole)
    for row in sheet.rows:
        table.add_row(*map(escape, row))
    console.print()
    console.print(table)
    for note in sheet.notes:
        style = {"✓": "green", "✗": "red"}.get(note[0], "dim")
        console.print(note, style=style, markup=False, highlight=False)


def _explain(name: str, error: Exception | None) -> None:
    if error:
        errors.print(f"{name} failed:", style="red")
        traceback.print_exception(error, file=sys.stderr)


if __name__ == "__main__":
    app()
