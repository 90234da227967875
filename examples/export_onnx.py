"""Export a model to ONNX: sparse attention and entmax as standard operators, run by ONNX Runtime without this library.

It prints:

    domains of the operators: {'standard'}
    largest difference below 1e-6: True
    classes with probability, of 10: [2, 3, 2, 2, 2]
"""

import io
import warnings

import onnxruntime
import torch

import fenchel


class Classifier(torch.nn.Module):
    """Sparse attention over a sequence, and sparse probabilities of ten classes."""

    def __init__(self) -> None:
        super().__init__()
        self.attend = fenchel.nn.MultiheadAttention(16, 4, batch_first=True, omega=fenchel.Gini())
        self.read, self.choose = torch.nn.Linear(16, 10), fenchel.nn.Entmax(1.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.choose(8 * self.read(self.attend(x, x, x, need_weights=False)[0].mean(1)))


torch.manual_seed(0)
warnings.filterwarnings("ignore", category=FutureWarning)  # of torch about itself
model, batch = Classifier().eval(), torch.export.Dim.DYNAMIC
program = torch.onnx.export(
    model, (torch.randn(2, 7, 16),), dynamo=True, dynamic_shapes=({0: batch},), input_names=["x"], verbose=False
)
file = io.BytesIO()  # or program.save("classifier.onnx")
program.save(file)
session = onnxruntime.InferenceSession(file.getvalue())
x = torch.randn(5, 7, 16)  # another batch size
with torch.no_grad():
    ours, theirs = model(x), torch.tensor(session.run(None, {"x": x.numpy()})[0])
print("domains of the operators:", {node.domain or "standard" for node in program.model_proto.graph.node})
print(f"largest difference below 1e-6: {bool((ours - theirs).abs().max() < 1e-6)}")
print(f"classes with probability, of 10: {(theirs > 0).sum(-1).tolist()}")
