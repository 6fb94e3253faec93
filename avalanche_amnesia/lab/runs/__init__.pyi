from .measuring import measure_run as measure_run
from .reference_workers import ReferenceWorkers as ReferenceWorkers
from .store import Node as Node
from .store import RunStore as RunStore
from .store import StoredRun as StoredRun
