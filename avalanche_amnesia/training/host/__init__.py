"""Interface to Avalanche: events, arguments, stream requests, snapshots, and saved states of its plugins."""
