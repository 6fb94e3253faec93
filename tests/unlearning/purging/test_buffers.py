"""Buffers hold only their own samples: a saved strategy holds none of an unlearned task, in any form."""

import io
import pickle
from copy import deepcopy

import pytest
import torch
from avalanche.training.plugins import ReplayPlugin
from support.residue_oracle import tensors_within
from support.stock_hosts import host
from support.strategies import DIGITS, amnesiac, learn, stock
from support.strategy_state import unlearning_plugin

from avalanche_amnesia.benchmarks import task_benchmark
from avalanche_amnesia.contrib.baselines.dark_replay import DarkReplayPlugin
from avalanche_amnesia.contrib.repair import RepairPlugin

TENSORS = tuple(torch.cat(part) for part in zip(*(e.tensors for e in DIGITS.train_stream), strict=True))
BYTES = (TENSORS[0] * 255).round().to(torch.uint8)


def of_bytes():
    """Two digits a task, as bytes: the host's float samples are made of them."""
    labels = torch.cat([e.tensors[1] + 2 * task for task, e in enumerate(DIGITS.train_stream)])
    return task_benchmark((BYTES, labels), (BYTES, labels), [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]])


STREAMS = {"split": lambda: DIGITS, "bytes": of_bytes}
STRATEGIES = {
    "replay": lambda: stock(plugins=[ReplayPlugin(mem_size=30)], epochs=1),
    "gem": lambda: host("gem", epochs=1),
    "DER": lambda: host("der", epochs=1),
    "DER++": lambda: stock(plugins=[DarkReplayPlugin(memory_per_task=10)], epochs=1),
    "masks": lambda: amnesiac(train_epochs=1, plugins=[ReplayPlugin(mem_size=30)]),
    "repair": lambda: amnesiac(train_epochs=1, repair=RepairPlugin()),
}


def forms(experience):
    """A task's samples as its base holds them and as the model gets them, one piece of bytes each."""
    base = experience._samples.base[experience._samples.index]
    return [sample.numpy().tobytes() for form in (base, experience.tensors[0]) for sample in form.contiguous()]


def held(strategy):
    """All that a strategy saves, and all tensors that it reaches, as bytes."""
    saved = io.BytesIO()
    torch.save(strategy, saved, _use_new_zipfile_serialization=False)
    tensors = [t.detach().contiguous().numpy().tobytes() for t in tensors_within(strategy)]
    return [saved.getvalue(), pickle.dumps(strategy.plugins), *tensors]


def found(pieces, where):
    return sum(any(piece in part for part in where) for piece in pieces)


@pytest.mark.parametrize(
    ("kind", "stream"), [*((kind, "split") for kind in STRATEGIES), ("replay", "bytes"), ("repair", "bytes")]
)
def test_no_sample_of_an_unlearned_task_is_left(kind, stream):
    experiences = STREAMS[stream]().train_stream[:3]
    strategy = learn(STRATEGIES[kind](), experiences)
    assert found(forms(experiences[1]), held(strategy)) > 0
    unlearning_plugin(strategy).unlearn(strategy, [1])
    left = held(strategy)
    assert found(forms(experiences[1]), left) == 0
    # Only those of the buffer; others keep up to fifty samples of each task, as floats.
    assert 0 < found(forms(experiences[0]), left) <= (30 if kind == "replay" else 100)
    never_trained = STREAMS[stream]().train_stream[4]
    assert found(forms(never_trained), left) == 0
    for experience in STREAMS[stream]().train_stream[3:4]:
        strategy.train(experience)  # the buffer is of use
    assert found(forms(experiences[1]), [pickle.dumps(strategy.plugins)]) == 0


def test_a_purged_buffer_replays_what_it_replayed():
    """The samples of the other tasks are the same, in the same order."""
    strategy = learn(stock(plugins=[replay := ReplayPlugin(mem_size=30)], epochs=1), DIGITS.train_stream[:3])

    def samples():
        items = replay.storage_policy.buffer.eval()
        return [(x, y, int(t)) for x, y, t in (items[i] for i in range(len(items)))]

    before = [sample for sample in samples() if sample[2] != 1]
    unlearning_plugin(strategy).unlearn(strategy, [1])
    after = samples()
    assert [(y, t) for _, y, t in before] == [(y, t) for _, y, t in after]
    assert all(torch.equal(old, new) for (old, *_), (new, *_) in zip(before, after, strict=True))


@pytest.mark.parametrize("copied", [lambda task: pickle.loads(pickle.dumps(task)), deepcopy])
def test_a_saved_task_is_the_same_and_alone(copied):
    task = of_bytes().train_stream[2]._samples
    twin = copied(task)
    assert len(twin.base) == len(task) < len(task.base)
    for mine, other in zip(twin.tensors(), task.tensors(), strict=True):
        assert torch.equal(mine, other)
    assert torch.equal(twin[3][0], task[3][0])
