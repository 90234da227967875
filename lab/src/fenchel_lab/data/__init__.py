"""Data sets, with one module per set that reads its format; `core` knows where files are, and fetches them.

ner.load("spanish", "train")                  # from $FENCHEL_DATA, or from the cache
ner.load("spanish", "train", Path("my/data")) # from my/data/ner/conll2002.zip
fetch(SETS["ner"])                            # downloads, checks and keeps it in the cache
"""

from fenchel_lab.data import (
    cifar10,
    easy_vqa,
    eraser,
    german_nouns,
    glove,
    imdb,
    mil,
    mnist,
    multi30k,
    ner,
    sigmorphon2018,
    sst,
    ucr,
    ud_ewt,
)
from fenchel_lab.data.core import (
    CACHE_VARIABLE,
    VARIABLE,
    BrokenDataError,
    DataSet,
    MissingDataError,
    Source,
    cache,
    fetch,
    folders,
    local,
    locate,
    present,
    read,
)

SETS: dict[str, DataSet] = {
    each.name: each
    for each in (
        mnist.MNIST,
        cifar10.CIFAR10,
        mil.MIL,
        ner.NER,
        ud_ewt.UD_EWT,
        ucr.UCR,
        glove.GLOVE,
        sst.SST,
        imdb.IMDB,
        eraser.ERASER,
        easy_vqa.EASY_VQA,
        sigmorphon2018.SIGMORPHON2018,
        multi30k.MULTI30K,
    )
}
"""Every data set, by the name of its folder."""

__all__ = [
    "CACHE_VARIABLE",
    "SETS",
    "VARIABLE",
    "BrokenDataError",
    "DataSet",
    "MissingDataError",
    "Source",
    "cache",
    "cifar10",
    "easy_vqa",
    "eraser",
    "fetch",
    "folders",
    "german_nouns",
    "glove",
    "imdb",
    "local",
    "locate",
    "mil",
    "mnist",
    "multi30k",
    "ner",
    "present",
    "read",
    "sigmorphon2018",
    "sst",
    "ucr",
    "ud_ewt",
]
