"""Reads the node: /proc, cgroup v1 and v2, file systems, pressure stall information, netlink."""
