"""Commands on states and records: ``amnesia unlearn``, ``amnesia verify`` and ``amnesia audit``."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from jsonargparse import Namespace

from avalanche_amnesia.lab.runs.factories import named
from avalanche_amnesia.lab.runs.parser import Commands


def add_state_commands(commands: Commands) -> None:
    """Add the commands to the program's."""
    unlearn = commands.add("unlearn", _unlearn, "unlearn tasks of a saved state")
    unlearn.add_argument("state", type=Path, metavar="STATE", help="directory that strategy.save(path) made")
    unlearn.add_argument("--tasks", type=int, nargs="+", required=True, metavar="TASK", help="labels, from 0")
    unlearn.add_argument(
        "--factory",
        required=True,
        metavar="MODULE:FUNCTION",
        help="function without arguments that builds the strategy as the saved one was built, untrained",
    )
    unlearn.add_argument("--record", type=Path, required=True, help="JSON file that receives the record")
    unlearn.add_argument("--out", type=Path, default=None, help="directory for the new state; by default STATE itself")
    unlearn.add_argument("--sign", type=Path, default=None, metavar="PEM", help="private key that signs the record")
    unlearn.add_argument("--strict", action="store_true", help="refuse a state that something else has written into")
    verify = commands.add("verify", _verify, "check a record's signature, and a saved state against a record")
    verify.add_argument("record", type=Path, help="JSON file of the unlearning, signed or not")
    verify.add_argument("--public-key", type=Path, default=None, help="PEM file of the record's signer")
    verify.add_argument("--state", type=Path, default=None, help="state that shall be as the unlearning left it")
    audit = commands.add("audit", _audit, "look through files for what is left of unlearned tasks")
    audit.add_argument("path", type=Path, metavar="DIRECTORY", help="folder (or file) to look through")
    audit.add_argument("--record", type=Path, required=True, help="JSON file of the unlearning, signed or not")
    audit.add_argument("--public-key", type=Path, default=None, help="PEM file of the record's signer, to verify it")


def _unlearn(options: Namespace) -> int:
    from avalanche_amnesia.contrib.residue_search import take_fingerprint
    from avalanche_amnesia.saving.files import refuse_foreign
    from avalanche_amnesia.training.host.lookup import unlearning_of
    from avalanche_amnesia.training.host.saving import load_state, save_state

    out = options.state if options.out is None else options.out
    refuse_foreign(out)
    strategy = named(options.factory, "--factory")()
    load_state(strategy, options.state)
    unlearning = unlearning_of(strategy)
    if unlearning is None:
        raise ValueError(f"{options.factory} builds a {type(strategy).__name__}, which does not unlearn")
    record = unlearning.unlearn(strategy, options.tasks, fingerprint=take_fingerprint, strict=options.strict)
    text = record.to_json() if options.sign is None else record.sign(options.sign.read_bytes())
    # The record first: a state whose task went without one would be worse than a record whose state is still to come.
    part = options.record.with_name(f"{options.record.name}.part")
    part.write_text(text + "\n")
    save_state(strategy, out)
    os.replace(part, options.record)
    sys.stdout.write(f"{record}\n\nstate: {out}\nrecord: {options.record}\n")
    return 0


def _verify(options: Namespace) -> int:
    from avalanche_amnesia.audit.record import UnlearningRecord, verify
    from avalanche_amnesia.bits import fits

    if options.public_key is None:
        record = UnlearningRecord.load(options.record)
        said = "read; its signature was not checked (--public-key)"
    else:
        record = verify(options.record.read_text(), options.public_key.read_bytes())
        said = "signed by the holder of this key, and unchanged"
    sys.stdout.write(f"record: {said}\n")
    if options.state is None:
        return 0
    from avalanche_amnesia.training.host.saving import saved_tensors

    here, left = saved_tensors(options.state), record.after
    other = sorted({*here, *left} - {name for name in here.keys() & left if fits(here[name], left[name])})
    if other:
        sys.stdout.write(f"state: not as the unlearning left it; {len(other)} tensors differ: {', '.join(other[:5])}\n")
        return 1
    sys.stdout.write(f"state: all {len(here)} tensors are as the unlearning left them\n")
    return 0


def _audit(options: Namespace) -> int:
    from avalanche_amnesia.audit.record import UnlearningRecord, verify
    from avalanche_amnesia.contrib.residue_search.scan import audit

    if options.public_key is None:
        record = UnlearningRecord.load(options.record)
    else:
        record = verify(options.record.read_text(), options.public_key.read_bytes())
    report = audit(options.path, record)
    sys.stdout.write(report.table() + "\n")
    if not report.clean:
        return 1
    return 3 if report.unread else 0
