"""The same numbers as other packages, where these are installed: pytorch-crf, torch-struct, tslearn."""

import pytest
import torch

from fenchel.dp import LinearChain, dtw

pytestmark = pytest.mark.filterwarnings("ignore")
TIGHT = {"rtol": 1e-5, "atol": 1e-5}


def test_shannon_chains_are_those_of_pytorch_crf() -> None:
    package = pytest.importorskip("torchcrf")
    field = package.CRF(5, batch_first=True)
    unary, target = torch.randn(4, 7, 5), torch.randint(5, (4, 7))
    lengths = torch.tensor([7, 3, 1, 5])
    mask = torch.arange(7) < lengths[:, None]
    first, second = unary.clone().requires_grad_(), unary.clone().requires_grad_()
    theirs = -field(first, target, mask, reduction="none")
    d = LinearChain(second, field.transitions, lengths, field.start_transitions, field.end_transitions)
    ours = d.loss(target)
    torch.testing.assert_close(ours, theirs, **TIGHT)
    torch.testing.assert_close(
        torch.autograd.grad(ours.sum(), (second, *field.parameters())),
        torch.autograd.grad(theirs.sum(), (first, *field.parameters())),
        **TIGHT,
    )
    best = d.map()
    assert [row[row >= 0].tolist() for row in best] == field.decode(unary, mask)


def test_shannon_chains_are_those_of_torch_struct() -> None:
    package = pytest.importorskip("torch_struct")
    unary, step = torch.randn(3, 6, 4), torch.randn(3, 5, 4, 4)
    edges = unary[:, 1:, :, None] + step.transpose(-1, -2)
    edges[:, 0] += unary[:, 0, None, :]
    field = package.LinearChainCRF(edges)
    d = LinearChain(unary, step)
    torch.testing.assert_close(d.value, field.partition, **TIGHT)
    torch.testing.assert_close(d.transition_marginals.transpose(-1, -2), field.marginals, **TIGHT)
    torch.testing.assert_close(d.entropy(), field.entropy, **TIGHT)


@pytest.mark.slow  # tslearn compiles its own code
@pytest.mark.parametrize("gamma", [0.1, 1.0])
def test_shannon_alignments_are_those_of_tslearn(gamma: float) -> None:
    package = pytest.importorskip("tslearn.metrics")
    x, y = torch.randn(3, 8, 2).requires_grad_(), torch.randn(3, 6, 2).requires_grad_()
    theirs, ours = package.SoftDTWLossPyTorch(gamma=gamma)(x, y), dtw(x, y, gamma)
    torch.testing.assert_close(ours, theirs, **TIGHT)
    torch.testing.assert_close(
        torch.autograd.grad(ours.sum(), (x, y)), torch.autograd.grad(theirs.sum(), (x, y)), **TIGHT
    )
