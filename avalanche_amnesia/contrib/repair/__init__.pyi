from .plugin import RepairPlugin as RepairPlugin
