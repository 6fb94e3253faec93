from .process import ProcessExecutor as ProcessExecutor
