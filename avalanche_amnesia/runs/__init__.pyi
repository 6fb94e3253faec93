from .store import Node as Node
from .store import RunStore as RunStore
from .store import StoredRun as StoredRun
