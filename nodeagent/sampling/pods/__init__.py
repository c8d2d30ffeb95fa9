"""The pods of the node as its cgroups show them."""
