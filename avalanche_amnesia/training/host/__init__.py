"""Interface to Avalanche: events, arguments, a stream's unlearning requests, snapshots, and saved states."""
