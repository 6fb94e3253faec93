from .measuring import measure_run as measure_run
from .reference_workers import ReferenceWorkers as ReferenceWorkers
from .store import RunStore as RunStore
