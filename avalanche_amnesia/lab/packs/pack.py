"""A pack read: runs of somebody else's study, with strategies and references that nobody has to train."""

import hashlib
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import yaml

from avalanche_amnesia import checks
from avalanche_amnesia.audit.record import UnlearningRecord, verify
from avalanche_amnesia.audit.signing import signed_by
from avalanche_amnesia.evaluation.references import References
from avalanche_amnesia.lab.packs.index import BLOBS, INDEX, read_index
from avalanche_amnesia.lab.study.building import build
from avalanche_amnesia.lab.study.experiment import SETTINGS, cell_of, folder_of
from avalanche_amnesia.saving.encoding import decode
from avalanche_amnesia.saving.files import Parts, as_state_error, read_state, writing
from avalanche_amnesia.saving.values import StateError
from avalanche_amnesia.training.host.lookup import unlearning_of
from avalanche_amnesia.training.host.saving import give_state
from avalanche_amnesia.training.host.states import load_model_state, unlike

_LARGEST = 2**28
"""Bytes of an index: more than that nobody's runs need, and a small archive could hold."""


class StatePack:
    """A pack of states, a file or a folder: what it says of itself is checked before anything in it is used.

    Only JSON and tensors are read, and no code from a pack is run. Everything that is read has the SHA-256 that
    the index gives it.

    Args:
        path: of what :func:`export_states` wrote.
        public_key: of the signer, as of :func:`~avalanche_amnesia.audit.verify`: index, states and records must be
            signed with it. None: signatures are not looked at.
        data_root: folder with the data sets that the runs were trained on, which are not in the pack; digits need none.
        download: let torchvision fetch data that is missing.
        trusted: run what settings name of somebody's own (``MODULE:NAME``, from where you work), and write where they
            say. Only for packs that you would take a script from.

    Attributes:
        runs: in it.

    Raises:
        StateError: if it is no pack, of another version, damaged or cut short; with a key, if its signature does not
            hold.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        public_key: Any = None,
        data_root: str | Path | None = None,
        download: bool = False,
        trusted: bool = False,
    ) -> None:
        self.path, self.key = checks.path("path", path), public_key
        self.data_root, self.download, self.trusted = data_root, download, trusted
        self.check = None if public_key is None else signed_by(public_key)
        if not self.path.exists():
            raise StateError(f"there is no pack {self.path}: give what amnesia export-states wrote")
        with as_state_error(self.path, f"{self.path} is no pack that can be read"):
            self._place: Any = self.path if self.path.is_dir() else zipfile.Path(self.path)
            if not (self._place / INDEX).is_file():
                raise StateError(f"it has no {INDEX}: give what amnesia export-states wrote")
            index = read_index(self._read(INDEX, _LARGEST).decode(), self.check)
            self._sizes: dict[str, int] = index["blobs"]
            for blob in self._sizes:
                if not (self._place / BLOBS / blob).is_file():
                    raise StateError(f"it lacks {blob}, it was cut short")
        self.runs = [PackedRun(self, entry) for entry in index["runs"]]

    def run(self, method: str | None = None, **named: Any) -> "PackedRun":
        """The run of these names.

        Args:
            method: name of its row in the tables; None: of any.
            named: ``seed``, ``scenario`` and ``experiment``, as far as needed to tell it from others.

        Raises:
            ValueError: if there is none, or several.
        """
        checks.known_options(named, ("seed", "scenario", "experiment"), "StatePack.run")
        wanted = named | ({} if method is None else {"method": method})
        found = [run for run in self.runs if all(getattr(run, name) == value for name, value in wanted.items())]
        if len(found) != 1:
            what = f"{len(found)} runs" if found else "no run"
            listed = ", ".join(map(str, found or self.runs))
            raise ValueError(f"{self.path} has {what} with {wanted or 'no further names'}: {listed:.500}")
        return found[0]

    def unpack(self, to: str | Path, *, states: bool = True) -> Path:
        """Write the pack as folders of runs, as ``amnesia run`` does, with their states beside: all or nothing.

        Args:
            to: a folder that does not exist yet.
            states: whether states are written, each of which ``load_state`` and ``amnesia unlearn`` read; else only
                logs, records and settings.

        Raises:
            StateError: if a blob is damaged; nothing was written.
            ValueError: if ``to`` is there.
        """
        to = Path(to)
        if to.exists():
            raise ValueError(f"{to} is there already: name a new folder")
        with writing(to):
            to.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=to.parent, prefix=f"{to.name}.part-") as made:
                whole = Path(made) / "whole"
                for run in self.runs:
                    run.unpack(folder_of(run.cell, whole), states)
                whole.rename(to)
        return to

    def write(self, files: Mapping[str, str], folder: Path) -> None:
        """Write blobs as files of a folder; an error where one is not as the index says."""
        for name, blob in files.items():
            with as_state_error(self.path, f"{self.path} is damaged"):
                content = self._read(f"{BLOBS}/{blob}", self._sizes[blob])
                if hashlib.sha256(content).hexdigest() != blob:
                    raise StateError(f"{blob} has another content than its name says")
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)

    def _read(self, name: str, most: int) -> bytes:
        with (self._place / name).open("rb") as file:  # an archive may say of a file that it is larger than it is
            content: bytes = file.read(most + 1)
        if len(content) > most:
            raise StateError(f"{name} has more bytes than the {most:,} that it may have")
        return content

    def __repr__(self) -> str:
        return f"StatePack({str(self.path)!r}): {len(self.runs)} runs, {sum(self._sizes.values()):,} bytes of blobs"


class PackedRun:
    """One run of a pack: a method under a request scenario with a seed.

    Attributes:
        entry: what the index says of it.
        settings: all settings of the run, defaults included.
        experiment, method, scenario, seed: its names.
        trained, unlearned, remaining: tasks.
    """

    def __init__(self, pack: StatePack, entry: Mapping[str, Any]) -> None:
        self._pack, self.entry = pack, entry
        self.settings: dict[str, Any] = entry["settings"]
        self.experiment, self.seed = self.settings["experiment"], self.settings["seed"]
        self.method, self.scenario = (self.settings[what]["name"] for what in ("method", "scenario"))
        self.trained, self.unlearned, self.remaining = (
            tuple(entry[what]) for what in ("trained", "unlearned", "remaining")
        )

    def __str__(self) -> str:
        return f"{self.experiment}, {self.method}, {self.scenario}, seed {self.seed}"

    @cached_property
    def cell(self) -> Any:
        """The run as the study has it."""
        with as_state_error(self._pack.path, f"{self._pack.path}, {self}: no run has these settings"):
            return cell_of(self.settings)

    @cached_property
    def records(self) -> list[UnlearningRecord]:
        """Records of its unlearnings, in order; with a public key verified."""
        read = UnlearningRecord.from_json if self._pack.key is None else partial(verify, public_key=self._pack.key)
        with tempfile.TemporaryDirectory() as made:
            files = {name: blob for name, blob in self.entry["files"].items() if name.startswith("records/")}
            self._pack.write(files, Path(made))
            return [read((Path(made) / name).read_text()) for name in files]

    @cached_property
    def _built(self) -> tuple[Any, Any]:
        foreign = [] if self._pack.trusted else list(_foreign(self.settings))
        if foreign:
            raise StateError(
                f"{self._pack.path}, {self}: {foreign[0]} is code of somebody's own, or a place on a disk. Look at it, "
                "and say StatePack(…, trusted=True) if it may be used; or build the strategy yourself, and load_state "
                "what unpack() wrote"
            )
        return build(self.cell, self._pack.data_root, self._pack.download)

    @property
    def benchmark(self) -> Any:
        """The stream that it was trained on, with its requests; a FileNotFoundError says which data is missing."""
        return self._built[0]

    def strategy(self, *, before: bool = False, **options: Any) -> Any:
        """Make the strategy as the run ended.

        Args:
            before: in its place the one that learned all tasks and got no request, where the pack has it.
            options: further arguments of the strategy, such as ``evaluator``.

        Raises:
            StateError: for a state that is damaged, not there, or of another strategy than the settings say.
        """
        what = "before" if before else "end"
        if what not in self.entry:
            raise StateError(
                f"{self._pack.path}, {self}: it was packed without the strategy before any request, which only "
                "amnesia export-states --all packs, and not of pools that are dealt by the requests"
            )
        strategy = self._built[1](**options)
        give_state(strategy, partial(self._state, self.entry[what]), Path(f"{self._pack.path}, {self}, {what}"))
        return strategy

    def references(self) -> References:
        """References of the run, which have the models of the pack; others they would train.

        Raises:
            StateError: as of :meth:`strategy`.
        """
        references = References(self._built[1], self.benchmark)
        plugin = unlearning_of(self.strategy())
        of_its_data = references if plugin is None else references.of(plugin)
        for each in self.entry["references"]:
            model = references.fresh_strategy(each["variant"]).model
            place = f"{self._pack.path}, {self}, reference {each['variant']} of {each['tasks']}"
            with as_state_error(Path(place), f"{place} can't be loaded"):
                state = decode(*self._state(each["model"]))["model"]
                other = unlike(model, state)
                if other is not None:
                    raise StateError(f"it is another model: {other}")
                load_model_state(model, state)
            of_its_data.put(each["tasks"], model, each["variant"])
        return references

    def unpack(self, folder: Path, states: bool) -> None:
        """Write the run as a folder of its own; an error where that is there."""
        if folder.exists():
            raise StateError(f"{self._pack.path} holds {self} twice")
        folder.mkdir(parents=True)
        self._pack.write(self.entry["files"], folder)
        (folder / SETTINGS).write_text(yaml.safe_dump(self.settings, sort_keys=False, allow_unicode=True))
        if not states:
            return
        kept = {name: self.entry[name] for name in ("end", "before") if name in self.entry}
        for each in self.entry["references"]:
            kept["-".join(map(str, (f"references/{each['variant']}", *each["tasks"])))] = each["model"]
        for name, files in kept.items():
            self._pack.write(files, folder / name)

    def _state(self, files: Mapping[str, str]) -> tuple[dict[str, Any], Parts]:
        with tempfile.TemporaryDirectory() as made:
            self._pack.write(files, Path(made))
            return read_state(Path(made), check=self._pack.check)


def _foreign(settings: Any, place: str = "") -> Iterator[str]:
    """Texts in settings that are more than a word: names of modules, and places on a disk."""
    if isinstance(settings, str) and place not in _LABELS and any(sign in settings for sign in ":/\\"):
        yield f"{place}={settings}"
    inside = enumerate(settings) if isinstance(settings, list) else ()
    for name, value in settings.items() if isinstance(settings, dict) else inside:
        yield from _foreign(value, f"{place}.{name}".lstrip("."))


_LABELS = ("experiment", "method.name", "scenario.name")
"""Settings that name rows and folders only."""
