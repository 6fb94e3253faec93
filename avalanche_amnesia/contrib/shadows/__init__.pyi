from .backup_plugin import BackupPlugin as BackupPlugin
