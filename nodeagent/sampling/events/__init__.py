"""Events of the kernel: PSI triggers, memcg thresholds, cgroup changes, forks."""
