"""The pods of the node: their cgroups, what they use, their names, and the join with the pods of the API server."""
