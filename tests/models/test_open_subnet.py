"""Choice of weights by their scores: by thresholds as by marks."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from avalanche_amnesia.models import MLP, SubnetModel
from avalanche_amnesia.models.weight_choice import Choice, MovingTop


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("ties", [False, True])
def test_what_passes_by_thresholds_is_what_passes_by_marks(ties, layout):
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ConvTranspose2d(4, 3, 2, stride=2), nn.Flatten(), nn.Linear(432, 5))
    model, generator = SubnetModel(net, n_features=5, bias="masked"), torch.Generator().manual_seed(0)
    sizes = [tensor.size for tensor in model.graph.layers.values()]
    scores = torch.randn(model.n_weights, generator=generator)
    scores = (4 * scores).round() if ties else scores
    by_marks = Choice(sizes, model.choose)
    tops = [MovingTop(tensor.size, tensor.kept) for tensor in model.graph.layers.values()]
    by_thresholds = Choice(sizes, model.choose, tops)
    for step in range(3):
        by_marks.renew(scores)
        by_thresholds.renew(scores)
        for layer, (name, part) in enumerate(model.by_layer(scores).items()):
            values = torch.randn(model.graph.layers[name].shape, generator=generator)
            values = values.contiguous(memory_format=layout) if values.dim() == 4 else values
            slow, fast = torch.empty(values.shape), torch.empty(values.shape)
            by_marks.sift(layer, part, values, slow)
            by_thresholds.sift(layer, part, values, fast)
            assert torch.equal(slow, fast)
            assert not (fast.signbit() & (fast == 0)).any()
            values = values.contiguous()
            by_thresholds.sift(layer, part, values, values)  # in place
            assert torch.equal(slow, values)
        scores = scores + (1 if ties else 0.001) * torch.randn(len(scores), generator=generator).round(decimals=step)


def test_a_training_is_the_same_with_marks_and_with_thresholds(monkeypatch):
    """Weights and scores of a few steps."""

    def trained():
        torch.manual_seed(0)
        model = SubnetModel(MLP(40, hidden=(50,), features=30))
        model.add_head(0, 3)
        model.start_task(0, torch.randn(model.n_weights))
        steps = [torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.Adam([model.scores], lr=1e-2)]
        for _ in range(10):
            model.open_subnet()
            F.cross_entropy(model(torch.randn(9, 40), 0), torch.arange(9) % 3).backward()
            model.pass_gradients()
            for optimizer in steps:
                optimizer.step()
                optimizer.zero_grad()
        return [p.detach().clone() for p in model.parameters()]

    class Marked(SubnetModel):
        def choose(self, scores, out=None):
            return super().choose(scores, out)

    fast = trained()
    monkeypatch.setitem(globals(), "SubnetModel", Marked)
    slow = trained()
    assert all(map(torch.equal, fast, slow))
