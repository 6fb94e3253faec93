"""Every stock strategy with known state and every buffer: nothing of an unlearned task stays in it, in any form."""

import io
import pickle
from copy import deepcopy

import pytest
import torch
from avalanche.training.plugins import ReplayPlugin, SynapticIntelligencePlugin
from support.fault_injection import FailsAtEvent
from support.residue_oracle import tensors_within, things_within
from support.stock_hosts import HOSTS, host, keeper
from support.strategies import DIGITS, Hears, amnesiac, learn, stock, trained
from support.strategy_state import fingerprint, frozen, unlearning_plugin
from torch import Tensor

from avalanche_amnesia.benchmarks import PermutedDigits, task_benchmark
from avalanche_amnesia.bits import tensor_hash
from avalanche_amnesia.contrib.baselines.dark_replay import DarkReplayPlugin
from avalanche_amnesia.contrib.repair import RepairPlugin
from avalanche_amnesia.training.host.lookup import find_plugin

STREAM = PermutedDigits(5, n_train=120, n_test=40)
MARK = 64.0


def first_weights(strategy):
    return next(p for p in strategy.model.parameters() if p.dim() == 2)


def mark(strategy):
    """Add a mark to a task's update, on weights of an input that is always zero: it moves nothing else, and any copy of
    those weights holds it times its coefficient."""
    if int(strategy.experience.task_label) == 1 and strategy.clock.train_exp_epochs == 0:
        first_weights(strategy).data[:, 0] += MARK


def blank_the_first_input(strategy):
    strategy.mbatch[0] = strategy.mbatch[0].clone()
    strategy.mbatch[0].flatten(1)[:, 0] = 0.0


def marked(strategy, kept):
    """Tensors of the keeper of the state with a value that only the mark explains."""
    n = first_weights(strategy).numel()
    beside = [strategy.evaluator, *strategy.model.modules(), *strategy.model.parameters()]
    found = [x for x in things_within(own_state(kept), beside=beside) if isinstance(x, Tensor) and x.numel() == n]
    return [x for x in found if x.is_floating_point() and x.abs().max() > MARK / 2]


WITH_ANCHOR = {"ewc", "ewc online", "mas", "si", "lwf", "lfl"}


def own_state(kept):
    return {name: value for name, value in vars(kept).items() if name not in ("plugins", "optimizer", "model")}


def state_of(strategy, kept):
    """Everything that a strategy and the keeper of its state hold, in a form that can be compared."""
    beside = [strategy, strategy.evaluator, strategy.clock, *strategy.model.modules(), *strategy.model.parameters()]
    found = [x for x in things_within(own_state(kept), beside=beside) if isinstance(x, (Tensor, int, float))]
    held = [tensor_hash(thing) if isinstance(thing, Tensor) else thing for thing in found]
    owners = [(n, b) for n, b in strategy.model.state_dict().items() if b.dtype != torch.float32]
    return frozen([held, fingerprint(strategy), dict(owners)])


@pytest.mark.parametrize("name", HOSTS)
def test_no_state_holds_an_unlearned_update_and_a_failed_unlearning_restores_all_state(name):
    fails = FailsAtEvent("after_unlearning", KeyboardInterrupt)
    marks = Hears(after_training_epoch=mark, before_forward=blank_the_first_input)
    strategy = learn(host(name, plugins=(marks, fails)), STREAM.train_stream[:3])
    kept = keeper(strategy, name)
    if name in WITH_ANCHOR:
        assert marked(strategy, kept)  # the check can see one
    assert first_weights(strategy)[:, 0].abs().max() > MARK / 2
    before = state_of(strategy, kept)
    for tasks in ([1], [0, 1, 2]):
        with pytest.raises(KeyboardInterrupt):
            unlearning_plugin(strategy).unlearn(strategy, tasks)
        assert state_of(strategy, kept) == before
    fails.event = ""
    unlearning_plugin(strategy).unlearn(strategy, [1])
    assert state_of(strategy, kept) != before
    assert not marked(strategy, kept)
    assert first_weights(strategy)[:, 0].abs().max() < 2
    strategy.train(STREAM.train_stream[3])
    assert first_weights(strategy)[:, 0].abs().max() < 2


def test_logits_of_samples_from_before_the_forgotten_task_stay():
    strategy = learn(host("der"), STREAM.train_stream[:3])

    def logits():
        buffer = strategy.storage_policy.buffer
        rows = zip(buffer.targets_task_labels, buffer.eval(), strict=True)
        return {(int(task), tuple(x.flatten().tolist())): row for task, (x, _, _, row) in rows}

    before = logits()
    unlearning_plugin(strategy).unlearn(strategy, [1])
    after = logits()
    assert after.keys() == {key for key in before if key[0] != 1}
    strategy.model.eval()
    for (task, x), row in after.items():
        if task == 0:
            assert torch.equal(row, before[task, x])
        else:  # as the model without task 1 sees it
            torch.testing.assert_close(row, strategy.model(torch.tensor([x]))[0].detach(), rtol=1e-4, atol=1e-5)
            assert not torch.equal(row, before[task, x])


def test_synaptic_intelligence_learns_beside_masks_and_keeps_no_mask_in_the_making():
    strategy = trained(2, plugins=[SynapticIntelligencePlugin(1.0)], train_epochs=1)
    plugin = find_plugin(strategy, SynapticIntelligencePlugin)
    assert "embedding" in plugin.ewc_data[0]
    strategy.unlearn([1])
    for store in (*plugin.ewc_data, *plugin.syn_data.values()):
        assert not {"embedding", "heads.1.weight", "heads.1.bias"} & set(store)
    strategy.train(DIGITS.train_stream[2])
    assert strategy.model.tasks == (0, 2)


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
    assert found(forms(STREAMS[stream]().train_stream[4]), left) == 0
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
