"""Trainings, requests and failures of one strategy, event by event, with all that must be true after each of them."""

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch
from avalanche.core import SupervisedPlugin
from avalanche.training.plugins import EWCPlugin
from torch import Tensor

from avalanche_amnesia.benchmarks import SplitDigits, UnlearningRequest, with_unlearning
from avalanche_amnesia.bits import same_bits, tensor_hash
from avalanche_amnesia.contrib.repair import RepairPlugin
from avalanche_amnesia.contrib.shadows import BackupPlugin
from avalanche_amnesia.ledger import RequestError
from avalanche_amnesia.models import TaskMaskedModel
from avalanche_amnesia.models.task_store import register_all
from avalanche_amnesia.training.host.lookup import find_plugin
from avalanche_amnesia.training.plugins.counterfactual import CounterfactualPlugin
from avalanche_amnesia.training.plugins.trajectory import TrajectoryPlugin
from avalanche_amnesia.trajectory.sparse import SparseValues
from avalanche_amnesia.transaction import Transaction
from avalanche_amnesia.unlearning.context import UnlearningContext, own_parameters
from avalanche_amnesia.unlearning.purging import register_purger
from support.fault_injection import FailsAtEvent, InjectedError, injected
from support.interruptions import give_up
from support.ledger_oracle import LedgerOracle
from support.residue_oracle import TaskResidue, decay_alone, integers, tensors_within
from support.scenario_strategies import NETS, MarkedUpdates, StrategyKind
from support.strategy_state import bits, fingerprint, trajectory, unlearning_plugin

TASKS = 5
BATCHES = 3  # of 10 samples, in one epoch
STREAM = with_unlearning(SplitDigits(n_train=150, n_test=50), ()).train_stream
IMAGES = [experience.tensors[0][:8] for experience in SplitDigits(n_train=150, n_test=50).test_stream]


class Scenario(SupervisedPlugin):
    """A strategy, an oracle of its ledger, and the checks; as a plugin of the strategy it sees every unlearning."""

    def __init__(self, kind: StrategyKind, *, marked: bool, net: str, optimizer: str, deadline: int | None) -> None:
        super().__init__()
        self.kind, self.marked, self.fails, self.oracle = kind, marked, FailsAtEvent(), LedgerOracle(deadline)
        others = {"net": NETS[net], "optimizer": optimizer, "plugins": [self, self.fails], "deadline": deadline}
        self.strategy = kind.make(MarkedUpdates(marked, **kind.options), **others)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.copy_((parameter * 8).round() / 8 if marked else parameter)
        self.initial = self.values()
        self.decayed = decay_alone(self.initial, self.strategy.optimizer, BATCHES * TASKS)
        self.updates: dict[int, dict[str, Tensor]] = {}
        self.logits: dict[int, str] = {}
        self.residue: dict[tuple[int, ...], TaskResidue] = {}
        self.state_before: Any = None
        self.staged: dict[tuple[int, ...], TaskResidue] = {}

    # State ----------------------------------------------------------------------------------------------------

    @property
    def model(self) -> Any:
        return self.strategy.model

    def parameter_values(self) -> dict[str, Tensor]:
        """Every parameter."""
        with register_all(self.model) as model:
            return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}

    def values(self) -> dict[str, Tensor]:
        """Values that all tasks share, in the last state between tasks."""
        snapshot = find_plugin(self.strategy, TrajectoryPlugin).snapshot
        values = self.parameter_values() if snapshot is None else snapshot.values
        return {name: values[name].clone() for name in self.parameter_values() if name.startswith("backbone.")}

    def expected(self) -> dict[str, Tensor]:
        """Initial values and the remaining tasks' updates: of a forgotten one the coefficient is 0."""
        result = {name: value.double() for name, value in self.initial.items()}
        for task in self.oracle.order:
            for name, update in self.updates[task].items():
                result[name] = result[name] + update
        return result

    def owned(self) -> dict[str, Tensor]:
        """Parameter → entries that some remaining task's mask covers."""
        result = {name: torch.zeros_like(value, dtype=torch.bool) for name, value in self.initial.items()}
        for masks in self.model.masks.values():
            for name, use in self.model.graph.parameter_use(masks).items():
                result[f"backbone.{name}"] |= (use > 0).expand_as(result[f"backbone.{name}"])
        return result

    def comparable_state(self) -> Any:
        """Everything that must stay where nothing may happen."""
        ewc, heads = find_plugin(self.strategy, EWCPlugin), find_plugin(self.strategy, CounterfactualPlugin)
        shadows, repair = (find_plugin(self.strategy, kind) for kind in (BackupPlugin, RepairPlugin))
        stores = [
            shadows and {task: {other: vars(b) for other, b in of.items()} for task, of in shadows.kept.items()},
            repair and {task: vars(samples) for task, samples in repair.memory.samples.items()},
            ewc and [dict(ewc.saved_params), dict(ewc.importances)],
            heads and [dict(heads.sources), {t: {w: vars(h) for w, h in of.items()} for t, of in heads.heads.items()}],
        ]
        return [part for part in fingerprint(self.strategy, stores) if part[0] != "current"]

    @torch.no_grad()
    def answers(self, tasks: Sequence[int] | None = None) -> dict[int, str]:
        """Hash of the logits of tasks, by default of every remaining one."""
        was = self.model.training
        self.model.eval()
        tasks = self.oracle.order if tasks is None else tasks
        result = {task: tensor_hash(self.model(IMAGES[task], task)) for task in tasks}
        self.model.train(was)
        return result

    # Events ---------------------------------------------------------------------------------------------------

    def train(self, task: int, request: UnlearningRequest | None, step: Any, failure: tuple[str, int] | None) -> None:
        """Train a task, with a request of the stream and something that goes wrong, maybe."""
        experience, before, self.state_before = STREAM[task], self.comparable_state(), None
        legal = task not in self.oracle.order and (request is None or self._allows(task, request))
        experience.requests = () if request is None else (request,)
        self.fails.event, self.fails.times = failure or ("", 0)
        try:
            with injected(step):
                self.strategy.train(experience)
            assert legal
        except InjectedError:
            if self.state_before is not None and not unlearning_plugin(self.strategy).records[self.oracle.n_requests :]:
                assert self.comparable_state() == self.state_before
        except ValueError:
            assert not legal
            assert self.comparable_state() == before
            return
        finally:
            self.fails.event, experience.requests = "", ()
        obeyed = self._enter_requests()
        if unlearning_plugin(self.strategy).current_task is not None:
            with pytest.raises(RequestError, match="interrupted"):
                unlearning_plugin(self.strategy).unlearn(self.strategy, [task])
            give_up(self.strategy)
            self.logits = self.answers() if obeyed else self.logits
        elif set(self.model.tasks) != set(unlearning_plugin(self.strategy).ledger.remaining):
            give_up(self.strategy)  # interrupted after the head was made, and before the plugin knew of the task
        self._enter_tasks()
        self.check()

    def _allows(self, task: int, request: UnlearningRequest) -> bool:
        oracle = deepcopy(self.oracle)
        if request.when == "after":
            oracle.learn(task)
        return oracle.allows(request.tasks)

    def request(self, tasks: Sequence[int], step: Any, failure: tuple[str, int] | None) -> None:
        """Plan and unlearn."""
        plugin, before, self.state_before = unlearning_plugin(self.strategy), self.comparable_state(), None
        if not self.oracle.allows(tasks):
            for ask in (plugin.plan, plugin.unlearn):
                with pytest.raises(RequestError):
                    ask(self.strategy, tasks)
                assert self.comparable_state() == before
            return
        plan = plugin.plan(self.strategy, tasks)
        assert self.comparable_state() == before
        self.fails.event, self.fails.times = failure or ("", 0)
        try:
            with injected(step):
                assert plugin.unlearn(self.strategy, tasks).plan == plan
        except InjectedError:
            assert self.comparable_state() == before
            assert plugin.plan(self.strategy, tasks) == plan
        finally:
            self.fails.event = ""
        self._enter_requests()
        self.check()

    def mark_permanent(self, tasks: Sequence[int]) -> None:
        """Declare tasks permanent."""
        if set(tasks) <= set(self.oracle.order):
            self.oracle.declared |= set(tasks)
            unlearning_plugin(self.strategy).mark_permanent(tasks)
        else:
            before = self.comparable_state()
            with pytest.raises(RequestError):
                unlearning_plugin(self.strategy).mark_permanent(tasks)
            assert self.comparable_state() == before
        self.check()

    def evaluate(self) -> None:
        """Evaluate, which changes nothing."""
        before = self.comparable_state()
        self.strategy.eval([STREAM[task] for task in self.oracle.order])
        assert self.comparable_state() == before
        self.check()

    # Around an unlearning -------------------------------------------------------------------------------------

    def before_unlearning(self, strategy: Any, **kwargs: Any) -> None:
        """Note everything, in front of the first change."""
        self._enter_tasks()
        self.state_before = self.comparable_state()
        self.had = self.parameter_values(), self.values(), self.answers(), bits(self.model)
        self.residue_of = {task: self._residue(task) for task in unlearning_plugin(strategy).current.tasks}

    def after_unlearning(self, strategy: Any, **kwargs: Any) -> None:
        """Compare the changes with plan and record; the unlearning can still be undone."""
        live, values, answers, hashes = self.had
        plan, record = unlearning_plugin(strategy).current, unlearning_plugin(strategy).records[-1]
        gone, now, state = plan.tasks, self.parameter_values(), bits(self.model)
        assert record.plan == plan
        assert record.remaining == tuple(task for task in self.oracle.order if task not in gone)
        moved = {name: int((~same_bits(value, live[name])).sum()) for name, value in now.items()}
        refitted = frozenset().union(*(own_parameters(self.model, task) for task in plan.compensated))
        if not self.kind.revises:
            assert dict(plan.entries) == {name: n for name, n in moved.items() if n and name not in refitted}
        changed = {name for name in hashes.keys() | state.keys() if hashes.get(name) != state.get(name)}
        assert [(c.name, c.before, c.after) for c in record.changes] == [
            (name, hashes.get(name), state.get(name)) for name in sorted(changed)
        ]
        assert set(hashes) - set(state) == set(plan.removed)
        for task, after in self.answers(record.remaining).items():
            assert after == answers[task] or not self._untouched(task, gone, record), (task, gone)
        if self.kind.keeps_shared:
            owned = self.owned()
            for name, value in self.values().items():
                assert torch.equal(value[owned[name]], values[name][owned[name]]), name
        self.staged = {(task,): self.residue_of[task] for task in gone}
        if not self.marked:  # values that these tasks wrote together, until one of them is trained again
            left = [live[name][~same_bits(value, live[name])] for name, value in now.items()]
            written = np.setdiff1d(integers(torch.cat(left)), self.decayed)
            self.staged.setdefault(gone, TaskResidue(None, [])).values.append(written)

    def _untouched(self, task: int, gone: Sequence[int], record: Any) -> bool:
        later = all(self.oracle.since[other] > self.oracle.since[task] for other in gone)
        # Where shadows of several tasks overlap the newest one's values stay, and earlier tasks read them from then on.
        later &= not (self.kind.revises and self.oracle.unlearned)
        return task not in record.affected or self.kind.keeps_shared or (self.kind.protects and later)

    def _residue(self, task: int) -> TaskResidue:
        own = list(self.model.heads[task].parameters())
        masked = isinstance(self.model, TaskMaskedModel)
        if hasattr(self.model, "task_embedding"):
            own.append(self.model.task_embedding(task))
        return TaskResidue(self.model.binary_mask(task) if masked else None, [integers(parameter) for parameter in own])

    def _enter_requests(self) -> bool:
        """Enter finished unlearnings into the oracle; return True if there were any."""
        records = unlearning_plugin(self.strategy).records[self.oracle.n_requests :]
        for record in records:
            self.oracle.forget(record.tasks)
            self.residue |= {tasks: residue for tasks, residue in self.staged.items() if {*tasks} <= {*record.tasks}}
            self.updates = {task: update for task, update in self.updates.items() if task not in record.tasks}
            self.logits = self.answers()
        self.staged = {}
        return bool(records)

    def _enter_tasks(self) -> None:
        """Enter a task whose training has come to its end."""
        for task in unlearning_plugin(self.strategy).ledger.remaining:
            if task in self.oracle.order:
                continue
            earlier = self.logits
            self.oracle.learn(task)
            self.residue = {tasks: of for tasks, of in self.residue.items() if task not in tasks}  # it is there again
            self.logits = self.answers()
            if self.kind.protects:
                assert {t: a for t, a in self.logits.items() if t != task} == earlier
            self.updates[task] = {}
            base = self.expected()
            self.updates[task] = {name: value.double() - base[name] for name, value in self.values().items()}

    # Invariants -----------------------------------------------------------------------------------------------

    def check(self) -> None:
        """All that holds between two events."""
        ledger, oracle = unlearning_plugin(self.strategy).ledger, self.oracle
        assert ledger.remaining == tuple(oracle.order) == trajectory(self.strategy).tasks
        assert (ledger.unlearned, ledger.unlearnable) == (tuple(oracle.unlearned), tuple(oracle.unlearnable))
        assert (ledger.permanent, ledger.n_trained) == (oracle.permanent, oracle.n)
        assert set(self.model.tasks) == set(oracle.order) == {int(t) for t in self.model.known_train_tasks_labels}
        assert self.answers() == self.logits
        values, expected = self.values(), self.expected()
        if isinstance(self.model, TaskMaskedModel):
            assert set(self.model.masks) == set(oracle.order)
            for name, owned in self.owned().items():
                assert bool(same_bits(values[name], self.initial[name])[~owned].all()), name
        if not (self.kind.keeps_shared or self.kind.revises):
            tolerance = self.kind.tolerance if self.marked else 1e-5
            for name, value in values.items():
                assert float((value.double() - expected[name]).abs().max()) <= tolerance, name
        reachable = [self.strategy.optimizer, getattr(self.strategy, "optimized_param_id", None), self.model]
        reachable += [p for p in self.strategy.plugins if p not in (self, self.fails, self.strategy.evaluator)]
        tensors = tensors_within(reachable)
        for log in trajectory(self.strategy).logs.values():
            tensors += [entry.values for entry in log.values() if isinstance(entry, SparseValues)]
        for tasks, residue in self.residue.items():
            assert not residue.found_in(tensors), f"tasks {tasks} left a trace"


@register_purger(Scenario)
def _purge_scenario(plugin: Scenario, context: UnlearningContext, change: Transaction) -> str:
    """Purge nothing: a scenario keeps data of every task for its comparisons."""
    return "the scenario: left as it is"
