"""Parts that tests of several rooms share: networks, streams, strategies, faults, and slow twins of what is tested."""
