"""Avalanche logger for Weights & Biases that supports current versions of wandb and unlearning events."""

import hashlib
import netrc
import os
import time
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, cast
from urllib.parse import urlsplit

from avalanche_amnesia import checks
from avalanche_amnesia.audit.record import UnlearningRecord
from avalanche_amnesia.evaluation.figures import Table
from avalanche_amnesia.logging.axes import AXES
from avalanche_amnesia.logging.payloads import Payload, is_image
from avalanche_amnesia.logging.run_logger import DEFAULT_PROJECT, RunLogger, is_about

Mode = Literal["online", "offline", "disabled"]
_OLD_NAMES = {"run": "online", "dryrun": "offline"}
"""Old names that WANDB_MODE still accepts."""
_FLUSH_SECONDS = 30.0
_QUIET_SECONDS = 0.2
_RECORD_TYPE = "unlearning-record"


class WandBWriter:
    """Writer of settings, metric values and unlearning records to a W&B run, used by :class:`WandBLogger`."""

    def __init__(self, run: Any) -> None:
        self.run = run
        for axis in AXES:
            run.define_metric(axis, hidden=True)  # an axis is no plot of its own

    def describe(self, settings: Mapping[str, Any], name: str | None) -> None:
        """Add the settings that the run's configuration lacks, and set the run's name unless it is None."""
        self.run.config.update({key: value for key, value in settings.items() if key not in self.run.config})
        if name is not None:
            self.run.name = name

    def define(self, metric: str, axis: str) -> None:
        """Set the x axis of a metric, and store its smallest, largest and last value in the summary."""
        name = metric.replace(".", r"\.")  # to W&B a bare dot separates the parts of a path
        self.run.define_metric(name, step_metric=axis, summary="min,max,last")

    def log(self, row: Mapping[str, Payload]) -> None:
        """Write a row of values; W&B's own step is only the number of the row."""
        self.run.log({name: _to_wandb(value) for name, value in row.items()})

    def note(self, texts: Mapping[str, str]) -> None:
        """Write texts by name into the run's summary."""
        self.run.summary.update(texts)

    def keep(self, record: UnlearningRecord, *, again: bool = False) -> None:
        """Store an unlearning's record as a W&B artefact; after a proof the record is stored as another artefact."""
        self.run.log_artifact(_artefact(record))

    def forget(self, tasks: tuple[int, ...]) -> None:
        """Remove the values of ``tasks`` from the run's summary."""
        for name in [name for name in self.run.summary.keys() if is_about(name, tasks)]:  # noqa: SIM118
            del self.run.summary[name]

    def finish(self, exit_code: int) -> None:
        """End the W&B run, and wait until an offline run's file is written."""
        self.run.finish(exit_code=exit_code)
        if self.run.offline and not self.run.disabled:
            _wait_until_written(Path(self.run.settings.sync_file))


def _artefact(record: UnlearningRecord) -> Any:
    """Return an unlearning's record as a W&B artefact, named by its tasks and a hash of its content."""
    import wandb

    of = "-".join(map(str, record.tasks)) if record.task is None else f"samples-of-{record.task}"
    name = f"unlearning-of-{of}-{hashlib.sha256(record.to_json().encode()).hexdigest()[:12]}"
    artefact = wandb.Artifact(name, type=_RECORD_TYPE, description=str(record))
    with artefact.new_file("record.json") as file:
        file.write(record.to_json())
    return artefact


def _to_wandb(value: Payload) -> Any:
    import wandb

    if isinstance(value, Table):
        return wandb.Table(columns=list(value.columns), data=[list(row) for row in value.rows], allow_mixed_types=True)
    return wandb.Image(value) if is_image(value) else value


class WandBLogger(RunLogger):
    """Avalanche logger that writes metrics, the table of events and each unlearning's record (as an artefact) to W&B.

    W&B's own step is only the number of the row. A pickled logger does not keep its run; give the loaded logger a run
    with `attach`. Of every number the smallest and largest value are in the summary, too.

    Args:
        run: a W&B run to log to, which the caller must finish; None: make a new run.
        project: project of the new run.
        name: its name; None: method and seed of the strategy.
        group: its group, e.g. one experiment with several seeds.
        job_type: its part in the group: "main", "reference", "full", "audit", or another word.
        config: further settings, in addition to the strategy's.
        dir: folder for its files (W&B makes `wandb/` there); made if missing.
        mode: "online", "offline", "disabled", or None: WANDB_MODE if set, else online if an API key is
            configured and offline otherwise, never a prompt.
        tags: its tags.

    Attributes:
        run_id: identifier of the run, also after `finish` and after loading.

    Raises:
        ValueError: unknown `mode` or WANDB_MODE, or arguments of a new run together with `run`.
        TypeError: `run` is not a W&B run, or `tags` is one string.
        NotADirectoryError: `dir` is a file.
    """

    def __init__(
        self,
        run: Any = None,
        *,
        project: str = DEFAULT_PROJECT,
        name: str | None = None,
        group: str | None = None,
        job_type: str | None = None,
        config: Mapping[str, Any] | None = None,
        dir: str | Path | None = None,
        mode: str | None = None,
        tags: Sequence[str] = (),
    ) -> None:
        if isinstance(tags, str):
            raise TypeError(f"tags={tags!r} is one string: pass a sequence of tags, e.g. tags=[{tags!r}]")
        named = run is not None or name is not None
        settings: dict[str, Any] = {"project": project, "name": name, "group": group, "job_type": job_type}
        settings |= {"config": config, "dir": dir, "mode": mode, "tags": list(tags)}
        if run is not None:
            defaults = {"project": DEFAULT_PROJECT, "tags": []}
            if beside := [name for name, value in settings.items() if value != defaults.get(name)]:
                raise ValueError(f"{', '.join(beside)} given with run: pass them to wandb.init, or leave run out")
            _check_run(run)
        else:
            import wandb

            settings |= {"mode": resolve_mode(mode), "job_type": job_type or "main"}
            settings |= {"config": None if config is None else dict(config), "dir": None if dir is None else str(dir)}
            if dir is not None and Path(dir).exists() and not Path(dir).is_dir():
                raise NotADirectoryError(f"dir={str(dir)!r} is a file: pass a folder, which is made if missing")
            run = wandb.init(**settings, reinit="create_new")  # a second logger in the process gets a second run
        super().__init__(WandBWriter(run), named=named)
        self.run_id: str = run.id

    @property
    def run(self) -> Any:
        """Return the W&B run; raise RuntimeError if it is finished, or if the logger was loaded without a run."""
        return self._get_writer().run

    def attach(self, run: Any) -> None:
        """Log to `run` from now on, and continue the x axes; only for an unpickled logger, which has lost its run.

        The settings of the next logged strategy are written to `run`; its name stays.

        Args:
            run: a W&B run, as `wandb.init` returns it.

        Raises:
            TypeError: `run` is not a W&B run.
            RuntimeError: the logger has or had a run already.
        """
        _check_run(run)
        if self._writer is not None:
            raise RuntimeError(f"this logger writes to the run {self.run_id}: make another WandBLogger for {run.id}")
        self._writer, self._finished, self._described, self._named = WandBWriter(run), False, False, True
        self._defined.clear()
        self.run_id = run.id

    def _no_run_text(self) -> str:
        if self._finished:
            return f"the W&B run {self.run_id} is finished and takes no more values: log to a new WandBLogger"
        return (
            f"this logger was loaded without its W&B run {self.run_id}: attach(wandb.init(id={self.run_id!r}, "
            "resume='allow')) goes on in it, attach(wandb.init()) in a new one"
        )


def _check_run(run: Any) -> None:
    import wandb

    if not isinstance(run, wandb.Run):
        raise TypeError(f"run is a {type(run).__name__}: pass what wandb.init returns, or None to have a run made")


def resolve_mode(mode: str | None) -> Mode:
    """Return the mode for `wandb.init` (online, offline, disabled), without using the network or asking the user."""
    # Read here because wandb keeps the environment of its first use in the process.
    variable = os.environ.get("WANDB_MODE", "")
    for name, given in (("mode", mode), ("WANDB_MODE", _OLD_NAMES.get(variable, variable) or None)):
        if given is not None:
            checks.one_of(name, given, Mode)
            return cast(Mode, given)

    import wandb

    settings = wandb.setup().settings
    if settings.mode in ("offline", "disabled"):
        return cast(Mode, settings.mode)
    return "online" if _has_credentials(settings) else "offline"


def _has_credentials(settings: Any) -> bool:
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE") or settings.api_key:
        return True
    host = urlsplit(settings.base_url).netloc
    # W&B's cloud has moved hosts; entries for the old one still log in.
    hosts = [host, "api.wandb.ai"] if host.endswith((".coreweave.com", ".wandb.ai")) else [host]
    given = os.environ.get("NETRC")
    for path in [given] if given else ["~/.netrc", "~/_netrc"]:
        with suppress(OSError, netrc.NetrcParseError):
            file = netrc.netrc(str(Path(path).expanduser()))
            if any((entry := file.authenticators(name)) and entry[2] for name in hosts):
                return True
    return False


def _wait_until_written(file: Path) -> None:
    """Wait until a run's file has stopped growing, because W&B may still write after `Run.finish` (seen with 0.31)."""
    deadline, size, unchanged_since = time.monotonic() + _FLUSH_SECONDS, -1, time.monotonic()
    while file.exists() and time.monotonic() - unchanged_since < _QUIET_SECONDS:
        if time.monotonic() > deadline:
            warnings.warn(f"W&B is still writing {file} {_FLUSH_SECONDS:.0f} s after the end of the run", stacklevel=3)
            return
        if (now := file.stat().st_size) != size:
            size, unchanged_since = now, time.monotonic()
        time.sleep(0.01)
