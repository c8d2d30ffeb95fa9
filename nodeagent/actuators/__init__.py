"""Every change outside this process: the Node object, pods, Leases, Events, cgroups, reclaim actions."""
