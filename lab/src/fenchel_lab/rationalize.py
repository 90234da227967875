"""`fenchel rationale`: train a classifier of texts that selects words; write a page on which these are highlighted."""

from __future__ import annotations

import math
from glob import escape as escape_pattern
from pathlib import Path
from typing import Annotated, cast

import torch
import typer
from rich import progress

from fenchel.seq2seq import DivergedError
from fenchel.seq2seq.saving import write_whole
from fenchel_lab.data.sst import Review
from fenchel_lab.drawing import highlights
from fenchel_lab.models import labelled, rationale
from fenchel_lab.models.labelled import Labelled
from fenchel_lab.models.training import Course
from fenchel_lab.outputs import Output, claim_model, is_signed
from fenchel_lab.terminal import Force, console, errors, failure, follow, interruption, progress_bars, refusal

app = typer.Typer(no_args_is_help=True)

MOST_NUMBERS = 20
"""Labels that may be numbers: with more, they are taken for ratings, which are not classes."""

HELD_OUT = 10
"""Without a file to validate with, one text in so many is held out."""

SHOWN = 5
"""Texts whose spans are printed; the page has all."""


@app.command("train")
def train_model(
    file: Annotated[Path, typer.Argument(help="Texts with labels: .tsv (label, tab, text) or .jsonl (text, label).")],
    out: Annotated[Path, typer.Option(help="Folder for the model.")],
    validation: Annotated[Path | None, typer.Option(help="Such a file to choose the epoch by; else a tenth.")] = None,
    selection: Annotated[str, typer.Option(help=f"One of {', '.join(rationale.KINDS)}.")] = "sequential k-subsets",
    budget: Annotated[float, typer.Option(help="Share of the words to select, up to 1; above, how many.")] = 0.2,
    transition: Annotated[float, typer.Option(help="What selected neighbours add to the score.")] = 0.3,
    temperature: Annotated[float, typer.Option(help="The lower, the nearer to whole words.")] = 0.1,
    test_transition: Annotated[
        float | None, typer.Option(help="The transition once trained; the higher, the longer the phrases.")
    ] = None,
    test_temperature: Annotated[
        float | None, typer.Option(help="The temperature once trained; 0.001 selects nearly whole words.")
    ] = None,
    ratings: Annotated[
        bool, typer.Option("--ratings", help="Labels are numbers to predict (mean squared error), not classes.")
    ] = False,
    reads: Annotated[
        rationale.Reads, typer.Option(help="What is classed: the selected words alone, or in context.")
    ] = "words",
    vectors: Annotated[Path | None, typer.Option(help="Word vectors, as GloVe's; else they are trained.")] = None,
    longest: Annotated[int, typer.Option(help="Of longer texts the last so many words are read.", min=1)] = 400,
    hidden: Annotated[int, typer.Option(help="Units of the encoder, of each direction.", min=1)] = 50,
    epochs: Annotated[int, typer.Option(help="At most so many.", min=1)] = 10,
    rate: Annotated[float, typer.Option(help="Of learning, to begin with.")] = 3e-3,
    batch: Annotated[int, typer.Option(help="Texts in a batch.", min=1)] = 16,
    seed: Annotated[int, typer.Option(help="Seed of everything random.")] = 0,
    force: Annotated[bool, typer.Option("--force", help="Begin anew, over any model that is there.")] = False,
) -> None:
    """Train a rationalizer on texts with labels. Texts without words are left out.

    Labels are names of classes, numbers too, unless --ratings is given. Interrupted, the same command goes on,
    to the same result.
    """
    torch.manual_seed(seed)
    try:
        texts = _labelled(file)
        if validation is None:
            texts = [texts[row] for row in torch.randperm(len(texts)).tolist()]
            cut = max(1, len(texts) // HELD_OUT)
            texts, judged = texts[cut:], texts[:cut]
        else:
            judged = _labelled(validation)
            if not judged:
                raise ValueError(f"{validation}: there is no text with words to validate with")
        values = sorted({cast(str, text.label) for text in (*texts, *judged)})
        numbers = "" if ratings else _numbers(values, file)
        if ratings:
            _check_ratings(values, file)
        labels = sorted({cast(str, text.label) for text in texts})
        if len(labels) < 2:
            found = f"of the label {labels[0]!r} alone" if labels else "there are none"
            if validation is None and judged:
                found += f", besides {len(judged)} that are held out"
            raise ValueError(f"{file}: there must be texts with words of two labels to train with; {found}")
        if not ratings and (strange := {text.label for text in judged} - set(labels)):
            raise ValueError(
                f"there is no text of the label {min(map(str, strange))!r} to train with, only to validate"
            )
        if budget > 1 and not budget.is_integer():
            raise ValueError(f"budget must be a share of the words, up to 1, or a whole number of them, got {budget:g}")
        size = int(budget) if budget > 1 else budget
        kind = cast(rationale.Kind, selection)
        chosen = rationale.Selection(kind, size, transition, temperature, test_transition, test_temperature)
        known = labelled.given_vectors(vectors, texts, longest) if vectors else labelled.vocabulary(texts, longest)
        course = Course(epochs, rate)
        claim_model(out, "fenchel rationale train", (rationale.Rationalizer.__name__,), force)
    except (OSError, ValueError) as error:
        raise refusal(error) from None
    if numbers:
        errors.print(numbers, style="yellow", markup=False, highlight=False, soft_wrap=True)
    classes = [] if ratings else labels
    model = rationale.Rationalizer(known, classes, chosen, rationale.Size(hidden), reads, trainable=vectors is None)
    train, valid = ([_review(text, classes) for text in part] for part in (texts, judged))
    try:
        with progress_bars() as bars:
            model, reached = follow(
                bars, file.name, lambda bar: rationale.trained(model, train, valid, course, batch, bar, out)
            )
    except DivergedError as error:
        raise failure(error) from None
    except (OSError, ValueError) as error:
        raise refusal(error) from None
    except KeyboardInterrupt:
        raise interruption(f"The same command goes on from the last epoch that is whole in {out}.") from None
    told = rationale.found(model, valid)
    score = f"Mean squared error {told.error:.3g}" if ratings else f"F1 {reached:.1%}"
    console.print(
        f"{score} on {len(valid)} held-out texts; {told.share:.0%} of their words have weight, in "
        f"{told.runs:.1f} runs a text. Saved to {out}.",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )


@app.command("explain")
def explain(
    model: Annotated[Path, typer.Argument(help="Folder of a trained model.")],
    file: Annotated[Path | None, typer.Argument(help="Texts: .tsv, .txt or .jsonl; labels are not needed.")] = None,
    text: Annotated[str | None, typer.Option(help="One text, in place of a file.")] = None,
    out: Annotated[Path, typer.Option(help="The page to write.")] = Path("highlights.html"),
    force: Force = False,
) -> None:
    """Class texts, and write a page on which the words that decided are highlighted."""
    try:
        if (file is None) == (text is None):
            raise ValueError("explain takes a file of texts, or --text, and not both")
        if text is not None and any("\ud800" <= each <= "\udfff" for each in text):
            raise ValueError(f"--text must be text in UTF-8, got {text[:60]!r}")
        _page(out).claim(out.parent, force)
        texts = [text] if file is None else [each.text for each in labelled.read(file)]
        if not texts:
            raise ValueError(f"{file} has no lines.")
        reader = rationale.Rationalizer.load(model)
        found = progress.track(reader.explain_all(cast(list[str], texts)), "explaining", len(texts), console=console)
        explanations = list(found)
        out.parent.mkdir(parents=True, exist_ok=True)
        page = highlights.page(explanations, "One text" if file is None else file.name)
        write_whole(out, lambda path: path.write_text(page, encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise refusal(error) from None
    for each in explanations[:SHOWN]:
        spans = ", ".join(f"“{span.text}” {span.weight:.2g}" for span in each.spans) or "no words"
        console.print(f"{each.label}: {spans}", markup=False, highlight=False, soft_wrap=True)
    console.print(f"Wrote {out}: open it in a browser.", markup=False, soft_wrap=True)


def _labelled(file: Path) -> list[Labelled]:
    """The texts of a file, each with a label; those without words are left out."""
    texts = labelled.read(file)
    if unlabelled := next((text for text in texts if text.label is None), None):
        raise ValueError(f"{file}, line {unlabelled.line}: a text without a label")
    return [text for text in texts if text.words]


def _numbers(labels: list[str], file: Path) -> str:
    """What to say of labels that are numbers; an error if there are too many, or one is written in two ways."""
    try:
        values = [float(label) for label in labels]
    except ValueError:
        return ""
    first: dict[float, str] = {}
    for value, label in zip(values, labels, strict=True):
        if first.setdefault(value, label) != label:
            raise ValueError(f"{file}: the labels {first[value]!r} and {label!r} are one number: write it in one way")
    ranked = [label for _, label in sorted(zip(values, labels, strict=True))]
    shown = ", ".join(ranked[:5]) + (", …" if ranked[5:] else "")
    told = f"the {len(labels)} labels are numbers ({shown}), and each is a class of its own"
    told += ": add --ratings to predict them as numbers"
    if len(labels) > MOST_NUMBERS:
        raise ValueError(
            f"{file}: {told}. At most {MOST_NUMBERS} different numbers are taken as classes: put them into a few "
            "classes, such as low and high, or write classes as names, such as class-1"
        )
    return f"Note: {told}."


def _check_ratings(labels: list[str], file: Path) -> None:
    """Raise unless all labels are finite numbers."""
    for label in labels:
        try:
            finite = math.isfinite(float(label))
        except ValueError:
            finite = False
        if not finite:
            raise ValueError(f"{file}: with --ratings labels must be finite numbers, got {label!r}")


def _page(out: Path) -> Output:
    """What ``explain`` writes: a page, that tells in its head what wrote it."""
    command = "fenchel rationale explain"
    return Output(command, [escape_pattern(out.name)], lambda _: [out.name] if is_signed(out, command) else [], True)


def _review(text: Labelled, labels: list[str]) -> Review:
    label = cast(str, text.label)
    return Review(text.words, labels.index(label) if labels else float(label))
