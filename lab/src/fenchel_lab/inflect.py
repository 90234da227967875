"""`fenchel inflect`: train a model on a table of lemmas, forms and tags; ask it for forms; look into its answers."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import typer

from fenchel import Regularizer, Tsallis
from fenchel.seq2seq import (
    DivergedError,
    Ensemble,
    Pair,
    Recurrent,
    Seq2Seq,
    Stepper,
    Training,
    Transformer,
    Vocabulary,
    force,
    train,
)
from fenchel_lab.data.sigmorphon2018 import Inflection, parse
from fenchel_lab.drawing import hypotheses, style
from fenchel_lab.models.inflection import LONGEST, Inflected, inflect, paired, spelled, unknown
from fenchel_lab.outputs import Output, claim_model, is_signed
from fenchel_lab.terminal import Force, console, errors, failure, follow, interruption, progress_bars, refusal

app = typer.Typer(no_args_is_help=True)

HELD_OUT = 10
"""Without a file to validate with, one line in so many is held out."""

WINDOW = 256
"""Lines that are answered at a time."""

SHOWN = 20
"""The most symbols unknown to the training of which a command warns."""

DRAWN = 200
"""Characters of a word, of its tags and of a form that are drawn, at most: a picture of more cannot be read."""

DRAWINGS: Output = Output(
    "fenchel inflect explain",
    ("tree.png", "attention.png", "alternatives.png"),
    lambda folder: [name for name in DRAWINGS.names if is_signed(folder / name, DRAWINGS.command)],
    shared=True,
)
"""What ``explain`` draws; the command's name is in the metadata of each."""

Model = Annotated[list[Path], typer.Option("--model", help="Folder of a trained model; several are an ensemble.")]


@app.command("train")
def train_model(
    table: Annotated[Path, typer.Argument(help="TSV, a line an inflection: lemma, form, tags (N;PL).")],
    out: Annotated[Path, typer.Option(help="Folder for the model; a run that was cut short goes on there.")],
    validation: Annotated[Path | None, typer.Option(help="TSV to validate with; else one line in ten.")] = None,
    kind: Annotated[Literal["recurrent", "transformer"], typer.Option(help="Which model.")] = "recurrent",
    alpha: Annotated[float, typer.Option(help="Of the output: 1 softmax, 2 sparsemax.", min=1.0, max=2.0)] = 1.5,
    attention: Annotated[float, typer.Option(help="Alpha of the attention.", min=1.0, max=2.0)] = 1.5,
    hidden: Annotated[int, typer.Option(help="Width of the hidden states.", min=2)] = 128,
    epochs: Annotated[int, typer.Option(help="At most so many.", min=1)] = 30,
    rate: Annotated[float, typer.Option(help="Learning rate to begin with.")] = 2e-3,
    batch: Annotated[int, typer.Option(help="Inflections in a batch.", min=1)] = 64,
    seed: Annotated[int, typer.Option(help="Seed of everything random.")] = 0,
    anew: Annotated[bool, typer.Option("--force", help="Begin anew, over any model that is there.")] = False,
) -> None:
    """Train a model. Interrupted, the same command goes on, to the same result."""
    words = _read(table)
    if validation is None:
        random.Random(seed).shuffle(words)
        cut = max(1, len(words) // HELD_OUT)
        words, judged = words[cut:], words[:cut]
    else:
        judged = _read(validation)
    if not words or not judged:
        raise refusal(f"{table}: there must be at least two inflections, one to train and one to validate with.")
    pairs, held = [paired(word) for word in words], [paired(word) for word in judged]
    try:
        how = Training(epochs=epochs, rate=rate, batch=batch, seed=seed)
        model = _new(kind, pairs, hidden, Tsallis(attention), Tsallis(alpha), seed)
        claim_model(out, "fenchel inflect train", (Recurrent.__name__, Transformer.__name__), anew)
        with progress_bars() as bars:
            best = follow(
                bars, table.name, lambda bar: train(model, pairs, held, training=how, folder=out, progress=bar)
            ).best
    except DivergedError as error:
        raise failure(error) from None
    except (ValueError, OSError) as error:
        raise refusal(error) from None
    except KeyboardInterrupt:
        raise interruption(f"The same command goes on from the last epoch that is whole in {out}.") from None
    line = f"Best after epoch {best.epoch}: {best.scores.accuracy:.1%} of {len(held)} held-out forms right."
    console.print(f"{line} Saved to {out}.", markup=False, highlight=False, soft_wrap=True)


@app.command()
def predict(
    table: Annotated[
        Path, typer.Argument(help="TSV: lemma, tags; or lemma, form, tags, and the accuracy is printed. - reads stdin.")
    ],
    model: Model,
    n_best: Annotated[int, typer.Option("--n-best", help="Forms for each line.", min=1)] = 1,
    beam: Annotated[int, typer.Option(help="Width of the beam.", min=1)] = 5,
) -> None:
    """Write forms as TSV: lemma, form, tags, probability, `exact` if no form of any probability was missed.

    `best` stands there, at the first form of a line, if others were missed, none of which can be more probable; `cut`
    if the form did not end within 60 letters: then it ends in …, and is never right. Lines are read and answered a few
    at a time, so that a table may be of any length.
    """
    loaded, stepper = _load(model)
    count = known = right = 0
    strangers: set[str] = set()
    try:
        with _opened(table) as lines:
            words = parse(lines, forms=False)
            while window := list(islice(words, WINDOW)):
                sources = [spelled(word.lemma, word.tags) for word in window]
                _warn((symbol for source in sources for symbol in unknown(source, loaded.source)), strangers)
                answers = inflect(loaded, sources, beam, n_best=max(n_best, beam), stepper=stepper)
                for word, found in zip(window, answers, strict=True):
                    right += found.form == word.form and not found.cut
                    _print(word, found, n_best)
                sys.stdout.flush()
                count, known = count + len(window), known + sum(bool(word.form) for word in window)
    except ValueError as error:
        raise refusal(f"{table}, {error}") from None
    except BrokenPipeError:  # whoever read the answers has enough of them
        raise
    except OSError as error:
        raise refusal(f"the forms cannot be written: {error}") from None
    if not count:
        raise refusal(f"{table} has no lines.")
    if count == known:
        errors.print(f"{right} of {count} right, {right / count:.1%}.", markup=False, highlight=False)


@app.command()
def explain(
    lemma: Annotated[str, typer.Argument(help="The word.")],
    tags: Annotated[str, typer.Argument(help="What is asked for: N;PL.")],
    model: Model,
    form: Annotated[str, typer.Option(help="A form to follow, letter by letter; else the most probable.")] = "",
    out: Annotated[Path, typer.Option(help="Folder for tree.png, attention.png and alternatives.png.")] = Path("."),
    beam: Annotated[int, typer.Option(help="Width of the beam.", min=1)] = 5,
    overwrite: Force = False,
) -> None:
    """Draw the beam as a tree, the attention of the letters (the first model's), and the alternatives at each."""
    for name, value in (("LEMMA", lemma), ("TAGS", tags), ("--form", form)):
        if strange := [each for each in "\t\n\r" if each in value]:
            raise refusal(
                f"{name} must not have tabs or line breaks, got {value[:DRAWN]!r}: `explain` takes one word and its "
                f"tags, and a form to follow as --form. {strange[0]!r} separates the columns and lines of a table."
            )
        if len(value) > DRAWN or any("\ud800" <= each <= "\udfff" for each in value):
            raise refusal(f"{name} must be text of at most {DRAWN} characters, got {len(value)}: {value[:DRAWN]!r}")
    (word,) = _parsed(f"{lemma}\t{tags}", "LEMMA TAGS")
    try:
        DRAWINGS.claim(out, overwrite)
    except OSError as error:
        raise refusal(error) from None
    loaded, stepper = _load(model)
    source = spelled(word.lemma, word.tags)
    _warn([*unknown(source, loaded.source), *unknown(form, loaded.target)], set())
    try:
        (found,) = inflect(loaded, [source], beam, stepper=stepper, keep_tree=True)
    except ValueError as error:
        raise refusal(error) from None
    for written, probability in found.forms:
        end = f"…  (cut at {LONGEST} letters, before its end)" if found.cut else ""
        console.print(f"{probability:7.2%}  {written}{end}", markup=False, highlight=False, soft_wrap=True)
    others = "There are others, none more probable than the first." if found.beam.optimal else "There are others."
    console.print("All forms of any probability." if found.beam.exact else others, markup=False, soft_wrap=True)
    target = tuple(form) or loaded.target.decode(found.beam.best.tokens)
    choices = force(stepper, source, loaded.target.encode(target))
    with style.applied():
        drawings = (
            hypotheses.tree(found.beam, loaded.target, target),
            hypotheses.attention([("", loaded.attend(source, target))], source, target),
            hypotheses.alternatives(choices, loaded.target),
        )
        try:
            out.mkdir(parents=True, exist_ok=True)
            for name, drawing in zip(DRAWINGS.names, drawings, strict=True):
                drawing.savefig(out / name, dpi=200, metadata={"Software": DRAWINGS.command})
        except OSError as error:
            raise refusal(error) from None
    console.print(f"Drew {', '.join(DRAWINGS.names)} in {out}.", markup=False, soft_wrap=True)


def _print(word: Inflection, found: Inflected, n_best: int) -> None:
    """The lines of a word: lemma, form, tags, probability, and what is certain of the form."""
    for rank, (form, probability) in enumerate(found.forms[:n_best]):
        exact = "exact" if found.beam.exact else "best" if found.beam.optimal and not rank else ""
        form, exact = (f"{form}…", "cut") if found.cut else (form, exact)
        print(word.lemma, form, ";".join(word.tags), f"{probability:.4f}", exact, sep="\t")


def _read(path: Path) -> list[Inflection]:
    with _opened(path) as lines:
        return _parsed(lines, str(path), forms=True)


@contextmanager
def _opened(path: Path) -> Iterator[Iterator[str]]:
    """The lines of a table, or of stdin for ``-``, read as they are asked for."""
    try:
        raw = nullcontext(sys.stdin.buffer) if str(path) == "-" else path.open("rb")
    except OSError as error:
        raise refusal(f"{path} cannot be read: {error}") from None
    with raw as lines:
        yield _decoded(lines, path)


def _decoded(lines: Iterable[bytes], path: Path) -> Iterator[str]:
    try:
        for line in lines:
            yield line.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise refusal(f"{path} cannot be read: {error}") from None


def _parsed(text: str | Iterable[str], name: str, forms: bool = False) -> list[Inflection]:
    try:
        words = list(parse(text, forms))
    except ValueError as error:
        raise refusal(f"{name}, {error}") from None
    if not words:
        raise refusal(f"{name} has no lines.")
    return words


def _load(folders: list[Path]) -> tuple[Seq2Seq, Stepper]:
    """The first model, and all of them together."""
    try:
        models = [Seq2Seq.load(folder) for folder in folders]
        return models[0], models[0] if len(models) == 1 else Ensemble(models)
    except (OSError, ValueError) as error:
        raise refusal(error) from None


def _new(
    kind: str, pairs: Sequence[Pair], hidden: int, attention: Regularizer, output: Regularizer, seed: int
) -> Seq2Seq:
    """A model for the symbols of some pairs."""
    source, target = (Vocabulary.of(side) for side in zip(*((p.source, p.target) for p in pairs), strict=True))
    omegas: dict[str, Any] = {"attention": attention, "output": output}
    torch.manual_seed(seed)
    if kind == "recurrent":
        return Recurrent(source, target, embedding=max(1, hidden // 2), hidden=hidden, layers=1, **omegas)
    return Transformer(source, target, width=hidden, inner=2 * hidden, **omegas)


def _warn(symbols: Iterable[str], warned: set[str]) -> None:
    """Tell of symbols that training never saw, each once, and of ``SHOWN`` at most."""
    if strange := [each for each in dict.fromkeys(symbols) if each not in warned][: SHOWN - len(warned)]:
        warned.update(strange)
        shown = " ".join(map(hypotheses.name, strange))
        errors.print(f"Never seen in training, read as unknown: {shown}", style="yellow", markup=False, soft_wrap=True)
