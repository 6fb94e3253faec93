"""Networks as other people write them: read, or refused in our own words alone."""

import copy

import pytest
import torch
from support import tiny
from torch import nn

from avalanche_amnesia import DisjointModel, MaskedModel, ModelError, SubnetModel, fix, validate

WRAPS = {"masked": MaskedModel, "wsn": SubnetModel, "pools": DisjointModel}


class CopiedSize(tiny.Net):
    """As GPM's networks, and those of others who took them over."""

    def forward(self, x):
        n = copy.deepcopy(x.size(0))
        return super().forward(x).view(n, -1)


@pytest.mark.parametrize("shape", [None, (8,)])
def test_a_size_may_be_copied(shape):
    model = MaskedModel(CopiedSize(), input_shape=shape)
    assert model.graph.inputs.shape == (8,)
    assert model.features(torch.randn(5, 8), 0).shape == (5, 6)
    assert not hasattr(torch.SymInt, "__deepcopy__")  # the framework is as it was


class MeanOfTokens(nn.Module):
    """A mean over the tokens of each sample, told apart from padding by a second input."""

    features = 6

    def __init__(self):
        super().__init__()
        self.tokens, self.layer = nn.Embedding(16, 4), nn.Linear(4, 6)

    def forward(self, ids, mask):
        states = self.tokens(ids) * mask[..., None]
        return torch.relu(self.layer(states.sum(1) / mask.sum(1, keepdim=True)))


@pytest.mark.parametrize("length", [3, 7, 9])
def test_batches_of_tokens_may_be_of_other_lengths_than_the_example(length):
    net, ids, mask = MeanOfTokens(), torch.arange(21).view(3, 7) % 16, torch.ones(3, 7, dtype=torch.long)
    model = MaskedModel(net, example={"ids": ids, "mask": mask})
    padded, known = torch.zeros(2, length, dtype=torch.long), torch.zeros(2, length, dtype=torch.long)
    padded[:, :2], known[:, :2] = ids[:2, :2], 1
    expected = net(ids[:2, :2], known[:, :2])
    assert torch.allclose(model.features({"ids": padded, "mask": known}, 0), expected)


class ManyHeads(nn.Module):
    """Heads under the tasks' labels; all of them run, or the one that is asked for."""

    features = 6

    def __init__(self, all_run):
        super().__init__()
        self.layer, self.all_run = nn.Linear(8, 6), all_run
        self.heads = nn.ModuleDict({"0": nn.Linear(6, 2), "1": nn.Linear(6, 3)})

    def forward(self, x, head="1"):
        features = torch.relu(self.layer(x))
        return {name: one(features) for name, one in self.heads.items()} if self.all_run else self.heads[head](features)


@pytest.mark.parametrize("all_run", [True, False])
@pytest.mark.parametrize("classifier", ["heads", ["heads.0", "heads.1"], ("heads.1", "heads.0")])
def test_several_heads_are_left_out(classifier, all_run):
    net = ManyHeads(all_run)
    model = MaskedModel(net, classifier=classifier)
    x = torch.randn(3, 8)
    model.eval()
    assert torch.allclose(model.features(x, 0), torch.relu(net.layer(x)))
    assert [name for name, _ in model.backbone.named_parameters()] == ["layer.weight", "layer.bias"]
    assert [type(head) for head in net.heads.values()] == [nn.Linear, nn.Linear]  # the user's own stay
    assert validate(net, classifier=classifier) == []


def test_a_name_that_is_none_is_told():
    with pytest.raises(ValueError, match=r"has no module or parameter 'head'.*'heads.0'"):
        MaskedModel(ManyHeads(True), classifier=["heads.0", "head"])


class Asserts(tiny.Net):
    def forward(self, x):
        assert not torch.isnan(x).any()
        return super().forward(x)


def test_of_control_flow_on_values_only_our_own_words_are_printed(capfd):
    message = "control flow on values of tensors, at 'assert not torch.isnan.*DisjointModel.*SubnetModel"
    with pytest.raises(ModelError, match=message):
        MaskedModel(Asserts())
    (finding,) = validate(Asserts(), (8,))
    assert "control flow" in finding.reason
    fix(Asserts(), (8,))
    assert capfd.readouterr() == ("", "")


class Hidden(nn.Module):
    """What is done to hidden values is somebody's own."""

    features = 6

    def __init__(self, done):
        super().__init__()
        self.first, self.last, self.done = nn.Linear(8, 6), nn.Linear(6, 6), done

    def forward(self, x):
        return self.last(self.done(self.first(x)))


@pytest.mark.parametrize(
    ("done", "message"),
    [
        (copy.deepcopy, r"\(copy.deepcopy of a tensor that was computed, .* Copy it with x.clone\(\)"),
        (
            lambda h: torch.from_numpy(h.detach().numpy()),
            r"\(a tensor becomes an array of numpy, .* Compute with torch",
        ),
        (lambda h: h * h.mean().item(), r"no shape that could be known in advance \(it depends on values\)"),
    ],
    ids=["deepcopy", "numpy", "item"],
)
def test_what_training_or_export_cannot_do_is_told_in_our_words(done, message):
    with pytest.raises(ModelError, match=message) as told:
        MaskedModel(Hidden(done))
    assert not any(theirs in str(told.value) for theirs in ("pytorch/pull", "subclasses", "zuf"))


@pytest.mark.filterwarnings("ignore:.*torch.jit:FutureWarning")
@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda net: torch.jit.script(net), "the backbone was compiled by torch.jit"),
        (lambda net: torch.jit.trace(net, torch.zeros(2, 8)), "the backbone was compiled by torch.jit"),
        (lambda net: nn.Sequential(torch.jit.script(net)), "module '0' of Sequential was compiled by torch.jit"),
        (lambda net: nn.DataParallel(net), r"the backbone is a DataParallel.*its \.module"),
    ],
    ids=["script", "trace", "inside", "parallel"],
)
def test_a_compiled_or_parallel_network_is_refused_with_what_to_give(make, message, wrap):
    with pytest.raises(ModelError, match=message):
        WRAPS[wrap](make(tiny.Net()), **({} if wrap == "masked" else {"n_features": 6}))


class Recurrent(nn.Module):
    features = 6

    def __init__(self, kind):
        super().__init__()
        self.recurrent, self.out = kind(8, 6, batch_first=True), nn.Linear(6, 6)

    def forward(self, x):
        return torch.relu(self.out(self.recurrent(x)[0][:, -1]))


@pytest.mark.parametrize(("kind", "wrap"), [(nn.LSTM, MaskedModel), (nn.LSTM, SubnetModel), (nn.GRU, SubnetModel)])
def test_a_recurrent_network_is_told_of_the_methods_that_take_it(kind, wrap):
    with pytest.raises(ModelError, match=r"weight pools take any network.*DisjointModel\(backbone\)"):
        wrap(Recurrent(kind), **({"input_shape": (5, 8)} if wrap is MaskedModel else {}))
    DisjointModel(Recurrent(kind))
    net = Recurrent(kind)
    net.recurrent.requires_grad_(False)
    SubnetModel(net)
