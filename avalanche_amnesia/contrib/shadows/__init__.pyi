from .plugin import BackupPlugin as BackupPlugin
