"""No network lets an entry outside a task's mask reach its features: it is refused by name, or protected to the bit."""

import random
import re

import pytest
import torch
from support.leaking_networks import kit
from support.leaking_networks.functions import CONTROL_FLOW_ON_VALUES
from support.leaking_networks.kit import ACCEPTED, NETWORKS, VARYING
from support.soundness_oracle import assert_sound, features, have_equal_bits, some_mask

from avalanche_amnesia import MaskedModel, ModelError


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


def masks(model):
    for seed, share in enumerate((0.5, 0.3, 0.8)):
        yield some_mask(model, seed, share)
    yield torch.zeros(model.n_units, dtype=torch.bool)


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
    unused = [assert_sound(model, x, mask, reaches=False) for mask in masks(model)]
    assert any(unused), "every entry counts as used under every mask: a second task could train nothing"
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
        found = features(model.train(training), x, torch.ones(model.n_units))
        message = f"an open mask changes the function, batch of {size}, training={training}"
        assert torch.allclose(found, expected, atol=1e-4, rtol=1e-3, equal_nan=True), message


def assert_forwards_leave_nothing(model, x):
    """A forward of one task leaves nothing that changes the features of another task, or of a new one."""
    parts, (mask, *_) = model.fresh_parts(), masks(model)

    def in_both_modes(parts):
        return [features(model.train(mode), x, mask, parts) for mode in (False, True)]

    before = in_both_modes(parts)
    other = x.flip(0) if x.dtype == torch.long else 2 - 3 * x
    for training in (True, False):
        features(model.train(training), other, ~mask)
    assert all(map(have_equal_bits, in_both_modes(parts), before)), "a forward of another task changed the features"
    assert all(map(have_equal_bits, in_both_modes(None), before)), "a forward of a task changed the start of the next"


def assert_shows_the_line(message, backbone):
    """The message holds the number of the line in the user's code, or its text."""
    forward = backbone.given[0].__code__
    first, last = forward.co_firstlineno, max(line for *_, line in forward.co_lines() if line)
    numbers = {int(number) for number in re.findall(r"(?:line |\.py:)(\d+)", message)}
    assert numbers & set(range(first, last + 1)) or re.search(r"if .* [>=]+ 0", message), message
