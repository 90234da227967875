"""`fenchel`: the tour through the papers, and one study at a time."""

from __future__ import annotations

import sys
import traceback
from pathlib import Path
from typing import Annotated

try:
    import typer
    from rich import box, progress
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from fenchel import studies
    from fenchel.studies import report
    from fenchel.studies.registry import DATA_VARIABLE
    from fenchel.studies.result import show
    from fenchel.studies.runs import version
except ModuleNotFoundError as error:
    if error.name is None or error.name.split(".")[0] == "fenchel":
        raise
    raise SystemExit(f"The fenchel command needs {error.name}: pip install 'fenchel[studies]'") from None

app = typer.Typer(no_args_is_help=True, add_completion=False, rich_markup_mode="rich", pretty_exceptions_enable=False)
study = typer.Typer(no_args_is_help=True)
app.add_typer(study, name="study", help="One study: a figure or a table of a paper, computed again.")

console = Console()
errors = Console(stderr=True)

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

    [cyan]fenchel study run paths --help[/cyan]  its options: data, seed, folder, full protocol
    """


@app.command()
def tour(
    out: Annotated[Path, typer.Option(help="Folder for index.html.", file_okay=False)] = Path("report"),
    seed: Seed = 0,
) -> None:
    """Run every study on embedded data and write the report, one page that needs nothing else."""
    runs = []
    with _bars() as bars:
        chapters = [(each, bars.add_task(each.title, start=False, total=1.0, note="")) for each in studies.studies()]
        for chapter, task in chapters:
            bars.start_task(task)
            runs.append(studies.run(chapter, studies.Context(data=None, seed=seed, progress=_Bar(bars, task))))
            if runs[-1].error:
                bars.update(task, note="[red]failed[/red]")
                bars.stop_task(task)
            else:
                bars.update(task, completed=1.0, note="")
    index = report.write(runs, out)
    console.print(f"Wrote {index}: open it in a browser, or on a phone.", markup=False, soft_wrap=True)
    for run in runs:
        _explain(run)
    if any(run.error for run in runs):
        raise typer.Exit(1)


@study.command("list")
def list_studies() -> None:
    """List the studies in the order of the tour."""
    table = Table("name", "what it shows", "after", box=None, header_style="bold", pad_edge=False)
    for each in studies.studies():
        table.add_row(f"[cyan]{each.name}[/cyan]", each.title, each.source)
    console.print(table)


@study.command("run")
def run_study(
    name: Annotated[str, typer.Argument(help="As `fenchel study list` shows it.")],
    data: Annotated[
        Path | None,
        typer.Option(
            help="Folder of real data; without it, the embedded sample.",
            envvar=DATA_VARIABLE,
            exists=True,
            file_okay=False,
        ),
    ] = None,
    seed: Seed = 0,
    out: Annotated[
        Path | None, typer.Option(help="Folder for the results; report/NAME if not given.", file_okay=False)
    ] = None,
    full: Annotated[bool, typer.Option("--full", help="The paper's full protocol, however long it takes.")] = False,
) -> None:
    """Run one study; save its figures (PNG), tables (CSV) and record (JSON)."""
    try:
        chosen = studies.find(name)
    except studies.UnknownStudyError as error:
        errors.print(str(error), style="red", markup=False, soft_wrap=True)
        raise typer.Exit(2) from None
    with _bars() as bars:
        bar = _Bar(bars, bars.add_task(chosen.title, total=1.0, note=""))
        run = studies.run(chosen, studies.Context(data, seed, full, bar))
        bars.update(bar.task, completed=1.0, note="")
    _explain(run)
    if run.result is None:
        raise typer.Exit(1)
    for paragraph in run.result.paragraphs:
        console.print(f"\n{paragraph}", markup=False, highlight=False)
    for number, table in enumerate(run.result.tables, 1):
        console.print(f"\nTable {number}. {table.caption}", markup=False, highlight=False)
        grid = Table(*map(escape, table.header), box=box.SIMPLE_HEAD, pad_edge=False)
        for row in table.rows:
            grid.add_row(*(escape(show(cell)) for cell in row))
        console.print(grid)
    folder = out or Path("report") / chosen.name
    run.save(folder)
    console.print(f"Saved to {folder} in {run.seconds:.1f} s.", markup=False, soft_wrap=True)


def _bars() -> progress.Progress:
    return progress.Progress(
        progress.TextColumn("{task.description}"),
        progress.BarColumn(bar_width=20),
        progress.TimeElapsedColumn(),
        progress.TextColumn("[dim]{task.fields[note]}[/dim]"),
        console=console,
    )


class _Bar:
    """A study's progress, shown as a bar."""

    def __init__(self, bars: progress.Progress, task: progress.TaskID) -> None:
        self.bars, self.task = bars, task

    def __call__(self, fraction: float, note: str = "") -> None:
        # The last of it is drawing, which comes after the study's last word.
        self.bars.update(self.task, completed=0.98 * fraction, note=escape(note))


def _explain(run: studies.Run) -> None:
    if run.error:
        errors.print(f"{run.study.name} failed:", style="red")
        traceback.print_exception(run.error, file=sys.stderr)


if __name__ == "__main__":
    app()
