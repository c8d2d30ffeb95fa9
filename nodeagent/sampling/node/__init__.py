"""The signals of the node: memory, PIDs, file systems, PSI."""
