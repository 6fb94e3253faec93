from .repair_plugin import RepairPlugin as RepairPlugin
