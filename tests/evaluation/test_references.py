"""Reference models have the bits of a training from scratch, also after shared or interrupted trainings."""

from copy import deepcopy
from functools import partial

import pytest
import torch
from avalanche.training import Naive
from support import strategies
from support.fault_injection import FailsAtEvent
from support.measured_runs import BENCHMARK, PERMUTED, make, make_ewc
from support.strategies import learn
from support.strategy_state import hashes
from torch.optim import SGD

from avalanche_amnesia import MLP, AmnesiacHAT, MaskedModel, References, SeedingPlugin
from avalanche_amnesia.evaluation.references import ReferencesError


def test_a_maker_without_a_seed_is_refused():
    def unseeded(**options):
        model = MaskedModel(MLP(64, hidden=(8,), features=4))
        return AmnesiacHAT(model=model, optimizer=SGD(model.parameters(), lr=0.1), **options)

    with pytest.raises(ReferencesError, match=r"different initial values of \['backbone.*torch.manual_seed"):
        References(unseeded, BENCHMARK)

    undetermined = partial(strategies.make, Naive, hidden=(8,), features=4, optimizer="sgd")
    with pytest.raises(ReferencesError, match=r"running random stream.*SeedingPlugin"):
        References(undetermined, BENCHMARK)


def test_wrong_lists_of_tasks_are_refused(references):
    for tasks in ([0, 0], [9], [1, -1]):
        with pytest.raises(ReferencesError, match=r"distinct tasks of the benchmark: \[0, 1, 2, 3\]"):
            references.reference(tasks)
    for n in (-1, 5):
        with pytest.raises(ReferencesError, match=r"0\.\.4, got"):
            references.full(n)
    with pytest.raises(ValueError, match="variant"):
        references.reference([0], "other")


@pytest.mark.parametrize("maker", [make, make_ewc], ids=["hat", "ewc"])
def test_a_shared_prefix_gives_the_bits_of_training_from_scratch(maker):
    shared = References(maker, BENCHMARK)
    state = torch.get_rng_state()
    for path in ([], [1, 3, 0], [1, 2]):
        alone = References(maker, BENCHMARK).reference(path)
        assert hashes(shared.reference(path)) == hashes(alone), path
        assert shared.reference(path) is shared.reference(path)
        assert not alone.training
    assert torch.equal(torch.get_rng_state(), state)
    plain = learn(maker(), PERMUTED, [1, 3])  # a run that never had the requests
    assert hashes(shared.reference([1, 3])) == hashes(plain.model)


def test_variants_differ_in_order_or_initial_values(references):
    same, order, seed = (references.reference([1], variant) for variant in ("same", "order", "seed"))
    initial = [hashes(references.reference([], variant)) for variant in ("same", "order", "seed")]
    assert initial[0] == initial[1] != initial[2]
    assert len({str(hashes(m)) for m in (same, order, seed)}) == 3
    again = References(make, BENCHMARK)
    assert hashes(again.reference([1], "order")) == hashes(order)
    assert hashes(again.reference([1], "seed")) == hashes(seed)


@pytest.mark.parametrize("kind", [Naive, None], ids=["naive", "hat"])
def test_an_interrupted_reference_is_not_continued(kind):
    box = {"breaks": False}

    def late(strategy):
        return box["breaks"] and strategy.experience.task_label == 2

    breaks = partial(FailsAtEvent, "after_update", KeyboardInterrupt, when=late)

    def maker(**options):
        if kind is None:
            return make(plugins=[breaks()], **options)
        options |= {"hidden": (8,), "features": 4, "optimizer": "sgd", "train_epochs": 1}
        return strategies.make(Naive, plugins=[SeedingPlugin(0), breaks()], **options)

    references = References(maker, BENCHMARK)
    expected = hashes(References(maker, BENCHMARK).reference([0, 1, 2]))
    references.reference([0])
    box["breaks"] = True
    with pytest.raises(KeyboardInterrupt):
        references.reference([0, 1, 2])
    box["breaks"] = False
    assert hashes(references.reference([0, 1, 2])) == expected


def test_a_copy_of_references_is_the_same_object():
    references = References(make, BENCHMARK)
    assert deepcopy({"metric": references})["metric"] is references
