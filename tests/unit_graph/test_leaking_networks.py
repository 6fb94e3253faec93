"""No network lets an entry outside a task's mask reach its features: it is refused by name, or protected to the bit."""

import copy
import random
import re

import pytest
import torch
from support.leaking_networks import kit
from support.leaking_networks.functions import CONTROL_FLOW_ON_VALUES
from support.leaking_networks.kit import ACCEPTED, NETWORKS, VARYING

from avalanche_amnesia import MaskedModel, ModelError
from avalanche_amnesia.bits import same_bits

MOVES = {
    "redrawn": lambda old, noise: noise * 3,
    "moved far": lambda old, noise: old + noise * 1e4,
    "turned round": lambda old, noise: -old,
}


def build(factory):
    torch.manual_seed(0)
    random.seed(0)
    return factory()


def inputs(shape, size, seed=0):
    generator = torch.Generator().manual_seed(100 * size + seed)
    if shape == kit.WORDS:
        return torch.randint(0, 9, (size, *shape), generator=generator)
    return torch.randn(size, *shape, generator=generator)


def masked(factory, shape, **options):
    """Return the masked network, or the message that refuses it, which must name a part of the network."""
    try:
        return MaskedModel(build(factory), input_shape=shape, **options)
    except ModelError as error:
        message = str(error)
    assert names_a_part(message, build(factory)), f"names no module, parameter or operation: {message}"
    return message


def names_a_part(message, backbone):
    """Return True if the message quotes a part of the network, or names the type of a part, or an operation."""
    parts = (*backbone.named_modules(), *backbone.named_parameters(), *backbone.named_buffers())
    quoted = set(re.findall(r"'([\w.]+)'", message))
    kinds = {type(module).__name__ for module in backbone.modules()}
    return (
        bool(quoted & {name for name, _ in parts}) or any(kind in message for kind in kinds) or "operation" in message
    )


def features(model, x, mask, parts, training):
    """Return features with these modules of the task, and the same random numbers at every call."""
    torch.manual_seed(1)
    random.seed(1)
    with torch.no_grad():
        return model.train(training).masked_features(x.clone(), mask, copy.deepcopy(parts).train(training))


def have_equal_bits(a, b):
    return a.shape == b.shape and a.dtype == b.dtype and bool(same_bits(a, b).all())


def masks(model):
    for seed, share in enumerate((0.5, 0.3, 0.8)):
        yield torch.rand(model.n_units, generator=torch.Generator().manual_seed(seed)) < share
    yield torch.zeros(model.n_units, dtype=torch.bool)


def outside(model, mask):
    """Yield each parameter with the entries that a later task may change: the entries outside the mask.

    Modules that each task copies are left out, because no task trains the originals.
    """
    use = model.graph.parameter_use(model.by_layer(mask))
    known = set(use) | set(model.graph.owned)
    for name, parameter in model.backbone.named_parameters():
        assert name in known, f"nothing is known of {name}, so that no mask protects it"
        if name in use:
            yield parameter, ~(use[name] > 0).expand_as(parameter)


@torch.no_grad()
def leaks_of(model, x):
    """Return the number of changed entries, and a list of the changes that reached the features."""
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
                if not have_equal_bits(features(model, x, mask, parts, training), before):
                    found.append(f"{move}, training={training}, mask {number}")
            for (parameter, _), value in zip(entries, kept, strict=True):
                parameter.copy_(value)
    return n_moved, found


@pytest.mark.parametrize("name", NETWORKS)
def test_every_network_is_refused_by_name_or_protected_to_the_bit(name):
    """One test checks everything, because tracing takes longest."""
    factory, shape, options = NETWORKS[name]
    model, x = masked(factory, shape, **options), inputs(shape, 5)
    assert name not in ACCEPTED or isinstance(model, MaskedModel), model
    if name in CONTROL_FLOW_ON_VALUES:
        assert_shows_the_line(model, build(factory))
    if name not in VARYING:
        assert_open_mask_changes_nothing(name, model)
    if isinstance(model, str):
        return
    n_moved, leaks = leaks_of(model, x)
    assert n_moved > 0, "every entry counts as used under every mask: a second task could train nothing"
    assert not leaks, leaks
    assert_forwards_leave_nothing(model, x)


def assert_open_mask_changes_nothing(name, model):
    """Compare the model under an open mask with the network itself, for every batch size and both modes."""
    factory, shape, options = NETWORKS[name]
    for size, training in ((1, False), (2, False), (5, False), (8, False), (2, True), (5, True), (8, True)):
        x = inputs(shape, size, 7)
        torch.manual_seed(1)
        with torch.set_grad_enabled(training):
            expected = build(factory).train(training)(x.clone())
        assert len(expected) == size
        if isinstance(model, str) or options.get("norm") == "batch" or (training and "frozen" in options):
            continue  # these options change the function
        found = features(model, x, torch.ones(model.n_units), model.fresh_parts(), training)
        message = f"an open mask changes the function, batch of {size}, training={training}"
        assert torch.allclose(found, expected, atol=1e-4, rtol=1e-3, equal_nan=True), message


def assert_forwards_leave_nothing(model, x):
    """A forward of one task leaves nothing that changes the features of another task, or of a new one."""
    parts, (mask, *_) = model.fresh_parts(), masks(model)
    before = [features(model, x, mask, parts, training) for training in (False, True)]
    other = x.flip(0) if x.dtype == torch.long else 2 - 3 * x
    for training in (True, False):
        features(model, other, ~mask, model.fresh_parts(), training)
    after = [features(model, x, mask, parts, training) for training in (False, True)]
    assert all(map(have_equal_bits, after, before)), "a forward of another task changed the features"
    new = [features(model, x, mask, model.fresh_parts(), training) for training in (False, True)]
    assert all(map(have_equal_bits, new, before)), "a forward of another task changed the start of the next task"


def assert_shows_the_line(message, backbone):
    """The message holds the number of the line in the user's code, or its text."""
    forward = backbone.given[0].__code__
    first, last = forward.co_firstlineno, max(line for *_, line in forward.co_lines() if line)
    numbers = {int(number) for number in re.findall(r"(?:line |\.py:)(\d+)", message)}
    assert numbers & set(range(first, last + 1)) or re.search(r"if .* [>=]+ 0", message), message
