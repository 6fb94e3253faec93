"""Proofs that an unlearning was exact: bitwise comparison of the model's tensors with those of a retrained model."""

import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from datetime import UTC, datetime

from torch import nn

from avalanche_amnesia.audit.record import Proof, ProofError, UnlearningRecord
from avalanche_amnesia.bits import state_hashes
from avalanche_amnesia.ledger import RequestError
from avalanche_amnesia.processes import from_first


def refuse_approximate(record: UnlearningRecord) -> None:
    """Raise RequestError if an unlearning was only ``approximate``, so that a retrained model may have other bits."""
    if record.claim == "approximate":
        raise RequestError(
            f"this record is approximate ({record.reasons[0]}): only exact and conditional records can be proved; "
            "jsd_metrics(references) measures how far the model is from the retrained one"
        )


def provable_tasks(tasks: Collection[int], remaining: tuple[int, ...], model: nn.Module) -> tuple[int, ...]:
    """Return the tasks that a proof retrains and compares, in training order: ``tasks``, or all remaining if empty.

    RequestError if one does not remain or shares weights; ``model`` is a new model of the strategy.
    """
    if unknown := [task for task in tasks if task not in remaining]:
        raise RequestError(f"tasks={unknown} do not remain, so that they can't be proved: name some of {remaining}")
    if tasks and not getattr(model, "isolates", False):
        raise RequestError(
            f"tasks={list(tasks)}: tasks of a {type(model).__name__} share weights: leave out tasks= to prove all"
        )
    return tuple(task for task in remaining if task in tasks) if tasks else remaining


def with_proof(
    record: UnlearningRecord,
    hashes: Mapping[str, str],
    retrained: nn.Module,
    tasks: tuple[int, ...],
    *,
    apart: bool,
    seconds: float,
) -> UnlearningRecord:
    """Return the record with a proof if the model's tensors equal ``retrained``'s, bit for bit; else raise ProofError.

    Compared are the tensors of ``tasks``, and those of no task, with the model's ``hashes``, by name. ``apart``: the
    processes that retrained had not trained the unlearned data; ``seconds``: duration of the retraining.
    """

    def owner(name: str) -> int | None:
        found = re.match(r"heads\.(\d+)\.", name)
        return None if found is None else int(found[1])

    def select_tasks(named: Mapping[str, str]) -> dict[str, str]:
        return {name: digest for name, digest in named.items() if owner(name) in (None, *tasks)}

    here, there = select_tasks(hashes), select_tasks(state_hashes(retrained.state_dict()))
    differ = [name for name in {**here, **there} if here.get(name) != there.get(name)]
    if not differ:
        now = datetime.now(UTC).isoformat(timespec="seconds")
        return replace(record, proof=Proof(tasks, there, apart, *from_first((seconds, now))))
    if own := [(task, name) for task in tasks for name in differ if owner(name) == task]:
        task, first = own[0]
        tasks, remedy = (task,), f"unlearn task {task} and train it again"
        reason = f"task {task}, trained again without the unlearned data, has other bits, first in {first}"
    else:
        remedy = "train a new model"
        reason = f"a model trained again without the unlearned data has other bits, first in {differ[0]} of all tasks"
    remedy = f"make {', '.join(record.rests_on)} stateless, and train a new model" if record.rests_on else remedy
    plan = replace(record.plan, claim="approximate", reasons=(*record.reasons, reason), rests_on=())
    raise ProofError(
        f"{reason}. The model, its data, code, settings or software have changed since the training, or never gave the "
        f"same bits twice. The record is approximate from now on; for an exact one {remedy}",
        replace(record, plan=plan, proof=None),
        tasks,
    )
