"""Memory of replayed samples by task, and the loss of DER++."""

from dataclasses import replace

import torch
from torch.nn import functional as F

from avalanche_amnesia.benchmarks import PermutedDigits
from avalanche_amnesia.contrib.baselines.dark_replay import DarkLoss, TaskMemory
from avalanche_amnesia.models import MLP, MultiHeadModel
from avalanche_amnesia.transaction import Transaction

STREAM = PermutedDigits(3, n_train=120, n_test=20).train_stream


def filled(seed=0, tasks=(0, 1, 2), **options):
    torch.manual_seed(0)
    model, memory = MultiHeadModel(MLP(64, hidden=(16,), features=8)), TaskMemory(20, seed, **options)
    for task in tasks:
        model.add_head(task, 10)
        memory.store(model, STREAM[task], task)
    return model, memory


def test_the_samples_of_a_task_do_not_depend_on_other_tasks():
    (_, every), (_, alone), (_, other_seed) = filled(), filled(tasks=(1,)), filled(seed=1)
    assert torch.equal(every.samples[1].x, alone.samples[1].x)
    assert not torch.equal(every.samples[1].x, other_seed.samples[1].x)
    (_, shrunk) = filled(size=30)
    assert [len(samples) for samples in shrunk.samples.values()] == [10, 10, 10]
    assert torch.equal(shrunk.samples[0].x, every.samples[0].x[:10])
    assert shrunk.samples[0].x.untyped_storage().nbytes() == 10 * 64 * 4  # dropped samples are not kept


def test_the_loss_is_the_mean_over_samples_of_several_tasks():
    model, memory = filled()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1)
    batch = memory.draw((0, 2), 25, torch.Generator().manual_seed(0))
    assert batch.keys() == {0, 2}
    assert sum(map(len, batch.values())) == 25
    drawn = torch.cat([samples.x.flatten(1) for samples in batch.values()])
    assert len(drawn.unique(dim=0)) == 25
    each = [
        0.3 * F.mse_loss(model(x[None], task)[0], logits) + 0.7 * F.cross_entropy(model(x[None], task)[0], y)
        for task, samples in batch.items()
        for x, y, logits in zip(samples.x, samples.y, samples.logits, strict=True)
    ]
    torch.testing.assert_close(DarkLoss(0.3, 0.7)(model, batch), torch.stack(each).mean())
    assert {task: len(samples) for task, samples in memory.draw((1, 2), 1000).items()} == {1: 20, 2: 20}


def test_without_logits_the_label_of_a_sample_gets_their_weight():
    model, memory = filled(tasks=(0,))
    held = memory.samples[0]
    logits = held.logits + 1.0
    logits[::3] = torch.nan
    held = replace(held, logits=logits)
    assert held.has_logits.tolist() == [n % 3 != 0 for n in range(20)]
    labels = F.cross_entropy(model(held.x, 0), held.y, reduction="none")
    dark = torch.where(held.has_logits, torch.tensor(1.0), labels)  # every logit is off by one
    loss = DarkLoss(0.3, 0.7)(model, {0: held})
    torch.testing.assert_close(loss, (0.3 * dark + 0.7 * labels).mean())
    loss.backward()
    assert all(bool(parameter.grad.isfinite().all()) for parameter in model.parameters())


def test_forgotten_samples_are_restored_only_after_a_failure():
    model, memory = filled()
    held = memory.samples
    with Transaction() as change:
        assert memory.forget([0, 2], change) == 40
        memory.renew(model, 1)
        assert list(memory.samples) == [1]
    assert memory.samples is held
    memory.forget([0, 2], Transaction())
    assert list(memory.samples) == [1]
