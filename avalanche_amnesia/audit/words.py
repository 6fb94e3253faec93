"""Plain-text summaries of unlearning plans and of records of unlearnings."""

from __future__ import annotations

import textwrap
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from avalanche_amnesia.audit.record import UnlearningPlan, UnlearningRecord

PROVED = "exact, proved"
"""Claim of a record with a proof, in words."""
_WIDTH = 60
_INDENT = 15


def plan_in_words(plan: UnlearningPlan) -> str:
    """Return a plain-text summary of an unlearning plan, at most 60 columns wide."""
    rows = [*_plan_rows(plan), *_claim_rows(plan, "will be")]
    return _summary(f"Plan: unlearn {data_in_words(plan)} ({plan.event})", rows)


def record_in_words(record: UnlearningRecord) -> str:
    """Return a plain-text summary of an unlearning's record, at most 60 columns wide."""
    rows = [*_plan_rows(record.plan), ("remaining", _numbers(record.remaining) or "no task")]
    rows += [("cleaned", line) for line in record.purged]
    rows += [*(_claim_rows(record.plan, "is") if not record.proved else ()), *_proof_rows(record)]
    rows += [("took", seconds_in_words(record.seconds))]
    return _summary(f"Unlearned {data_in_words(record.plan)} ({record.plan.event})", rows)


def tasks_in_words(tasks: Collection[int]) -> str:
    """Return tasks as text: ``task 2``, or ``tasks 0, 2``."""
    return f"task {next(iter(tasks))}" if len(tasks) == 1 else f"tasks {_numbers(tasks)}"


def data_in_words(plan: UnlearningPlan) -> str:
    """Return the unlearned tasks or samples as text: ``tasks 0, 2``, or ``12 samples of task 2 (all of classes 1)``."""
    if plan.task is None:
        return tasks_in_words(plan.tasks)
    whole = f" (all of classes {_numbers(plan.classes)})" if plan.classes else ""
    n = len(plan.samples)
    return f"{n} sample{'s' * (n > 1)} of task {plan.task}{whole}"


def outcome_in_words(record: UnlearningRecord, state: object, before: object) -> list[str]:
    """Return sentences on data deleted from a saved state, the guarantee, and copies of the data that still exist.

    ``state`` is the directory of the new state, ``before`` that of the old state; equal if the state was replaced.
    """
    plan, removed = record.plan, data_in_words(record.plan)
    told = [f"{removed[0].upper()}{removed[1:]}: removed from {state}."]
    if plan.claim == "exact":
        told.append("It equals, bit for bit, a state that never had any of it (exact).")
    elif plan.claim == "conditional":
        told.append(
            "It equals, bit for bit, a state that never had any of it, if these depend on nothing but their inputs "
            f"and the seeded random streams (exact if stateless): {', '.join(plan.rests_on)}."
        )
    else:
        told.append("That it equals a state which never had any of it is not proven (approximate): see the reasons.")
    if plan.shared:
        entries = sum(shared.entries for shared in plan.shared.values())
        told.append(f"{entries:,} weights that it trained are unchanged, as remaining tasks use them.")
    if state != before:
        told.append(f"{before} is unchanged and still contains all of it: delete it.")
    told.append("Other copies were not touched.")
    return told


def seconds_in_words(seconds: float) -> str:
    """Return a time as text with a unit that fits: ``24 ms``, ``3.2 s``, ``5.0 min``."""
    if seconds < 1:
        return f"{1000 * seconds:.0f} ms"
    return f"{seconds:.1f} s" if seconds < 120 else f"{seconds / 60:.1f} min"


def wrap(text: str) -> list[str]:
    """Return a text as lines of at most 60 columns; all but the first are indented, and a long path is not broken."""
    return textwrap.wrap(text, _WIDTH, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)


def _plan_rows(plan: UnlearningPlan) -> Iterator[tuple[str, str]]:
    if entries := sum(plan.entries.values()):
        yield "taken out", f"{entries:,} entries of {len(plan.entries)} shared tensors"
    if plan.removed:
        shown = (*plan.removed[:4], "…") if len(plan.removed) > 4 else plan.removed
        yield "removed", f"{len(plan.removed)} tensors of their own: {', '.join(shown)}"
    if plan.trajectory_bytes:
        yield "freed", f"{plan.trajectory_bytes:,} bytes of trajectory"
    if plan.affected:
        yield "affected", f"{tasks_in_words(plan.affected)} used entries that change"
    if plan.compensated:
        yield "compensated", tasks_in_words(plan.compensated)
    if plan.repaired:
        yield "repaired", f"{tasks_in_words(plan.repaired)}, on kept samples"
    if plan.unpurged:
        yield "not cleaned", ", ".join(plan.unpurged)


def _claim_rows(plan: UnlearningPlan, verb: str) -> Iterator[tuple[str, str]]:
    if plan.claim == "exact":
        removed = data_in_words(plan)
        yield "claim", f"exact: the state {verb} that of a run which never saw {removed}, bit for bit"
    elif plan.claim == "conditional":
        yield "claim", f"exact if stateless: the state {verb} that of a run which never saw {data_in_words(plan)} if"
        yield from (("", f"- {part}") for part in plan.rests_on)
        yield "", "depend on nothing but their inputs and the global generators of torch, numpy and random"
    else:
        yield "claim", "approximate, because"
        yield from (("", f"- {reason}") for reason in plan.reasons)


def _proof_rows(record: UnlearningRecord) -> Iterator[tuple[str, str]]:
    proof = record.proof
    if proof is not None:
        which = tasks_in_words(proof.tasks) if proof.tasks else "a new model"
        known = record.plan.claim == "conditional" and not proof.apart
        text = f"{which} trained without these data gave the same bits in all of {len(proof.hashes)} tensors"
        text += "; the claim stays, as this process had known these data" if known else ""
        yield ("claim", f"{PROVED}: {text}") if record.proved else ("proof", text)


def claim_in_words(record: UnlearningRecord) -> str:
    """Return ``exact, proved`` if a retrained model was equal, else a record's claim, such as ``approximate``."""
    return PROVED if record.proved else record.claim


def _numbers(tasks: Collection[int]) -> str:
    return ", ".join(map(str, tasks))


def _summary(title: str, rows: Sequence[tuple[str, str]]) -> str:
    lines, last = [title], None
    for label, text in rows:
        shown = "" if label == last else label
        lines += textwrap.wrap(
            text, _WIDTH, initial_indent=f"  {shown:{_INDENT - 2}}", subsequent_indent=" " * (_INDENT + 2 * (not label))
        )
        last = label
    return "\n".join(lines)
