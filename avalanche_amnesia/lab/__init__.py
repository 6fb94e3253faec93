"""Studies: the run store, sweeps, executors, the report and the command line."""
