"""`fenchel inflect`: train a model on a table of lemmas, forms and tags; ask it for forms; look into its answers."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import typer

from fenchel import Regularizer, Tsallis
from fenchel.data.sigmorphon2018 import Inflection, parse
from fenchel.seq2seq import (
    Ensemble,
    Pair,
    Recurrent,
    Seq2Seq,
    Stepper,
    Training,
    Transformer,
    Vocabulary,
    force,
    inflect,
    paired,
    spelled,
    train,
    unknown,
)
from fenchel.studies import hypotheses, style
from fenchel.terminal import console, errors, refusal

app = typer.Typer(no_args_is_help=True)

HELD_OUT = 10
"""Without a file to validate with, one line in so many is held out."""

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
        best = train(model, pairs, held, how, out, progress=True).best
    except (ValueError, OSError) as error:
        raise refusal(error) from None
    told = f"Best after epoch {best.epoch}: {best.scores.accuracy:.1%} of {len(held)} held-out forms right."
    console.print(f"{told} Saved to {out}.", markup=False, highlight=False, soft_wrap=True)


@app.command()
def predict(
    table: Annotated[Path, typer.Argument(help="TSV: lemma, tags; or lemma, form, tags, and the accuracy is told.")],
    model: Model,
    n_best: Annotated[int, typer.Option("--n-best", help="Forms for each line.", min=1)] = 1,
    beam: Annotated[int, typer.Option(help="Width of the beam.", min=1)] = 5,
) -> None:
    """Write forms as TSV: lemma, form, tags, probability, `exact` if no form of any probability was missed.

    `best` stands there, at the first form of a line, if others were missed, none of which can be more probable.
    """
    words = _read(table, forms=False)
    loaded, stepper = _load(model)
    sources = [spelled(word.lemma, word.tags) for word in words]
    _warn(symbol for source in sources for symbol in unknown(source, loaded.source))
    right = 0
    for word, found in zip(
        words, inflect(loaded, sources, beam, n_best=max(n_best, beam), stepper=stepper), strict=True
    ):
        right += found.form == word.form
        for rank, (form, probability) in enumerate(found.forms[:n_best]):
            exact = "exact" if found.beam.exact else "best" if found.beam.optimal and not rank else ""
            print(word.lemma, form, ";".join(word.tags), f"{probability:.4f}", exact, sep="\t")
    if words and all(word.form for word in words):
        share = f"{right} of {len(words)} right, {right / len(words):.1%}."
        errors.print(share, markup=False, highlight=False)


@app.command()
def explain(
    lemma: Annotated[str, typer.Argument(help="The word.")],
    tags: Annotated[str, typer.Argument(help="What is asked for: N;PL.")],
    model: Model,
    form: Annotated[str, typer.Option(help="A form to follow, letter by letter; else the most probable.")] = "",
    out: Annotated[Path, typer.Option(help="Folder for tree.png, attention.png and alternatives.png.")] = Path("."),
    beam: Annotated[int, typer.Option(help="Width of the beam.", min=1)] = 5,
) -> None:
    """Draw the beam as a tree, the attention of the letters (the first model's), and the alternatives at each."""
    (word,) = _parsed(f"{lemma}\t{tags}", "LEMMA TAGS")
    loaded, stepper = _load(model)
    source = spelled(word.lemma, word.tags)
    _warn([*unknown(source, loaded.source), *unknown(form, loaded.target)])
    (found,) = inflect(loaded, [source], beam, stepper=stepper, keep_tree=True)
    for written, probability in found.forms:
        console.print(f"{probability:7.2%}  {written}", markup=False, highlight=False)
    others = "There are others, none more probable than the first." if found.beam.optimal else "There are others."
    console.print("All forms of any probability." if found.beam.exact else others, markup=False, soft_wrap=True)
    target = tuple(form) or loaded.target.decode(found.beam.best.tokens)
    choices = force(stepper, source, loaded.target.encode(target))
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise refusal(error) from None
    with style.applied():
        drawings = {
            "tree": hypotheses.tree(found.beam, loaded.target, target),
            "attention": hypotheses.attention([("", loaded.attend(source, target))], source, target),
            "alternatives": hypotheses.alternatives(choices, loaded.target),
        }
        for name, drawing in drawings.items():
            drawing.savefig(out / f"{name}.png", dpi=200)
    console.print(f"Drew {', '.join(f'{name}.png' for name in drawings)} in {out}.", markup=False, soft_wrap=True)


def _read(path: Path, forms: bool = True) -> list[Inflection]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise refusal(f"{path} cannot be read: {error}") from None
    return _parsed(text, str(path), forms)


def _parsed(text: str, name: str, forms: bool = False) -> list[Inflection]:
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


def _warn(symbols: Iterable[str]) -> None:
    """Tell of symbols that training never saw."""
    if strange := list(dict.fromkeys(symbols)):
        shown = " ".join(map(hypotheses.name, strange[:20]))
        errors.print(f"Never seen in training, read as unknown: {shown}", style="yellow", markup=False, soft_wrap=True)
