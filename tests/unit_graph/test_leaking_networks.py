"""No network lets what a task's mask leaves out reach its features: it is refused by name, or protected to the bit.

Which networks must go in, and which may be refused, stands in leaking_networks/ (``accepts`` and ``either``).
"""

import copy
import random
import re

import pytest
import torch
import torch.nn.functional as F
from support import leaking_networks
from support.leaking_networks import ACCEPTED, NETWORKS, VARYING, Net, P, part
from support.leaking_networks.control_flow import CONTROL_FLOW_ON_VALUES
from torch import nn
from torch.nn.utils import parametrizations

from avalanche_amnesia import HAT, MaskedModel, ModelError, SplitDigits
from avalanche_amnesia.bits import same_bits

MOVES = {
    "drawn anew": lambda old, noise: noise * 3,
    "moved far": lambda old, noise: old + noise * 1e4,
    "turned round": lambda old, noise: -old,
    "times -3": lambda old, noise: old * -3,
}


def build(factory):
    torch.manual_seed(0)
    random.seed(0)
    return factory()


def inputs(shape, size, seed=0):
    generator = torch.Generator().manual_seed(100 * size + seed)
    if shape == leaking_networks.WORDS:
        return torch.randint(0, 9, (size, *shape), generator=generator)
    return torch.randn(size, *shape, generator=generator)


def masked(factory, shape, **options):
    """The masked network; where it is refused, the message, which must name a part of it."""
    try:
        return MaskedModel(build(factory), input_shape=shape, **options)
    except ModelError as error:
        message = str(error)
    assert names_a_part(message, build(factory)), f"names no module, parameter or operation: {message}"
    return message


def names_a_part(message, backbone):
    """Tell whether a message names a part of a network, in quotes, the type of one, or an operation."""
    parts = (*backbone.named_modules(), *backbone.named_parameters(), *backbone.named_buffers())
    quoted = set(re.findall(r"'([\w.]+)'", message))
    kinds = {type(module).__name__ for module in backbone.modules()}
    return (
        bool(quoted & {name for name, _ in parts}) or any(kind in message for kind in kinds) or "operation" in message
    )


def features(model, x, mask, parts, training):
    """Features with the task's own modules as given, and the same random numbers at every call."""
    torch.manual_seed(1)
    random.seed(1)
    with torch.no_grad():
        return model.train(training).masked_features(x.clone(), mask, copy.deepcopy(parts).train(training))


def alike(a, b):
    return a.shape == b.shape and a.dtype == b.dtype and bool(same_bits(a, b).all())


def masks(model):
    for seed, share in enumerate((0.5, 0.3, 0.8)):
        yield torch.rand(model.n_units, generator=torch.Generator().manual_seed(seed)) < share
    yield torch.zeros(model.n_units, dtype=torch.bool)


def outside(model, mask):
    """Parameter by parameter, the entries that a later task may move: all that the mask does not cover.

    The backbone's values of what each task has a copy of stay as they are: no task trains those.
    """
    use = model.graph.parameter_use(model.by_layer(mask))
    known = set(use) | set(model.graph.owned)
    for name, parameter in model.backbone.named_parameters():
        assert name in known, f"nothing is known of {name}, so that no mask protects it"
        if name in use:
            yield parameter, ~(use[name] > 0).expand_as(parameter)


@torch.no_grad()
def leaks_of(model, x):
    """Number of entries that were moved, and the moves that reached the features, with their modes."""
    parts, found, n_moved = model.fresh_parts(), [], 0
    generator = torch.Generator().manual_seed(5)
    for number, mask in enumerate(masks(model)):
        expected = {training: features(model, x, mask, parts, training) for training in (False, True)}
        entries = list(outside(model, mask))
        n_moved += sum(int(free.sum()) for _, free in entries)
        kept = [parameter.clone() for parameter, _ in entries]
        for move, moved in MOVES.items():
            for parameter, free in entries:
                noise = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
                parameter.copy_(torch.where(free, moved(parameter, noise), parameter))
            for training, before in expected.items():
                if not alike(features(model, x, mask, parts, training), before):
                    found.append(f"{move}, training={training}, mask {number}")
            for (parameter, _), value in zip(entries, kept, strict=True):
                parameter.copy_(value)
    return n_moved, found


@pytest.mark.parametrize("name", NETWORKS)
def test_refused_by_name_or_protected_to_the_bit(name):
    """And computing, with an open mask, what the network computes: in one test, as reading it takes longest."""
    factory, shape, options = NETWORKS[name]
    model, x = masked(factory, shape, **options), inputs(shape, 5)
    assert name not in ACCEPTED or isinstance(model, MaskedModel), model
    if name not in VARYING:
        assert_open_mask_changes_nothing(name, model)
    if isinstance(model, str):
        return
    n_moved, leaks = leaks_of(model, x)
    assert n_moved > 0, "every entry counts as in use under every mask: nothing is left for a second task"
    assert not leaks, leaks
    assert_forwards_leave_nothing(model, x)


def assert_open_mask_changes_nothing(name, model):
    """At any size of batch, in both modes; where the network itself does not run, the table is wrong."""
    factory, shape, options = NETWORKS[name]
    for size, training in ((1, False), (2, False), (5, False), (8, False), (2, True), (5, True), (8, True)):
        x = inputs(shape, size, 7)
        torch.manual_seed(1)
        with torch.set_grad_enabled(training):
            expected = build(factory).train(training)(x.clone())
        assert len(expected) == size
        if isinstance(model, str) or options.get("norm") == "batch" or (training and "frozen" in options):
            continue  # the function is another by the user's own choice
        found = features(model, x, torch.ones(model.n_units), model.fresh_parts(), training)
        message = f"an open mask changes the function, batch of {size}, training={training}"
        assert torch.allclose(found, expected, atol=1e-4, rtol=1e-3, equal_nan=True), message


def assert_forwards_leave_nothing(model, x):
    """Nobody else reads what a task's forward keeps: neither in the backbone nor in a task's own modules."""
    parts, (mask, *_) = model.fresh_parts(), masks(model)
    before = [features(model, x, mask, parts, training) for training in (False, True)]
    other = x.flip(0) if x.dtype == torch.long else 2 - 3 * x
    for training in (True, False):
        features(model, other, ~mask, model.fresh_parts(), training)
    after = [features(model, x, mask, parts, training) for training in (False, True)]
    assert all(map(alike, after, before)), "a forward of another task moved the features"
    anew = [features(model, x, mask, model.fresh_parts(), training) for training in (False, True)]
    assert all(map(alike, anew, before)), "a forward of another task moved what the next one begins with"


@pytest.mark.parametrize("name", CONTROL_FLOW_ON_VALUES)
def test_control_flow_on_values_is_refused_with_its_line(name):
    """The message has the line of the user's code: its number, or its text."""
    factory, shape, _ = NETWORKS[name]
    with pytest.raises(ModelError) as error:
        MaskedModel(build(factory), input_shape=shape)
    forward = build(factory).given[0].__code__
    first, last = forward.co_firstlineno, max(line for *_, line in forward.co_lines() if line)
    numbers = {int(number) for number in re.findall(r"(?:line |\.py:)(\d+)", str(error.value))}
    assert numbers & set(range(first, last + 1)) or re.search(r"if .* [>=]+ 0", str(error.value)), error.value


# Training ----------------------------------------------------------------------------------------------------------


def on_digits(forward, **makers):
    """A network over 8×8 images: a layer ``a``, unless it is another, and the last one, ``c``."""
    return lambda: Net(forward, **{"a": part(nn.Linear, 64, 12), "c": part(nn.Linear, 12, 8), **makers})


def flat(x):
    return torch.tanh(x.flatten(1) - 0.3)


def through_a_sibling(s, x):
    h = s.a(flat(x))
    u, v = h.view(-1, 4, 3), h.view(-1, 12)
    u.add_(1)
    return s.c(torch.relu(v))


def attended(s, x):
    h = s.a(x.flatten(1, 2))
    return s.c(s.m(h, h, h, key_padding_mask=x.flatten(1, 2).sum(2) == 0)[0].mean(1))


def moving_average(s, x):
    h = s.a(flat(x))
    if s.training:
        s.n.mul_(0.9).add_(h.detach().mean(0), alpha=0.1)
    return s.c(torch.relu(h - s.n))


def lora():
    layer = nn.Linear(12, 12)
    layer.A, layer.B = P(2, 12)(), P(12, 2)()
    layer.forward = lambda x: F.linear(x, layer.weight + layer.B @ layer.A, layer.bias)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.Tanh(), layer, nn.Tanh(), nn.Linear(12, 8))


def weight_norm():
    layer = parametrizations.weight_norm(nn.Linear(12, 12))
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.Tanh(), layer, nn.Tanh(), nn.Linear(12, 8))


def drop_path():
    mixed = leaking_networks.unexpected_forwards.subclass("DropPath", nn.Module, lambda s, x: x.cumsum(1) + 1)
    _, block, _ = mixed()
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 12), block, nn.Tanh(), nn.Linear(12, 8))


def positions(s, x):
    h = torch.relu(s.a(flat(x)))
    return s.c(torch.cat([torch.arange(12).expand_as(h) / 4, h], 1)[:, 6:18])


TRAINED = {
    "weight standardisation": on_digits(
        lambda s, x: s.c(torch.relu(s.k(torch.relu(s.a(x)))).amax((2, 3))),
        a=part(nn.Conv2d, 1, 8, 3),
        k=part(leaking_networks.computed_weights.ConvForwardStandardises, 8, 12, 3),
    ),
    "sibling view written in place": on_digits(through_a_sibling),
    "LoRA by a patched forward": lora,
    "weight norm": weight_norm,
    "DropPath that mixes units": drop_path,
    "norm on two branches": on_digits(
        lambda s, x: s.c(torch.relu(s.n(s.a(flat(x)))) + torch.relu(s.n(s.b(flat(x))))),
        b=part(nn.Linear, 64, 12),
        n=part(nn.BatchNorm1d, 12),
    ),
    "integer positions beside units": on_digits(positions),
    "attention with a padding mask": on_digits(
        attended, a=part(nn.Linear, 8, 12), m=part(nn.MultiheadAttention, 12, 2, batch_first=True)
    ),
    "moving average of units": on_digits(moving_average, n=leaking_networks.K(torch.zeros(12))),
    "overlapping rows of one weight": on_digits(
        lambda s, x: s.c(torch.relu(F.linear(flat(x), s.a[:12])) + torch.tanh(F.linear(flat(x), s.a[4:]))), a=P(16, 64)
    ),
    "signs of masked zeros": on_digits(
        lambda s, x: s.c(torch.atan2(h := s.a(flat(x)), -torch.ones_like(h)) + torch.copysign(torch.ones_like(h), h))
    ),
    "dropout to another value than zero": on_digits(lambda s, x: s.c(s.d(s.a(flat(x)))), d=part(nn.AlphaDropout, 0.3)),
}
MAY_BE_REFUSED = {
    "weight norm",
    "attention with a padding mask",
    "moving average of units",
    "overlapping rows of one weight",
}


@pytest.mark.parametrize("name", TRAINED)
def test_training_a_second_task_leaves_the_first_its_features(name):
    """Adam with weight decay moves every entry that it may."""
    model = masked(TRAINED[name], (1, 8, 8))
    if isinstance(model, str):
        assert name in MAY_BE_REFUSED, model
        return
    stream = SplitDigits(n_train=200, n_test=60)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3, weight_decay=1e-3)
    strategy = HAT(model=model, optimizer=optimizer, train_mb_size=16, train_epochs=2, seed=3)
    x = stream.test_stream[0].tensors[0]
    strategy.train(stream.train_stream[0])
    before = features_of_the_first(model, x)
    start = [parameter.detach().clone() for parameter in model.backbone.parameters()]
    strategy.train(stream.train_stream[1])
    assert before.isfinite().all()
    assert any(not torch.equal(now, old) for now, old in zip(model.backbone.parameters(), start, strict=True))
    assert alike(features_of_the_first(model, x), before), "the features of the first task drifted"


@torch.no_grad()
def features_of_the_first(model, x):
    model.eval()
    torch.manual_seed(1)
    return model.features(x, 0).clone()
