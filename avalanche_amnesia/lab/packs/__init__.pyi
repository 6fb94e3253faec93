from .opening import as_folder as as_folder
from .pack import PackedRun as PackedRun
from .pack import StatePack as StatePack
from .writing import export_states as export_states
