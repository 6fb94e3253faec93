"""Pretrained backbones: their weights are the initial values, and come back to the bit."""

import copy
from functools import partial

import timm
import torch
from sklearn.datasets import load_digits
from support.strategies import learn, make
from torch import nn

from avalanche_amnesia import AmnesiacHAT, MaskedModel, task_benchmark


def rgb_digits(n_tasks=2, side=32):
    """Real digits as small colour images."""
    data = load_digits()
    x = torch.from_numpy(data.images[:120]).float()[:, None] / 16
    x = nn.functional.interpolate(x, side).expand(-1, 3, -1, -1).contiguous()
    y = torch.from_numpy(data.target[:120])
    return task_benchmark((x, y), (x, y), [[2 * task, 2 * task + 1] for task in range(n_tasks)])


@torch.no_grad()
def lived_in(model: nn.Module) -> nn.Module:
    """Weights and statistics that no initialisation makes."""
    generator = torch.Generator().manual_seed(5)
    for name, value in (*model.named_parameters(), *model.named_buffers()):
        if "running" in name or "bn" in name or "norm" in name:
            if value.is_floating_point():
                value.add_(torch.rand(value.shape, generator=generator) * 0.3)
        elif value.dim() == 0 and "batches" in name:
            value.fill_(1000)
    return model


OPTIMIZER = partial(torch.optim.Adam, lr=1e-3, weight_decay=5e-4)
tuned = partial(make, AmnesiacHAT, optimizer=OPTIMIZER, train_mb_size=9, train_epochs=1, seed=0)


def assert_pretrained_again(strategy, state, n_tasks=2):
    """Train, unlearn everything, compare with the file."""
    model, stream = strategy.model, rgb_digits(n_tasks).train_stream
    learn(strategy, stream)
    parameters = dict(model.backbone.named_parameters())
    assert any(not torch.equal(p, state[name]) for name, p in parameters.items())
    strategy.unlearn(range(n_tasks))
    for name, value in (*parameters.items(), *model.backbone.named_buffers()):
        assert torch.equal(value, state[name]), name
    assert [name for name in model.state_dict() if not name.startswith("backbone.")] == []


def test_a_pretrained_transformer_is_restored_to_the_bit(tmp_path):
    small = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 2}
    name = "vit_tiny_patch16_224"
    torch.manual_seed(3)
    path = tmp_path / "vit.pth"
    torch.save(lived_in(timm.create_model(name, num_classes=5, **small)).state_dict(), path)
    backbone = timm.create_model(name, pretrained=False, checkpoint_path=str(path), num_classes=5, **small)
    state = torch.load(path, weights_only=True)
    model = MaskedModel(backbone, classifier="head")
    for parameter, value in model.backbone.named_parameters():
        assert torch.equal(value, state[parameter])
        assert value is backbone.get_parameter(parameter)
    assert isinstance(backbone.head, nn.Linear)
    assert_pretrained_again(tuned(model=model), state, n_tasks=3)


def test_a_pretrained_network_with_norms_is_restored_to_the_bit(tmp_path):
    torch.manual_seed(3)
    small = {"stem_width": 8, "channels": (8, 12, 16, 16), "num_classes": 0}
    path = tmp_path / "resnet.pth"
    torch.save(lived_in(timm.create_model("resnet10t", **small)).state_dict(), path)
    backbone = timm.create_model("resnet10t", pretrained=False, checkpoint_path=str(path), **small)
    state = torch.load(path, weights_only=True)
    model = MaskedModel(backbone)
    model.add_head(7, 2)
    starts = copy.deepcopy(model.task_parts(7).state_dict())
    model.remove_task(7)
    assert starts
    for name, value in starts.items():
        if not name.endswith("num_batches_tracked"):
            assert torch.equal(value, state[name.replace("/", ".")]), name
    assert_pretrained_again(tuned(model=model), state)
