"""Commands on a saved state: ``amnesia unlearn`` and ``amnesia verify``."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from avalanche_amnesia.runs.factories import named


def add_state_commands(commands: Any) -> None:
    """Add the commands to a parser's subcommands."""
    unlearn = commands.add_parser("unlearn", help="unlearn tasks of a saved state")
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
    unlearn.set_defaults(run=_unlearn)
    verify = commands.add_parser("verify", help="check a record's signature, and a saved state against a record")
    verify.add_argument("record", type=Path, help="JSON file of the unlearning, signed or not")
    verify.add_argument("--public-key", type=Path, default=None, help="PEM file of the record's signer")
    verify.add_argument("--state", type=Path, default=None, help="state that shall be as the unlearning left it")
    verify.set_defaults(run=_verify)


def _unlearn(options: argparse.Namespace) -> int:
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
    record = unlearning.unlearn(strategy, options.tasks, fingerprint=True, strict=options.strict)
    text = record.to_json() if options.sign is None else record.sign(options.sign.read_bytes())
    # The record first: a state whose task went without one would be worse than a record whose state is still to come.
    part = options.record.with_name(f"{options.record.name}.part")
    part.write_text(text + "\n")
    save_state(strategy, out)
    os.replace(part, options.record)
    sys.stdout.write(f"{record}\n\nstate: {out}\nrecord: {options.record}\n")
    return 0


def _verify(options: argparse.Namespace) -> int:
    from avalanche_amnesia.audit.record import UnlearningRecord
    from avalanche_amnesia.audit.signing import verify
    from avalanche_amnesia.bits import state_hashes

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

    here, left = state_hashes(saved_tensors(options.state)), record.after
    other = sorted(name for name in {*here, *left} if here.get(name) != left.get(name))
    if other:
        sys.stdout.write(f"state: not as the unlearning left it; {len(other)} tensors differ: {', '.join(other[:5])}\n")
        return 1
    sys.stdout.write(f"state: all {len(here)} tensors are as the unlearning left them\n")
    return 0
